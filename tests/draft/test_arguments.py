"""Arguments of drafters: what is of another kind, or out of range, is an error that names it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toys import DRAFTERS, draft, target

import jaxspec as js
from jaxspec.decode import Decoder, Ending
from jaxspec.draft import (
    MAX_NODES,
    AdaptiveTree,
    AdaptiveTreePolicy,
    Drafter,
    FixedTree,
    NoDraft,
    SampledPath,
    build_adaptive,
    build_top_k,
    normalised_entropy,
    top_k,
)
from jaxspec.models.provider import Provider

KEY = jax.random.key(0)
TARGET, DRAFT = target().provider, draft().provider
POLICY = AdaptiveTreePolicy()

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.0, 1.5, -0.5, math.nan, math.inf, 2**31, 2**64, 2**70),
    *(10**400, 1j, "", "2", "token", b"x", [], [1], (1, 0), (-1,), (1.5,), ("a",), [True], [None]),
    *({}, {1: 2}, set(), {1}, {1.5}, frozenset(["a", 1]), iter([1]), range(2), [[1], [1, 2]]),
    *(
        np.array(1),
        np.array([1, 2]),
        np.array([[1]]),
        np.array([1.5]),
        np.array(["a"]),
        np.bool_(1),
    ),
    *(np.float32(2), np.ma.array([1, 2], mask=[0, 1]), jnp.array([1]), KEY, jax.random.PRNGKey(0)),
    *(object(), int, Provider, js.Rule, js.RULES["token"], len, NoDraft, NoDraft(), POLICY, TARGET),
]

DOORS: dict[str, Callable[[Any], Any]] = {
    "NoDraft(rule)": NoDraft,
    "SampledPath(draft)": lambda x: SampledPath(x, 2),
    "SampledPath(depth)": lambda x: SampledPath(DRAFT, x).describe(),
    "SampledPath(rule)": lambda x: SampledPath(DRAFT, 2, x),
    "FixedTree(draft)": lambda x: FixedTree(x, (2,)),
    "FixedTree(widths)": lambda x: FixedTree(DRAFT, x).describe(),
    "FixedTree(node_budget)": lambda x: FixedTree(DRAFT, (2,), x).describe(),
    "FixedTree(rule)": lambda x: FixedTree(DRAFT, (2,), rule=x),
    "AdaptiveTree(draft)": AdaptiveTree,
    "AdaptiveTree(policy)": lambda x: AdaptiveTree(DRAFT, x).describe(),
    "AdaptiveTree(rule)": lambda x: AdaptiveTree(DRAFT, rule=x),
    **{
        f"Policy({field.name})": lambda x, name=field.name: AdaptiveTreePolicy(**{name: x})
        for field in dataclasses.fields(AdaptiveTreePolicy)
    },
    "width": POLICY.width,
    "next_depth(depth)": lambda x: POLICY.next_depth(x, 0, 1),
    "next_depth(accepted)": lambda x: POLICY.next_depth(1, x, 1),
    "next_depth(proposed)": lambda x: POLICY.next_depth(1, 0, x),
    "propose(depth)": lambda x: SampledPath(DRAFT, 1).propose((0,), x, jnp.zeros((2, 2))),
    "top_k(row)": lambda x: top_k(x, 1),
    "top_k(k)": lambda x: top_k([0.5, 0.5], x),
    "normalised_entropy": normalised_entropy,
    "build_top_k(draft)": lambda x: build_top_k(x, (0,), widths=()),
    "build_top_k(widths)": lambda x: build_top_k(DRAFT, (0,), widths=x),
    "build_top_k(max_nodes)": lambda x: build_top_k(DRAFT, (0,), widths=(), max_nodes=x),
    "build_top_k(capacity)": lambda x: build_top_k(DRAFT, (0,), widths=(), capacity=x),
    "build_adaptive(depth)": lambda x: build_adaptive(DRAFT, (0,), depth=x, width_of=lambda _: 0),
}


@pytest.mark.parametrize("door", DOORS)
def test_an_odd_argument_is_taken_or_a_value_error_of_one_line(door: str) -> None:
    for value in ODD:
        try:
            DOORS[door](value)
        except ValueError as error:
            assert 0 < len(str(error)) < 700, (value, error)


def test_a_huge_tree_is_cut_to_its_vocabulary_and_budget_or_refused_with_the_limit() -> None:
    assert FixedTree(DRAFT, (10**9, 10**9)).max_nodes == 1 + 3 + 9
    assert FixedTree(DRAFT, (3,) * 22, node_budget=7).max_nodes == 7
    assert AdaptiveTree(DRAFT, AdaptiveTreePolicy(max_width=10**9, max_nodes=9)).max_nodes == 9
    with pytest.raises(ValueError, match=f"more than {MAX_NODES} nodes, .*: give a node_budget"):
        FixedTree(DRAFT, (3,) * 22)
    with pytest.raises(ValueError, match=f"depth is {10**9}: must be at most {MAX_NODES - 1}"):
        SampledPath(DRAFT, 10**9)
    with pytest.raises(ValueError, match=f"more than {MAX_NODES} nodes.*: give max_nodes"):
        build_top_k(DRAFT, (0,), widths=(10**9,) * 22)
    wide = FixedTree(DRAFT, (10**9, 10**9))
    assert Decoder(TARGET, wide).run((0,), KEY, new_tokens=4).new_tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_gives_something_else_than_a_draft_is_named(name: str) -> None:
    kind: Drafter = DRAFTERS[name](DRAFT)

    class Wrong(type(kind)):  # type: ignore[misc]
        def propose(self, *arguments: Any, **options: Any) -> Any:
            return super().propose(*arguments, **options).proposal

    wrong = object.__new__(Wrong)
    wrong.__dict__.update(kind.__dict__)
    with pytest.raises(ValueError, match=r"what the drafter proposed is of type .*: must be a"):
        Decoder(TARGET, wrong).run((0,), KEY)


def test_a_drafter_that_takes_no_bounds_must_have_the_vocabulary_of_the_target() -> None:
    class Older(SampledPath):
        def propose(self, context: Any, depth: int, pairs: Any) -> Any:  # type: ignore[override]
            return super().propose(context, depth, pairs)

    narrow = Provider("narrow", 2, lambda _: [0.5, 0.5])
    with pytest.raises(ValueError, match="draft 'narrow' has a vocabulary of 2, target 'target'"):
        Decoder(TARGET, Older(narrow, 2))
    assert Decoder(TARGET, SampledPath(narrow, 2)).run((0,), KEY).ending == Ending.BUDGET
