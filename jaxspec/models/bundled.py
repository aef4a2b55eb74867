"""Bundled with the package: a text, n-gram models counted from it, and a pair of trained networks."""

import functools
import importlib.resources
import json
import lzma
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.models.llama import llama
from jaxspec.models.load.huggingface import LAYOUT, load_config
from jaxspec.models.load.tensors import params_from_tensors
from jaxspec.models.network import LanguageModel
from jaxspec.models.ngram import NGram, fit_ngram
from jaxspec.models.provider import Provider
from jaxspec.models.text import CharacterTokenizer, split_text

_DATA = importlib.resources.files("jaxspec.models") / "data"


@functools.lru_cache(maxsize=1)
def bundled_text() -> str:
    r"""Return the bundled text: the King James Bible, 1611, public domain.

    4,153,207 ASCII characters, 73 symbols; `data/README.md` has its source.

    >>> bundled_text()[11:66]
    'In the beginning God created the heaven and the earth.\n'
    """
    return lzma.decompress((_DATA / "kjv.txt.xz").read_bytes()).decode("ascii")


def bundled_ngrams(target_order: int = 5, draft_order: int = 3) -> tuple[NGram, NGram]:
    """Return a target and a draft counted from the training part of the bundled text.

    They share their tables and one alphabet, that of the whole bundled text, so that held-out text
    can be encoded. Over held-out contexts E sum_x min(p(x), q(x)), the probability that the target
    keeps a token of the draft, is 0.64 for the default pair, 0.45 for a 2-gram draft, 0.82 for a
    4-gram.

    Args:
      target_order: order of the target, at least 0.
      draft_order: order of the draft, at least 0; it may exceed the target's.

    Returns:
      (target, draft); counting takes a second or two, once per greatest order.

    Raises:
      TextError: a negative order, or one longer than the text.

    >>> target, draft = bundled_ngrams()
    >>> target.order, draft.order, target.alphabet == draft.alphabet
    (5, 3, True)
    """
    model = _counted(max(target_order, draft_order))
    return model.truncated(target_order), model.truncated(draft_order)


def bundled_providers(
    target_order: int = 5, draft_order: int = 3
) -> tuple[Provider, Provider, str]:
    """Return the models of `bundled_ngrams` as providers, and the alphabet of their tokens.

    >>> target, draft, alphabet = bundled_providers()
    >>> target.name, draft.name, target.vocab
    ('kjv 5-gram', 'kjv 3-gram', 73)
    """
    target, draft = bundled_ngrams(target_order, draft_order)
    names = (f"kjv {order}-gram" for order in (target_order, draft_order))
    return target.provider(next(names)), draft.provider(next(names)), target.alphabet


@functools.lru_cache(maxsize=4)
def _counted(order: int) -> NGram:
    text = bundled_text()
    return fit_ngram(split_text(text), order, "".join(sorted(set(text))))


@functools.lru_cache(maxsize=4)
def bundled_pair(dtype: Any = jnp.float32) -> tuple[LanguageModel, LanguageModel]:
    """Return the bundled target and draft networks.

    Networks of characters, trained on the training part of the bundled text; they share one
    alphabet. `data/pair/README.md` says how they were made and how well they predict.

    Args:
      dtype: what they compute in.

    Returns:
      (target, draft), read once per dtype.
    """
    return _load("target", "kjv-1.6M", dtype), _load("draft", "kjv-0.1M", dtype)


def _load(which: str, name: str, dtype: Any) -> LanguageModel:
    """Read a network as `load_huggingface` does, but without the libraries that it needs."""
    with importlib.resources.as_file(_DATA / "pair" / which) as place:
        config = load_config(place)
        content = (place / "model.safetensors").read_bytes()
        vocabulary = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))
    tensors = _half_tensors(content)
    return llama(
        config,
        params_from_tensors(config, tensors, LAYOUT, dtype, f"bundled {which}"),
        name=name,
        tokenizer=CharacterTokenizer("".join(vocabulary["model"]["vocab"])),
    )


def _half_tensors(content: bytes) -> dict[str, Callable[[], np.ndarray]]:
    """Return the float16 tensors of a file: the header's length in 8 bytes, JSON, then the data."""
    start = 8 + int.from_bytes(content[:8], "little")
    described = json.loads(content[8:start])
    described.pop("__metadata__", None)

    def tensor(of: dict[str, Any]) -> np.ndarray:
        begin, end = of["data_offsets"]
        return np.frombuffer(content[start + begin : start + end], "<f2").reshape(of["shape"])

    return {name: functools.partial(tensor, of) for name, of in described.items()}
