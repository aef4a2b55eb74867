"""Models: any callable, networks with a cache and their loaders, n-gram models, bundled models."""

from jaxspec.models.bundled import bundled_ngrams, bundled_pair, bundled_providers, bundled_text
from jaxspec.models.detokenizer import Detokenizer, StopText
from jaxspec.models.llama import LlamaConfig, init_llama, llama, rope_frequencies
from jaxspec.models.load.fields import CheckpointError, CheckpointWarning
from jaxspec.models.load.gguf import load_gguf
from jaxspec.models.load.huggingface import load_huggingface
from jaxspec.models.load.smollm2 import chat_prompt, load_smollm2
from jaxspec.models.load.tokenizers import TextTokenizer
from jaxspec.models.load.tunix import from_tunix
from jaxspec.models.network import (
    Block,
    CacheError,
    ForwardError,
    LanguageModel,
    TokensDifferError,
)
from jaxspec.models.ngram import NGram, fit_ngram
from jaxspec.models.provider import (
    Answer,
    AnswerError,
    ImpureProviderError,
    Provider,
    Query,
    Softmax,
    Usage,
    audit_provider,
)
from jaxspec.models.text import CharacterTokenizer, split_text

__all__ = (
    "Answer",
    "AnswerError",
    "Block",
    "CacheError",
    "CharacterTokenizer",
    "CheckpointError",
    "CheckpointWarning",
    "Detokenizer",
    "ForwardError",
    "ImpureProviderError",
    "LanguageModel",
    "LlamaConfig",
    "NGram",
    "Provider",
    "Query",
    "Softmax",
    "StopText",
    "TextTokenizer",
    "TokensDifferError",
    "Usage",
    "audit_provider",
    "bundled_ngrams",
    "bundled_pair",
    "bundled_providers",
    "bundled_text",
    "chat_prompt",
    "fit_ngram",
    "from_tunix",
    "init_llama",
    "llama",
    "load_gguf",
    "load_huggingface",
    "load_smollm2",
    "rope_frequencies",
    "split_text",
)
