"""Toy models with a row of its own for each context, and one drafter of each kind.

All trees have one capacity and so have all paths, so that the verifiers compile once.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np

import jaxspec as js
from helpers.providers import CountingModel as Model
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, Drafter, FixedTree, NoDraft, SampledPath
from jaxspec.models import Provider
from jaxspec.models.provider import Context

VOCAB = 3
round_draws = jax.jit(js.round_draws, static_argnums=1)
draw_token = jax.jit(js.draw_token)
POLICY = AdaptiveTreePolicy(
    min_width=1, max_width=2, min_depth=1, max_depth=2, first_depth=1, max_nodes=5
)


def random_rows(seed: int) -> Callable[[Context], np.ndarray]:
    """Rows that depend on the whole context."""

    @functools.cache
    def row_after(context: Context) -> np.ndarray:
        return np.random.default_rng([seed, *context]).dirichlet(np.ones(VOCAB))

    return row_after


def target(*, is_batched: bool = False) -> Model:
    return Model("target", random_rows(1), is_batched=is_batched)


def draft(*, is_batched: bool = False) -> Model:
    return Model("draft", random_rows(2), is_batched=is_batched)


DRAFTERS: dict[str, Callable[[Provider], Drafter]] = {
    "none": lambda draft: NoDraft(),
    "path by token": lambda draft: SampledPath(draft, depth=2),
    "path by block": lambda draft: SampledPath(draft, depth=2, rule=js.RULES["block"]),
    "fixed tree": lambda draft: FixedTree(draft, shape=(2, 1)),
    "adaptive tree": lambda draft: AdaptiveTree(draft, POLICY),
}
WITH_A_DRAFT = [name for name in DRAFTERS if name != "none"]


def one_hot(token: int) -> np.ndarray:
    return np.eye(VOCAB)[token]


def counting_up(context: Context) -> np.ndarray:
    """The row that is sure of the next number, round and round."""
    return one_hot((context[-1] + 1) % VOCAB)


def likely_up(context: Context) -> np.ndarray:
    """The row that takes the next number for the most probable, then the one after it."""
    return np.roll([0.5, 0.3, 0.2], context[-1] + 1)


def never_up(context: Context) -> np.ndarray:
    """The row that is sure of the number after the next: never right of what counts up."""
    return one_hot((context[-1] + 2) % VOCAB)
