"""Models, drafters and checks for laws of texts of a few tokens."""

import functools

import numpy as np
import pytest

import jaxspec as js
from jaxspec.audit import DecodingLaw
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, Drafter, FixedTree, NoDraft, SampledPath
from jaxspec.models import Provider
from jaxspec.models.provider import Context

VOCAB = 3
PROMPT = (0,)


def toy(name: str, seed: int, *, alive: int = VOCAB) -> Provider:
    """A model with another row for each context, on the first tokens of the vocabulary."""

    @functools.cache
    def row_after(context: Context) -> np.ndarray:
        row = np.zeros(VOCAB)
        row[:alive] = np.random.default_rng([seed, *context]).dirichlet(np.ones(alive))
        return row

    return Provider(name, VOCAB, row_after)


DRAFT = toy("draft", 2)
TARGET = toy("target", 1)
TARGETS = {
    "three tokens of three": (TARGET, 3),
    "four tokens of two, the third has probability 0": (toy("target", 1, alive=2), 4),
}
# Starts at depth 1 and goes to 2 and back, on capacities that it shares with the fixed tree.
POLICY = AdaptiveTreePolicy(
    min_width=1, max_width=2, min_depth=1, max_depth=2, first_depth=1, max_nodes=5
)
PATH = SampledPath(DRAFT, depth=2)
BLOCK = SampledPath(DRAFT, depth=2, rule=js.RULES["block"])
TREE = FixedTree(DRAFT, (2, 1))
DRAFTERS: dict[str, Drafter] = {
    "none": NoDraft(),
    "path by token": PATH,
    "path by block": BLOCK,
    "fixed tree": TREE,
    "adaptive tree": AdaptiveTree(DRAFT, POLICY),
}


def assert_lossless(law: DecodingLaw) -> None:
    assert law.tv <= 1e-6
    assert law.impossible == 0
    assert law.misses == 0
    assert sum(law.texts.values()) == pytest.approx(1, abs=1e-9)
