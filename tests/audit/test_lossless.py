"""Right foreign verifiers pass, however they are called and whatever they draw from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import foreign
from helpers.foreign import TREES, batch_of, variant

import jaxspec as js
from jaxspec import audit
from jaxspec.audit import settings

SMALL = 14_000
"""Calls in which every strong fault is seen."""


RIGHT = {
    "token": (foreign.token, "path"),
    "block": (foreign.block, "path"),
    "point_mass": (foreign.point_mass, "point_mass_path"),
    **{kind: (functools.partial(foreign.tree, how=how), kind) for kind, how in TREES.items()},
}

SLOW = (
    "a path of three",
    "three siblings, likely where rare",
    "one candidate of four, then two",
    "two siblings, two levels",
)
"""Instances whose laws have the most pieces: searched for token verification and for faults."""


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_verifier_of_uniforms_is_proved_and_accepts_as_its_rule(name):
    verify, kind = RIGHT[name]
    cases, budget = settings.instances_of_kind(kind), 150_000
    if name != "token":
        cases, budget = [each for each in cases if each.name not in SLOW], 63_000
    report = audit.check_lossless(
        verify, kind=kind, randomness="uniforms", rule=name, budget=budget, instances=cases
    )
    assert report.passes, str(report)
    assert report.uncertified < 1e-3
    assert report.is_as_rule
    assert report.false_alarm == 0
    for result in report.results:
        assert result.is_exact
        assert result.bias < 1e-6
        assert result.accepted == pytest.approx(result.accepted_by_rule[name], abs=1e-6)
    if name in ("token", "block"):  # known in fractions
        known = {"token": 130 / 81, "block": 166 / 81}[name]
        assert report.results[2].accepted == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize("randomness", ["numpy", "seed"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_verifier_that_is_sampled_passes(name, randomness):
    verify, kind = RIGHT[name]
    report = audit.check_lossless(verify, kind=kind, randomness=randomness, rule=name, budget=SMALL)
    assert report.passes, str(report)
    assert report.false_alarm == 1e-6
    assert SMALL - 20 <= report.calls <= SMALL + 60
    for result in report.results:
        assert result.test.p_value > result.level
        assert result.interval[0] < result.bias < result.interval[1]


def in_jax(draft_tokens, draft_rows, target_rows, key):
    draws = js.round_draws(key, len(draft_tokens) + 1, position=0)
    proposal = js.sampled_path(draft_tokens, draft_rows)
    return js.verify_path(draws.verify, proposal, target_rows, True).tokens


def test_a_jax_verifier_is_traced_and_sampled_by_keys():
    calls = []

    def counted(*args):
        calls.append(1)
        return in_jax(*args)

    cases = audit.instances_for(js.RULES["token"])[1:4]
    report = audit.check_lossless(
        counted, kind="path", randomness="jax_key", rule="token", budget=20_000, instances=cases
    )
    assert report.passes, str(report)
    assert len(calls) < 100  # traces and comparisons with the host, not samples
    assert report.matches == ("token",)


def test_a_jax_verifier_is_compiled_once_for_each_shape_and_compared_with_the_host_once():
    shapes = []

    def verify(draft_tokens, draft_rows, target_rows, key):
        shapes.append((isinstance(target_rows, jax.core.Tracer), target_rows.shape))
        kept = jnp.argmax(target_rows[0] + 0 * jax.random.uniform(key))
        return kept[None]

    report = audit.check_lossless(verify, kind="path", randomness="jax_key", budget=SMALL)
    assert not report.is_lossless
    traced = [shape for is_traced, shape in shapes if is_traced]
    assert sorted(traced) == sorted({*traced})
    assert len(traced) <= 5
    assert len({shape for is_traced, shape in shapes if not is_traced}) == 1


def test_a_verifier_that_the_host_runs_otherwise_is_not_compiled():
    generator = np.random.default_rng(0)

    def verify(draft_tokens, draft_rows, target_rows, uniforms):  # a number drawn when it is traced
        return jnp.array([generator.integers(0, 4)])

    cases = settings.instances_of_kind("path")[:1]
    report = audit.check_lossless(
        verify, kind="path", randomness="uniforms", budget=100, instances=cases
    )
    assert "seed" in report.contract


def test_a_jax_verifier_of_uniforms_is_searched_through_its_compiled_program():
    def verify(draft_tokens, draft_rows, target_rows, uniforms):
        zero = jnp.zeros(1, jnp.float32)
        draws = js.Draws(
            accept=jnp.concatenate([zero, uniforms[:-1]]),
            final=jnp.concatenate([zero, uniforms[-1:]]),
        )
        proposal = js.sampled_path(jnp.asarray(draft_tokens), jnp.asarray(draft_rows))
        return js.verify_block(draws, proposal, jnp.asarray(target_rows), True).tokens

    cases = audit.instances_for(js.RULES["block"])[1:2]
    report = audit.check_lossless(
        verify, kind="path", randomness="uniforms", rule="block", instances=cases
    )
    assert report.passes, str(report)
    assert report.results[0].accepted == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.parametrize("randomness", ["numpy", "uniforms", "seed"])
def test_a_batched_verifier_is_checked_in_batches(randomness):
    report = audit.check_lossless(
        batch_of(foreign.token), kind="path", randomness=randomness, batched=True, budget=SMALL
    )
    assert report.passes, str(report)
    assert report.matches == ("token",)


def test_a_batch_may_be_returned_as_a_padded_array():
    def padded(*args):
        found = batch_of(foreign.block)(*args)
        width = args[0].shape[1] + 1
        return np.array([[*row, *[-1] * (width - len(row))] for row in found])

    report = audit.check_lossless(
        padded, kind="path", randomness="numpy", batched=True, rule="block", budget=SMALL
    )
    assert report.passes, str(report)


def test_torch_generators_and_tensors_are_given_where_torch_is_installed():
    torch = pytest.importorskip("torch")

    def verify(draft_tokens, draft_rows, target_rows, generator):
        assert isinstance(draft_rows, torch.Tensor)
        return torch.tensor(
            foreign.token(draft_tokens, draft_rows.numpy(), target_rows.numpy(), generator)
        )

    report = audit.check_lossless(verify, kind="path", randomness="torch", budget=SMALL)
    assert report.passes, str(report)
    wrong = variant(foreign.token, "residual p")
    assert not audit.check_lossless(wrong, kind="path", randomness="torch", budget=SMALL).passes
