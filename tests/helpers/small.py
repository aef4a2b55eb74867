"""Small networks without weights, a drafter of each kind, and the host drafter it must equal.

The fakes give NaN rows wherever the protocol is broken (a stale slot, a wrong position, a wrong mask),
and a NaN row ends a text: so every test that finishes its texts tests the use of the caches too.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec as js
from helpers.fake_model import fake_model, row_after
from jaxspec.decode import CompiledDecoder
from jaxspec.draft import (
    AdaptiveModelTree,
    AdaptiveTree,
    AdaptiveTreePolicy,
    BestFirstTree,
    Drafter,
    FixedTree,
    FusedDrafter,
    Lookup,
    ModelTree,
    NoDraft,
    Plain,
    SampledPath,
    model_path,
)
from jaxspec.models.network import Block, LanguageModel
from jaxspec.models.provider import Context, Provider, Softmax

VOCAB = 5
LENGTH = 40
PROMPTS = ([1, 2, 3], [0], [4, 1, 0, 2, 4, 1, 0, 2, 2])
BUDGETS = (20, 25, 12)
TARGET = fake_model(VOCAB, name="target")
DRAFT = fake_model(VOCAB, name="draft", noise=0.5)
POLICY = AdaptiveTreePolicy(
    min_width=1, max_width=3, min_depth=1, max_depth=3, first_depth=2, max_nodes=9
)

LOOKUP = {2: 5, 1: 2}

FUSED: dict[str, Callable[[], FusedDrafter]] = {
    "plain": Plain,
    "path by token": lambda: model_path(DRAFT, 3),
    "path by block": lambda: model_path(DRAFT, 3, js.RULES["block"]),
    "top-k tree": lambda: ModelTree(DRAFT, (2, 2, 1), js.RULES["point_mass"]),
    "tree with replacement": lambda: ModelTree(DRAFT, (2, 2), js.RULES["with_replacement"]),
    "tree without replacement": lambda: ModelTree(DRAFT, (2, 2), js.RULES["without_replacement"]),
    "traversal": lambda: ModelTree(DRAFT, (2, 2), js.RULES["traversal"]),
    "adaptive tree": lambda: AdaptiveModelTree(DRAFT, POLICY),
    "best-first tree": lambda: BestFirstTree(DRAFT, max_nodes=8, beam=3, depth=3),
    "lookup": lambda: Lookup(LOOKUP),
    "lookup tree": lambda: Lookup(LOOKUP, matches=2, max_nodes=6),
}


TRACED: Counter[str] = Counter()
"""How often each decoder was traced."""


@functools.cache
def decoder(name: str) -> CompiledDecoder:
    """One decoder of each kind, compiled once for all tests of a process and a batch size."""

    def draws(key: jax.Array, nodes: int, position: jax.Array) -> js.RoundDraws:
        TRACED[name] += 1
        return js.round_draws(key, nodes, position)

    return CompiledDecoder(
        counting(TARGET), FUSED[name](), max_context=LENGTH, prefill_width=4, draws=draws
    )


def counting(model: LanguageModel) -> LanguageModel:
    """A network that counts in its cache the tokens it was run over."""

    def forward(params: Any, cache: Any, block: Block) -> Any:
        inner, count = cache
        logits, inner = model.forward(params, inner, block)
        return logits, (inner, count + block.tokens.shape[0])

    def keep(cache: Any, at: Any, path: Any) -> Any:
        assert model.keep is not None
        return model.keep(cache[0], at, path), cache[1]

    return dataclasses.replace(
        model,
        forward=forward,
        init_cache=lambda slots: (model.init_cache(slots), jnp.int32(0)),
        keep=keep,
    )


def keys(batch: int, seed: int = 1) -> jax.Array:
    return jax.random.split(jax.random.key(seed), batch)


def provider(noise: float, temperature: float) -> Provider:
    """The fake of so much noise as a callable."""

    def row(context: Context) -> np.ndarray:
        return row_after(context, VOCAB, noise=noise)

    return Provider(f"noise {noise}", VOCAB, row, transform=Softmax(temperature))


def host_drafters(temperature: float) -> dict[str, Drafter]:
    """The host drafters that draft what the fused ones of the same name do."""
    sampled, likely = provider(0.5, temperature), provider(0.5, 1.0)
    return {
        "plain": NoDraft(),
        "path by token": SampledPath(sampled, 3),
        "path by block": SampledPath(sampled, 3, js.RULES["block"]),
        "top-k tree": FixedTree(likely, (2, 2, 1)),
        "adaptive tree": AdaptiveTree(likely, POLICY),
    }


@functools.cache
def greedy(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The text that plain greedy decoding continues a prompt to."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(row_after(tuple(text), VOCAB))))
    return tuple(text)


def matches_of(text: Sequence[int], lengths: dict[int, int]) -> list[tuple[int, ...]]:
    """What followed each earlier occurrence of a text's end, the best match first."""
    found = []
    for end in range(len(text) - 1):
        matched = 0
        while matched < min(max(lengths), end + 1) and text[end - matched] == text[-1 - matched]:
            matched += 1
        if matched >= min(lengths):
            count = lengths[max(key for key in lengths if key <= matched)]
            copy = list(text)
            for _ in range(count):
                copy.append(copy[end + 1 + len(copy) - len(text)])
            found.append((matched, end, tuple(copy[len(text) :])))
    return [copied for _, _, copied in sorted(found, reverse=True)]
