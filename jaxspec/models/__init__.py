"""Models to verify with: networks in plain JAX, n-gram models, and what comes with the package."""

from jaxspec.models.bundled import bundled_ngrams, bundled_providers, bundled_text
from jaxspec.models.detokenizer import Detokenizer
from jaxspec.models.llama import (
    LlamaConfig,
    LlamaParams,
    in_panels,
    init_llama,
    llama,
    rope_frequencies,
)
from jaxspec.models.load.fields import CheckpointError, CheckpointWarning
from jaxspec.models.load.gguf import load_gguf
from jaxspec.models.load.huggingface import load_huggingface
from jaxspec.models.load.smollm2 import chat_prompt, load_smollm2
from jaxspec.models.load.tokenizers import TextTokenizer
from jaxspec.models.load.tunix import from_tunix
from jaxspec.models.ngram import ContextTable, NGram, bits_per_character, fit_ngram
from jaxspec.models.pair import CharacterTokenizer, bundled_pair
from jaxspec.models.stop_text import StopText
from jaxspec.models.text import ContextError, TextError, decode, encode, split_text
from training.save import save_huggingface

__all__ = (
    "CharacterTokenizer",
    "CheckpointError",
    "CheckpointWarning",
    "ContextError",
    "ContextTable",
    "Detokenizer",
    "LlamaConfig",
    "LlamaParams",
    "NGram",
    "StopText",
    "TextError",
    "TextTokenizer",
    "bits_per_character",
    "bundled_ngrams",
    "bundled_pair",
    "bundled_providers",
    "bundled_text",
    "chat_prompt",
    "decode",
    "encode",
    "fit_ngram",
    "from_tunix",
    "in_panels",
    "init_llama",
    "llama",
    "load_gguf",
    "load_huggingface",
    "load_smollm2",
    "rope_frequencies",
    "save_huggingface",
    "split_text",
)
