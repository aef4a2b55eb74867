"""The gallery of faulty verifiers at one seed; `tests/gallery.py` runs it over many."""

import re

import pytest
from helpers.gallery import FAULTS, RIGHT

from jaxspec.audit import check_lossless, lossless

CHEAP = (
    "residual not renormalised", "third point mass", "only the first tile", "lenience 1/2",
    "threshold of 0.25", "no bonus", "bonus although", "two bonus", "left after the end",
    "emitted again", "nothing emitted", "never drafted", "slots all", "other twin",
    "draws from elsewhere", "per leaf", "<=", "1e-3$",
)  # fmt: skip
"""Faults that are seen early, and that no other test has."""

SHOWN_BY_ONE_CALL = (
    "no bonus", "bonus although", "two bonus", "left after the end", "emitted again",
    "nothing emitted", "slots all", "other twin", "draws from elsewhere",
)  # fmt: skip
"""Faults of the output, whose law is right or not: more calls show nothing more."""


@pytest.fixture(autouse=True)
def no_names(monkeypatch):
    """Leave the faults unnamed, which takes most of the time."""
    monkeypatch.setattr(lossless, "fitting_faults", lambda *_: ())


def test_the_gallery_has_at_least_sixty_faults_of_every_kind():
    assert len(FAULTS) >= 60
    assert {entry.kind for entry in FAULTS.values()} == {entry.kind for entry in RIGHT.values()}


@pytest.mark.parametrize("name", [name for name in FAULTS if re.search("|".join(CHEAP), name)])
def test_a_fault_is_rejected(name):
    entry = FAULTS[name]
    how = {"randomness": entry.randomness, **entry.how}
    if re.search("|".join(SHOWN_BY_ONE_CALL), name):
        how["budget"] = 2_000
    report = check_lossless(entry.verify, kind=entry.kind, **how)
    assert not report.passes
    assert report.failures


@pytest.mark.parametrize("name", RIGHT)
def test_a_rule_passes_as_a_foreign_function(name):
    entry = RIGHT[name]
    how = {"randomness": "numpy", "budget": 5_000, **entry.how}
    assert check_lossless(entry.verify, kind=entry.kind, **how).passes
