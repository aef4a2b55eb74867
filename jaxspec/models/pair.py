"""A target and a draft that come with the package: characters of the King James Bible."""

import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.models.llama import llama
from jaxspec.models.load.huggingface import LAYOUT, load_config
from jaxspec.models.load.tensors import params_from_tensors
from jaxspec.models.network import LanguageModel
from jaxspec.models.text import decode, encode

_DATA = pathlib.Path(__file__).parent / "data" / "pair"


class CharacterTokenizer:
    """One token a character; implements `jaxspec.models.network.Tokenizer`.

    >>> tokenizer = CharacterTokenizer("abc")
    >>> tokenizer.encode("cab"), tokenizer.decode([2, 0, 1])
    ([2, 0, 1], 'cab')
    """

    def __init__(self, alphabet: str) -> None:
        """Take the sorted distinct characters, in the order of their ids."""
        self.alphabet = alphabet

    @property
    def pieces(self) -> Sequence[str]:
        """The character of each id."""
        return tuple(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Return the id of every character; a strange one is a `TextError`."""
        return encode(text, self.alphabet).tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids; an id outside the alphabet is a `ContextError`."""
        return decode(tokens, self.alphabet)


@functools.lru_cache(maxsize=4)
def bundled_pair(dtype: Any = jnp.float32) -> tuple[LanguageModel, LanguageModel]:
    """Return the target and the draft that come with the package.

    Networks of characters, trained on the training part of the shipped text; they share one
    alphabet. `data/pair/README.md` says how they were made and what they are worth.

    Args:
      dtype: what they compute in.

    Returns:
      (target, draft), read once per dtype.
    """
    return _load("target", "kjv-1.6M", dtype), _load("draft", "kjv-0.1M", dtype)


def _load(which: str, name: str, dtype: Any) -> LanguageModel:
    """Read a network as `load_huggingface` would, but without the libraries that one needs."""
    place = _DATA / which
    config = load_config(place)
    tensors = _half_tensors(place / "model.safetensors")
    vocabulary = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    return llama(
        config,
        params_from_tensors(config, tensors, LAYOUT, dtype, f"shipped {which}"),
        name=name,
        tokenizer=CharacterTokenizer("".join(vocabulary["model"]["vocab"])),
    )


def _half_tensors(path: pathlib.Path) -> dict[str, Callable[[], np.ndarray]]:
    """Return the float16 tensors of a file: a header of 8 bytes its length, JSON, then the data."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    described = json.loads(content[8:start])
    described.pop("__metadata__", None)

    def tensor(of: dict[str, Any]) -> np.ndarray:
        begin, end = of["data_offsets"]
        return np.frombuffer(content[start + begin : start + end], "<f2").reshape(of["shape"])

    return {name: functools.partial(tensor, of) for name, of in described.items()}
