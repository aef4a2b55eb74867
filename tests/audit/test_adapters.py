"""Adapters of engines' samplers: right samplers pass an audit, plausible wrong ones do not."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import assisted_sampler, flat_sampler, linked_sampler

from jaxspec import audit
from jaxspec.audit import check_lossless, from_flat, from_linked_list, from_transformers
from jaxspec.audit.settings import instances_of_kind

SHOWN_IN = {
    "path": ("rare target, likely draft", "zeros and one-hot rows"),
    "point_mass_path": ("rare target, likely draft", "zeros and one-hot rows"),
    "point_mass": ("one candidate, then two", "zeros and one-hot rows"),
    "without_replacement": ("two siblings", "one candidate, then two"),
}
"""Instances of each kind in which every fault here shows: samplers in Python loops are slow."""


def report_of(verify: Any, kind: str, **options: Any) -> audit.LosslessReport:
    cases = [each for each in instances_of_kind(kind) if each.name in SHOWN_IN[kind]]
    options = {"randomness": "uniforms", "budget": 20_000, **options}
    return check_lossless(verify, kind=kind, instances=cases, **options)


def exact_report_of(verify: Any, kind: str, **options: Any) -> audit.LosslessReport:
    report = report_of(verify, kind, **options)
    assert all(result.is_exact for result in report.results)
    return report


@pytest.mark.parametrize(
    ("kind", "bonus", "is_flat_output"),
    [
        ("path", "ids", False),
        ("path", "rows", True),
        ("point_mass_path", "ids", True),
        ("point_mass_path", "rows", False),
    ],
)
def test_a_right_flat_sampler_passes(kind: str, bonus: str, is_flat_output: bool) -> None:
    verify = from_flat(flat_sampler(is_flat_output=is_flat_output), bonus=bonus)
    report = exact_report_of(verify, kind)
    assert report.passes
    assert report.matches == ("token" if kind == "path" else "point_mass",)


def test_by_default_a_sampler_gets_as_many_uniforms_as_its_adapter_takes_and_it_needs() -> None:
    for verify, kind in (
        (from_linked_list(linked_sampler()), "point_mass"),
        (from_flat(flat_sampler()), "path"),
        (from_flat(flat_sampler(), bonus="rows"), "path"),
        (from_transformers(assisted_sampler()), "path"),
    ):
        assert report_of(verify, kind, budget=4_000).passes


def test_a_right_flat_sampler_without_bonus_tokens_passes() -> None:
    verify = from_flat(flat_sampler(), bonus="none")
    assert exact_report_of(verify, "path", bonus=False).passes
    assert not exact_report_of(verify, "path", bonus=True).passes


@pytest.mark.parametrize(
    ("fault", "kind", "bonus", "is_flat_output"),
    [
        ("bonus", "path", "ids", False),
        ("bonus", "path", "ids", True),
        ("bonus of another", "path", "ids", False),
        ("cu_num", "path", "ids", True),
        ("cu_num", "point_mass_path", "rows", False),
        ("bonus rows", "path", "rows", False),
        ("none", "point_mass_path", "ids", False),
    ],
)
def test_a_wrong_flat_sampler_is_rejected(
    fault: str, kind: str, bonus: str, is_flat_output: bool
) -> None:
    verify = from_flat(flat_sampler(fault, is_flat_output=is_flat_output), bonus=bonus)
    assert not exact_report_of(verify, kind).passes


@pytest.mark.parametrize(("kind", "bonus"), [("path", "ids"), ("point_mass_path", "rows")])
def test_tokens_after_a_sequences_own_are_not_candidates(kind: str, bonus: str) -> None:
    verify = from_flat(flat_sampler("padding"), bonus=bonus)
    report = check_lossless(verify, kind=kind, randomness="numpy", budget=3_000)
    assert not report.passes
    assert "counted as candidates" in " ".join(report.failures)


def test_an_assisted_sampler_passes_or_is_rejected() -> None:
    assert exact_report_of(from_transformers(assisted_sampler()), "path").passes
    assert not exact_report_of(from_transformers(assisted_sampler("prompt")), "path").passes
    report = exact_report_of(from_transformers(assisted_sampler("residual")), "path")
    assert not report.passes
    assert "residual" in report.suspects[0]


@pytest.mark.parametrize("fault", ["", "coin", "final", "index"])
def test_a_linked_list_sampler_passes_or_is_rejected(fault: str) -> None:
    report = exact_report_of(from_linked_list(linked_sampler(fault)), "point_mass")
    assert report.passes == (not fault)


@pytest.mark.parametrize("fault", ["", "siblings"])
def test_siblings_of_a_linked_list_are_tested_in_the_order_they_were_drawn_in(fault: str) -> None:
    verify = from_linked_list(linked_sampler(fault))
    report = exact_report_of(verify, "without_replacement", budget=24_000)
    assert report.passes == (not fault)
    if fault:
        assert "sibling order" in report.suspects[0]


def test_accepted_nodes_are_those_of_the_audited_sequence() -> None:
    parents, tokens = np.array([-1, 0, 0, 2]), np.array([-1, 2, 0, 1], np.int32)
    target = np.eye(3, dtype=np.float32)[[0, 1, 1, 2]]
    verify = from_linked_list(linked_sampler())
    emitted, slots = verify(tokens, parents, None, target, np.full(5, 0.5, np.float32))
    assert emitted.tolist() == [0, 1, 2, -1]
    assert slots.tolist() == [2, 3, -1]
    batch = [np.stack([each, each]) for each in (tokens, parents)]
    coins = np.full((2, 5), 0.5, np.float32)
    both = verify(*batch, None, np.stack([target, target[::-1]]), coins)
    assert both[0].tolist() == [[0, 1, 2, -1], [2, 1, -1, -1]]
    assert both[1].tolist() == [[2, 3, -1], [1, -1, -1]]


@pytest.mark.parametrize("bonus", ["ids", "rows"])
def test_a_batch_is_verified_as_its_sequences_are(bonus: str) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (5, 2)).astype(np.int32)
    q, p = (rng.dirichlet(np.ones(3), (5, n)).astype(np.float32) for n in (2, 3))
    u = rng.random((5, 4), np.float32)
    verify = from_flat(flat_sampler(), bonus=bonus)
    together = verify(tokens, q, p, u)
    assert together.tolist() == [
        verify(*each).tolist() for each in zip(tokens, q, p, u, strict=True)
    ]


def recorded(seen: list[Any], *, bonus: str = "ids") -> Any:
    def sample(*, randomness: Any, num_draft_tokens: Any, bonus_token_ids: Any, **_: Any) -> Any:
        seen.append((randomness, bonus_token_ids))
        library = jnp if isinstance(num_draft_tokens, jax.Array) else np
        return library.full((len(num_draft_tokens), 3), 0)

    return from_flat(sample, bonus=bonus)


PATH = (np.array([1]), np.full((1, 4), 0.25, np.float32), np.full((2, 4), 0.25, np.float32))


def test_every_source_of_randomness_reaches_the_sampler_and_draws_the_bonus_token() -> None:
    for source in (7, np.random.default_rng(0), np.array([0.1, 0.2, 0.6], np.float32)):
        seen: list[Any] = []
        assert recorded(seen)(*PATH, source).tolist() == [0, 0, 0]
        given, ids = seen[0]
        assert len(given) == 4 and ids.shape == (4, 1)
        if isinstance(source, np.ndarray):
            assert given.tolist() == [source[:2].tolist()] * 4
            assert ids[1, 0] == 2
        else:
            assert given == [source] * 4
    drawn = []
    for seed in range(64):
        seen = []
        recorded(seen)(*PATH, seed)
        drawn.append(int(seen[0][1][1, 0]))
    assert set(drawn) == {0, 1, 2, 3}


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_with_jax_keys_an_adapter_runs_under_vmap(make: Any) -> None:
    seen: list[Any] = []
    arrays = [jnp.asarray(each) for each in PATH]
    keys = jnp.stack([make(seed) for seed in range(200)])
    found = jax.jit(jax.vmap(lambda key: recorded(seen)(*arrays, key)))(keys)
    assert found.shape == (200, 3)
    assert seen[0][0].shape[0] == 4
    own = jax.vmap(lambda key: recorded(seen)(*arrays, key).sum() + seen[-1][1][1, 0])(keys)
    assert set(own.tolist()) == {0, 1, 2, 3}


def test_what_does_not_fit_is_rejected_by_place_and_value() -> None:
    def short(**_: Any) -> np.ndarray:
        return np.zeros((2, 2), int)

    def uneven(**_: Any) -> tuple[np.ndarray, int]:
        return np.zeros((1, 2), int), 0

    tree = np.array([-1, 1]), np.array([-1, 0]), None, PATH[2]
    cases = {
        "bonus is 'both': must be one of 'ids', 'rows', 'none'": lambda: from_flat(
            short, bonus="both"
        ),
        "output_token_ids has shape (2, 2): must be (4, 3) or (8,)": lambda: from_flat(short)(
            *PATH, 0
        ),
        "n_matches is 0: must be one less than the 2 tokens": lambda: from_transformers(uneven)(
            *PATH, np.zeros(2)
        ),
        "randomness has 2 uniforms: 3 are taken here": lambda: from_linked_list(linked_sampler())(
            *tree, np.zeros(2, np.float32)
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
