"""Models to verify with: n-gram models counted from a text that comes with the package."""

from jaxspec.models.ngram import (
    ContextError,
    ContextTable,
    NGram,
    TextError,
    bits_per_character,
    decode,
    encode,
    fit_ngram,
    shipped_pair,
    shipped_text,
    split_text,
)

__all__ = (
    "ContextError",
    "ContextTable",
    "NGram",
    "TextError",
    "bits_per_character",
    "decode",
    "encode",
    "fit_ngram",
    "shipped_pair",
    "shipped_text",
    "split_text",
)
