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
    AdaptiveTree,
    AdaptiveTreePolicy,
    BestFirstTree,
    Drafter,
    FixedTree,
    Lookup,
    NGramTree,
    NoDraft,
    SampledPath,
    Shape,
)
from jaxspec.models import Block, LanguageModel, Provider, Softmax, fit_ngram
from jaxspec.models.provider import Context

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

RULES = js.RULES
IRREGULAR = Shape.of_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
NGRAM = fit_ngram("abcdeabcab", 3)

DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "plain": lambda model: NoDraft(),
    "path by token": lambda model: SampledPath(model, 3),
    "path by block": lambda model: SampledPath(model, 3, RULES["block"]),
    "top-k tree": lambda model: FixedTree(model, (2, 2, 1)),
    "tree with replacement": lambda model: FixedTree(model, (2, 2), RULES["with_replacement"]),
    "tree without replacement": lambda model: FixedTree(
        model, (2, 2), RULES["without_replacement"]
    ),
    "traversal": lambda model: FixedTree(model, (2, 2), RULES["traversal"]),
    "adaptive tree": lambda model: AdaptiveTree(model, POLICY),
    "best-first tree": lambda model: BestFirstTree(model, max_nodes=8, beam=3, depth=3),
    "lookup": lambda model: Lookup(LOOKUP),
    "lookup tree": lambda model: Lookup(LOOKUP, matches=2, max_nodes=6),
}
MORE_DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "irregular tree": lambda model: FixedTree(model, IRREGULAR),
    "irregular without replacement": lambda model: FixedTree(
        model, IRREGULAR, RULES["without_replacement"]
    ),
    "front of a tree": lambda model: FixedTree(model, (3, 2, 2), max_nodes=9),
    "n-gram tree": lambda model: NGramTree(NGRAM, (2, 1)),
}
FUSED: dict[str, Callable[[], Drafter]] = {
    name: functools.partial(make, DRAFT) for name, make in DRAFTERS.items()
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
    """The same drafters with the draft network as a callable, which point masses ask as it is."""
    likely, sampled = provider(0.5, 1.0), provider(0.5, temperature)
    every = {**DRAFTERS, **MORE_DRAFTERS}
    drafters = {name: make(likely) for name, make in every.items()}
    return {
        name: drafter if drafter.rule.proposal is js.PointMass else every[name](sampled)
        for name, drafter in drafters.items()
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
