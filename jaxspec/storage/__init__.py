"""Stored things: JSON and npz files of plain values and arrays, and typed reading of them."""

from jaxspec.storage.files import RecordError, load, save

__all__ = ("RecordError", "load", "save")
