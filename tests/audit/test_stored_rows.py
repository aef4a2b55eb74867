"""The law of a stored row is row / sum(row), for draws and for tests, in every dtype."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import known_bad

import jaxspec as js
from jaxspec import audit

OFF = {"float16": Fraction(1, 2**11), "float32": Fraction(1, 2**17), "float64": Fraction(1, 2**17)}
"""How far from 1 a row's mass is made, within the tolerance of its type; bfloat16 needs no help."""


def stored_law(row: list[Fraction], dtype: str) -> np.ndarray:
    """Return the law of a row once it is stored, in float64; its mass is not 1."""
    stored = np.array([float(x) for x in row]).astype(jnp.dtype(dtype)).astype(np.float64)
    assert abs(stored.sum() - 1) > 1e-6
    return stored / stored.sum()


CASES = [
    *((name, "bfloat16") for name in js.RULES),
    ("token", "float16"),
    ("without_replacement", "float16"),
    ("token", "float32"),
    ("block", "float32"),
    ("point_mass", "float32"),
    ("token", "float64"),
]


def instance_for(rule: js.Rule, dtype: str) -> audit.Instance:
    """Return the kill row for a rule, stored with a mass that is not exactly 1."""
    off = OFF.get(dtype, Fraction(0))
    p = [x * (1 + off) for x in known_bad.KILL_P]
    q = [x * (1 - off) for x in known_bad.KILL_Q]
    if rule.proposal is js.PointMass:
        return audit.Instance(name="kill row", target={(): p}, candidates={(): (1, 2)})
    branching = (1,) if rule.is_path else (2,)
    return audit.Instance(name="kill row", target={(): p}, draft={(): q}, branching=branching)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_rule_is_lossless_for_rows_whose_stored_mass_is_not_one(name: str, dtype: str):
    rule = js.RULES[name]
    instance = instance_for(rule, dtype)
    with jax.enable_x64(dtype == "float64"):
        law = audit.exact_law(rule, instance, dtype=jnp.dtype(dtype))
    p, q = (
        stored_law(rows[()], dtype) for rows in (instance.target, instance.draft or instance.target)
    )
    np.testing.assert_allclose(
        law.target_text.sum(axis=tuple(range(1, law.target_text.ndim))), p, atol=1e-12
    )
    assert law.target_text.sum() == pytest.approx(1, abs=1e-12)
    assert (law.impossible, law.flagged, law.cells.misses) == (0, 0, 0)
    assert law.tv <= 1e-6
    if rule.is_path:
        q = stored_law(instance.draft[()], dtype)
        drafted = law.cells.outcomes.drafted[:, 1]
        found = np.bincount(drafted, weights=law.cells.mass, minlength=len(q))
        np.testing.assert_allclose(found, q, rtol=0, atol=1e-6)
        assert law.expected_accepted == pytest.approx(np.minimum(p, q).sum(), abs=1e-6)
    assert law.is_proved


@pytest.mark.parametrize("name", ["token", "block", "with_replacement"])
def test_masses_that_are_off_by_a_few_roundings_do_not_add_up_along_a_path(name: str) -> None:
    off = Fraction(46, 10**8)
    p = [Fraction(9, 10) * (1 + off), Fraction(1, 10) * (1 + off)]
    q = [Fraction(99, 100) * (1 - off), Fraction(1, 100) * (1 - off)]
    case = audit.Instance(
        name="off", target={(): p}, draft={(): q}, branching=(1, 1, 1), bonus=True
    )
    law = audit.exact_law(js.RULES[name], case)
    assert law.tv <= 1e-6
    assert law.is_proved
