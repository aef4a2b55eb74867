"""Every published way to get verification wrong is rejected, and by the law it must have."""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from helpers import known_bad
from helpers.plain_rules import PLAIN_RULES
from helpers.two_rounds import keyed_by_position

import jaxspec as js
from jaxspec import audit

VARIANTS = [
    pytest.param(variant, id=f"{family}: {variant.name}")
    for family, variants in known_bad.VARIANTS.items()
    for variant in variants
]

LISTED = {
    "token": {
        "residual = p",
        "residual = p without x",
        "residual = |p - q|",
        "argmax draft with softmax q",
        "draft colder than its recorded q",
        "u reused for the residual",
        "bonus from q",
        "<= instead of <",
        "epsilon in the quotient",
        "epsilon in the residual",
        "a drafted token dropped for its low q",
        "the last sampled token dropped for its low q",
        "lenience 1/2",
    },
    "block": {
        "h = a",
        "h = p_i, the token ratio",
        "last uncapped",
        "stop at first failure",
        "token residual",
        "the last sampled token dropped for its low q",
        "<= instead of <",
    },
    "siblings": {
        "sort siblings by score",
        "prune by identity",
        "the last sibling dropped for its low q",
        "skip duplicates",
        "zero the token instead of subtracting q",
        "without replacement with un-renormalised q",
        "<= instead of <, with replacement",
        "<= instead of <, without replacement",
    },
    "point mass": {
        "no renormalisation",
        "keep the mass",
        "accept min(1, p / softmax q)",
        "u reused across siblings",
        "<= instead of <",
        "one sample per leaf, longest match",
        "threshold 0.9 for all candidates",
        "threshold 1/4 for one candidate",
    },
}
"""Published or proposed faults; those that show only over two rounds are below."""

KEYED_BY_POSITION = (
    audit.Instance(
        name="toy of two",
        target={(): known_bad.row(1, 2)},
        draft={(): known_bad.row(2, 1)},
        branching=(1, 1),
        bonus=False,
    ),
    audit.Instance(
        name="a fair coin for three rows",
        target={(): known_bad.row(1, 3), (0,): known_bad.row(4, 1), (1,): known_bad.row(2, 3)},
        draft={(): known_bad.row(1, 1)},
        branching=(1, 1),
        bonus=False,
    ),
)
"""Where draws that belong to positions of the text show, over two rounds."""


def test_no_known_fault_is_forgotten():
    named = {
        family: sorted(variant.name for variant in variants)
        for family, variants in known_bad.VARIANTS.items()
    }
    assert named == {family: sorted(names) for family, names in LISTED.items()}


def test_one_row_pair_shows_every_fault_of_one_level():
    # Those of the sampled siblings and point masses, by a total variation that is known.
    shown = {
        variant.name: variant.tv
        for variant in (*known_bad.SIBLING_VARIANTS, *known_bad.POINT_MASS_VARIANTS)
        if variant.instance in (known_bad.KILL_SIBLINGS, known_bad.KILL_CANDIDATES)
    }
    assert len(shown) == 10
    assert min(shown.values()) == Fraction(21, 400)


@pytest.mark.parametrize("name", PLAIN_RULES)
def test_a_plain_rule_without_a_fault_is_proved_where_its_variants_fail(name: str):
    variants = [variant for group in known_bad.VARIANTS.values() for variant in group]
    instances = [variant.instance for variant in variants if variant.rule.name == name]
    for instance in {id(instance): instance for instance in instances}.values():
        law = audit.exact_law(
            js.RULES[name], instance, PLAIN_RULES[name], padded_to=instances, batch=128
        )
        assert law.is_proved, law


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_known_bad_variant_is_rejected_by_the_law_that_its_fault_must_have(
    variant: known_bad.Variant,
):
    law = audit.exact_law(
        variant.rule,
        variant.instance,
        variant.verify,
        variant.draw,
        num_drafted=variant.num_drafted,
        batch=128,
    )
    assert not law.is_proved
    assert law.tv == pytest.approx(float(variant.tv), abs=1e-6)
    assert law.impossible == pytest.approx(float(variant.impossible), rel=1e-3, abs=0)
    # It is the law that is wrong, not the search.
    assert law.cells.misses == 0
    assert law.total_mass == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ["token", "block"])
def test_a_draft_that_stops_after_a_token_by_looking_at_it_is_proved(name: str):
    # The twin of the trimmed draft: the token that ends the draft is proposed with the others.
    def up_to_the_first_improbable(tokens: jax.Array, rows: jax.Array) -> jax.Array:
        dropped = known_bad.without_the_first_improbable(tokens, rows)
        return jnp.minimum(dropped + 1, len(tokens))

    path = dataclasses.replace(known_bad.TRIMMED_PATH, branching=(1, 1))
    law = audit.exact_law(js.RULES[name], path, num_drafted=up_to_the_first_improbable, batch=128)
    assert law.is_proved, law
    # After token 1, of draft probability 1 / 10, nothing more is proposed.
    verdict = law.cells.outcomes.verdict
    assert {1, 2} == set(verdict.num_accepted[law.cells.outcomes.drafted[:, 1] == 0]) - {0}
    assert {1} == set(verdict.num_accepted[law.cells.outcomes.drafted[:, 1] == 1]) - {0}


@pytest.mark.parametrize("instance", KEYED_BY_POSITION, ids=lambda instance: instance.name)
def test_block_verification_with_draws_keyed_by_position_is_rejected_over_two_rounds(
    instance: audit.Instance,
):
    played = keyed_by_position(js.RULES["block"], instance)
    cells = played.search()
    assert cells.misses == 0
    expected = {"toy of two": 1 / 18, "a fair coin for three rows": 13 / 200}[instance.name]
    assert played.total_variation(cells) == pytest.approx(expected, abs=1e-6)


def test_token_verification_survives_draws_keyed_by_position():
    # No token-wise test looks at a draw beyond the first rejection, so nothing is read twice.
    for instance in KEYED_BY_POSITION:
        played = keyed_by_position(js.RULES["token"], instance, verify=PLAIN_RULES["token"])
        cells = played.search()
        assert cells.misses == 0
        assert played.total_variation(cells) <= 1e-6
