"""What a row tells: the most probable tokens, the entropy; and the tree that sees only the depth."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checks import RowError
from jaxspec.draft import build_from_depth_logits, normalized_entropy, top_k


def test_top_k_orders_by_probability_then_by_id_and_takes_positive_entries_only() -> None:
    counts = [c for c in itertools.product(range(5), repeat=4) if sum(c) == 4]
    for row, k in itertools.product(counts, range(7)):
        expected = sorted((x for x in range(4) if row[x]), key=lambda x: (-row[x], x))[:k]
        for dtype in (np.float32, np.float64):
            assert top_k(np.array(row, dtype) / 4, k) == tuple(expected)


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        (np.float32([0.1, np.nextafter(np.float32(0.1), np.float32(1)), 0.8]), 2, (2, 1)),
        (np.float32([-0.0, 0.5, -0.0, 0.5]), 3, (1, 3)),
        (np.float32([0.0, 1e-45, 1.0]), 3, (2,)),  # a subnormal counts as 0, as in a verifier
        ([0.5, 0.5], 0, ()),
        (np.float16([0.25, 0.5, 0.25]), 2, (1, 0)),
        (jnp.array([0.25, 0.5, 0.25], jnp.bfloat16), 3, (1, 0, 2)),
    ],
)
def test_top_k_at_the_edges(row: Any, k: int, expected: tuple[int, ...]) -> None:
    assert top_k(row, k) == expected


def test_top_k_of_a_large_vocabulary_equals_a_full_sort() -> None:
    weights = np.random.default_rng(0).integers(0, 40, 100_000).astype(np.float32)  # many ties
    order = np.argsort(-weights, kind="stable")
    for k in (1, 17, 5000, 99_999):
        expected = order[:k][weights[order[:k]] > 0]
        assert top_k(weights, k) == tuple(expected.tolist())


def test_top_k_rejects_invalid_rows_and_counts() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(RowError, match=f"entry 1 of the row is {bad}"):
            top_k([0.5, bad, 0.5], 1)
    for row, k in (([[0.5, 0.5]], 1), (0.5, 1), ([0.5, 0.5], -1), (["a"], 1)):
        with pytest.raises(ValueError, match=r"row|k is -1"):
            top_k(row, k)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0], 0.0),
        ([0.0, 1.0, 0.0], 0.0),
        ([0.5, 0.5, 0.0, 0.0], 0.5),
        ([0.5, 0.25, 0.25, 0.0], 0.75),
        ([1 / 3] * 3, 1.0),
    ],
)
def test_the_normalized_entropy_is_h_over_log_v(row: list[float], expected: float) -> None:
    for dtype in (np.float32, np.float64):
        found = normalized_entropy(np.array(row, dtype))
        assert found == pytest.approx(expected, abs=1e-7)
        assert math.copysign(1, found) == 1


def test_the_normalized_entropy_is_at_most_1_and_does_not_depend_on_the_mass() -> None:
    for size in range(2, 200):
        assert normalized_entropy(np.full(size, 1 / size, np.float32)) <= 1
    for mass in (1 - 2**-7, 1 + 2**-7):
        row = jnp.array([mass / 2, mass / 4, mass / 4, 0.0], jnp.bfloat16)
        assert normalized_entropy(row) == 0.75


# --- the fixture of the contract


def nodes_of(tree: Any) -> list[tuple[int, int]]:
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))


def test_depth_logits_build_the_tree_of_a_draft_that_sees_only_the_depth() -> None:
    logits = np.array([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
    whole = [(0, -1), (1, 0), (2, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    for max_nodes in (2, 4, 5, 100):
        assert (
            nodes_of(build_from_depth_logits(logits, (2, 2), root=0, max_nodes=max_nodes))
            == (whole[:max_nodes])
        )


def test_a_logit_of_minus_infinity_is_no_candidate_and_a_very_low_one_is() -> None:
    fixture = build_from_depth_logits([[0.0, -np.inf, -1e30, -800.0]], (4,))
    assert nodes_of(fixture) == [(-1, -1), (0, 0), (3, 0), (2, 0)]
    for dtype in (jnp.bfloat16, np.float64):
        fixture = build_from_depth_logits(np.array([[1.0, 3.0, 3.0]]).astype(dtype), (2,))
        assert nodes_of(fixture) == [(-1, -1), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("logits", "arguments", "message"),
    [
        ([[0.0, 1.0]], {"branching": (1, 1)}, "depth_logits has 1 rows"),
        ([[0.0, 1.0], [0.0, np.nan]], {"branching": (1,)}, "row 1: logit 1 is nan"),
        ([[np.inf, 1.0]], {"branching": (1,)}, "row 0: logit 0 is inf"),
        ([[-np.inf, -np.inf]], {"branching": (1,)}, "row 0: every logit is -inf"),
        ([[0.0, 1.0]], {"branching": (1,), "root": 2}, "root is 2"),
        ([[0.0, 1.0]], {"branching": (0,)}, "the entry at depth 0 is 0"),
    ],
)
def test_invalid_depth_logits_are_errors(
    logits: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_from_depth_logits(logits, **arguments)
