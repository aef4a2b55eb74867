"""Models to verify with: n-gram models counted from a text that comes with the package."""

from jaxspec.models.ngram import ContextTable, NGram, bits_per_character, fit_ngram
from jaxspec.models.shipped import shipped_pair, shipped_providers, shipped_text
from jaxspec.models.text import ContextError, TextError, decode, encode, split_text

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
    "shipped_providers",
    "shipped_text",
    "split_text",
)
