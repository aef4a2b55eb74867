"""Arguments of drafters: what is of another kind, or out of range, is an error that names it."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toys import draft, target

import jaxspec as js
from jaxspec.draft import (
    AdaptiveTree,
    AdaptiveTreePolicy,
    FixedTree,
    NoDraft,
    SampledPath,
    normalized_entropy,
    top_k,
)
from jaxspec.models import Provider

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
    "SampledPath(draft)": lambda x: SampledPath(x, 2),
    "SampledPath(depth)": lambda x: SampledPath(DRAFT, x).describe(),
    "SampledPath(rule)": lambda x: SampledPath(DRAFT, 2, x),
    "FixedTree(draft)": lambda x: FixedTree(x, (2,)),
    "FixedTree(widths)": lambda x: FixedTree(DRAFT, x).describe(),
    "FixedTree(max_nodes)": lambda x: FixedTree(DRAFT, (2,), max_nodes=x).describe(),
    "FixedTree(rule)": lambda x: FixedTree(DRAFT, (2,), rule=x),
    "AdaptiveTree(draft)": AdaptiveTree,
    "AdaptiveTree(policy)": lambda x: AdaptiveTree(DRAFT, x).describe(),
    "AdaptiveTree(rule)": lambda x: AdaptiveTree(DRAFT, rule=x),
    **{
        f"Policy({field.name})": lambda x, name=field.name: AdaptiveTreePolicy(**{name: x})
        for field in dataclasses.fields(AdaptiveTreePolicy)
    },
    "draft(depth)": lambda x: FixedTree(DRAFT, (1,)).draft((0,), depth=x),
    "draft(stop_tokens)": lambda x: FixedTree(DRAFT, (1,)).draft((0,), stop_tokens=x),
    "draft(pairs)": lambda x: FixedTree(DRAFT, (1,)).draft((0,), pairs=x),
    "top_k(row)": lambda x: top_k(x, 1),
    "top_k(k)": lambda x: top_k([0.5, 0.5], x),
    "normalized_entropy": normalized_entropy,
}


@pytest.mark.parametrize("door", DOORS)
def test_an_odd_argument_is_taken_or_a_value_error_of_one_line(door: str) -> None:
    for value in ODD:
        try:
            DOORS[door](value)
        except ValueError as error:
            assert 0 < len(str(error)) < 700, (value, error)


@pytest.mark.parametrize("stops", [[1.5], [True], [-1], 1, {1: 2.0, "a": 1}])
def test_stop_tokens_that_are_no_token_ids_are_an_error_not_rounded(stops: Any) -> None:
    with pytest.raises(ValueError, match="stop_tokens"):
        FixedTree(DRAFT, (1,)).draft((0,), stop_tokens=stops)


@pytest.mark.parametrize("pairs", [np.zeros((2, 2)), np.zeros((3, 2), np.float32), np.float32(0)])
def test_pairs_of_another_shape_or_precision_are_an_error_that_gives_the_right_one(
    pairs: Any,
) -> None:
    with pytest.raises(ValueError, match=r"pairs is .*: must be a float32 array \[2, 2\]"):
        SampledPath(DRAFT, 1).draft((0,), pairs=pairs)


@pytest.mark.parametrize("edge", [math.inf, -math.inf, math.nan])
def test_an_edge_of_a_policy_is_a_finite_number(edge: float) -> None:
    with pytest.raises(ValueError, match=r"deepen_at is .*: must be a finite number"):
        AdaptiveTreePolicy(deepen_at=edge)
