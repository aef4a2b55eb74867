"""The adaptive policy: both formulas by table, bounds, and policies that contradict themselves."""

import math
from typing import Any

import numpy as np
import pytest

from jaxspec.draft import AdaptiveTreePolicy

POLICY = AdaptiveTreePolicy(
    min_width=2,
    max_width=4,
    min_depth=2,
    max_depth=5,
    first_depth=3,
    deepen_at=0.75,
    shorten_at=0.25,
)


@pytest.mark.parametrize(
    ("entropy", "width"),
    [
        # 2 + floor(3 h), at most 4: three widths, each for a third of [0, 1].
        (0.0, 2),
        (0.2, 2),
        (0.33, 2),
        (1 / 3, 3),
        (0.5, 3),
        (0.66, 3),
        (0.67, 4),
        (0.99, 4),
        (1.0, 4),
    ],
)
def test_the_width_is_the_least_and_a_step_for_each_equal_share_of_entropy(
    entropy: float, width: int
) -> None:
    assert POLICY.width(entropy) == width


@pytest.mark.parametrize(("least", "greatest"), [(1, 1), (1, 2), (1, 4), (3, 8)])
def test_widths_grow_with_entropy_from_the_least_to_the_greatest(least: int, greatest: int) -> None:
    policy = AdaptiveTreePolicy(min_width=least, max_width=greatest)
    widths = policy.width(np.linspace(0, 1, 101, dtype=np.float32)).tolist()
    assert widths == sorted(widths)
    assert set(widths) == set(range(least, greatest + 1))
    assert policy.width(math.nextafter(1, 0)) == greatest
    assert policy.width(1.0, vocab=2) == min(greatest, 2)


@pytest.mark.parametrize(
    ("depth", "accepted", "proposed", "following"),
    [
        # accepted / proposed: at 3/4 and above one deeper, at 1/4 and below one less deep.
        (3, 3, 3, 4),
        (4, 3, 4, 5),
        (3, 2, 3, 3),
        (3, 1, 3, 3),
        (4, 1, 4, 3),
        (4, 0, 4, 3),
        (4, 2, 4, 4),
        # within the bounds of 2 and 5
        (5, 5, 5, 5),
        (2, 0, 2, 2),
        # A budget capped the proposal at less than was wanted: the ratio is to what was proposed.
        (4, 1, 1, 5),
        (4, 0, 1, 3),
        (4, 1, 2, 4),
        (2, 0, 1, 2),
        # Nothing was proposed: nothing is known.
        (4, 0, 0, 4),
    ],
)
def test_the_depth_follows_the_share_of_the_proposed_path_that_was_accepted(
    depth: int, accepted: int, proposed: int, following: int
) -> None:
    assert POLICY.next_depth(depth, accepted, proposed) == following


def test_the_next_depth_is_within_its_bounds_a_step_away_and_grows_with_the_accepted() -> None:
    for depth in range(POLICY.min_depth, POLICY.max_depth + 1):
        for proposed in range(depth + 1):
            depths = POLICY.next_depth(depth, np.arange(proposed + 1), proposed).tolist()
            assert depths == sorted(depths)
            assert all(POLICY.min_depth <= each <= POLICY.max_depth for each in depths)
            assert all(abs(each - depth) <= 1 for each in depths)


def test_a_policy_that_never_deepens_may_be_asked_for() -> None:
    policy = AdaptiveTreePolicy(deepen_at=1.5, shorten_at=0.0)
    assert policy.next_depth(3, 3, 3) == 3
    assert policy.next_depth(3, 0, 3) == 2


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({"min_width": 5, "max_width": 4}, "min_width <= max_width"),
        ({"first_depth": 1, "min_depth": 2}, "min_depth <= first_depth <= max_depth"),
        ({"first_depth": 7, "max_depth": 6}, "min_depth <= first_depth <= max_depth"),
        ({"deepen_at": 0.25, "shorten_at": 0.25}, "0 <= shorten_at < deepen_at"),
        ({"shorten_at": -0.1}, "0 <= shorten_at < deepen_at"),
    ],
)
def test_a_policy_that_contradicts_itself_is_an_error(fields: dict[str, Any], order: str) -> None:
    with pytest.raises(ValueError, match=f"must satisfy {order}"):
        AdaptiveTreePolicy(**fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_width", 0),
        ("max_width", 2.5),
        ("min_depth", 0),
        ("first_depth", "3"),
        ("max_depth", True),
        ("max_nodes", 1),
        ("deepen_at", "often"),
    ],
)
def test_invalid_sizes_of_a_policy_are_errors(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        AdaptiveTreePolicy(**{field: value})
