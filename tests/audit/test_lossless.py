"""The check of foreign verifiers: right ones pass, wrong ones fail with the right diagnosis."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import foreign

import jaxspec as js
from jaxspec import audit
from jaxspec.audit import faults, settings, suspects
from jaxspec.audit.choices import Uniforms
from jaxspec.audit.reference import PLAIN_RULES, Nodes
from jaxspec.testing import assert_lossless

SMALL = 14_000
"""Calls in which every strong fault is seen."""

TREES = {"point_mass": "point", "with_replacement": "with", "without_replacement": "without"}
RIGHT = {
    "token": (foreign.token, "path"),
    "block": (foreign.block, "path"),
    "point_mass": (foreign.point_mass, "point_mass_path"),
    **{kind: (functools.partial(foreign.tree, how=how), kind) for kind, how in TREES.items()},
}

EPSILON = "epsilon: 0.001 added to the normalised residual"
DIAGNOSES = {
    "residual p": "residual: replacement drawn from p instead of the residual",
    "residual p without x": "residual: replacement drawn from p without the rejected token",
    "residual |p - q|": "residual: replacement drawn from |p - q| instead of relu(p - q)",
    "residual argmax": "residual: replacement is the most likely token of the residual",
    "row before": "row: target row of the position before, but for the bonus",
    "row after": "row: target row of the position after",
    "hotter q": "draft law mismatch: q at another temperature, q ** 0.5",
    "lenience": "lenience: accepts with min(1, p / (0.8 q))",
    "always": "accept test: every candidate is accepted",
    "never": "accept test: no candidate is accepted, yet the residual is drawn from",
    "greedy": "greedy mixing: accepts the target's most likely token only, and replaces by it",
    "one coin": "reused noise: one uniform tests every candidate",
    "reused": "reused noise: the uniform of the rejected candidate draws the replacement too",
    "bonus q": "bonus row: drawn from the last draft row",
    "bonus row before": "bonus row: the row before the last candidate instead of after it",
}
BLOCK_DIAGNOSES = {
    "uncapped": "block weights: not capped at 1",
    "own weight": "block weights: a prefix is kept with its own weight instead of Z / D",
    "first failure": "block order: stops at the first failure",
    "token residual": "block residual: relu(p - q), without the weight of the prefix",
}
TREE_DIAGNOSES = {
    ("with", "sorted"): "sibling order: sorted by q",
    ("with", "skip duplicates"): "siblings: duplicates are skipped",
    ("without", "reversed"): "sibling order: tested in the reverse order",
    ("without", "with"): "siblings: drawn without replacement, verified as if with it",
    ("without", "zeroed"): "residual: rejected token removed from what is left instead of "
    "subtracting the draft row",
    ("point", "unnormalised"): "residual: not renormalised between siblings",
    ("point", "kept"): "residual: replacement drawn from p instead of the residual",
}


def variant(function, fault, **more):
    return functools.partial(function, fault=fault, **more)


# --- right verifiers


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_verifier_of_uniforms_is_proved_and_accepts_as_its_rule(name):
    verify, kind = RIGHT[name]
    report = audit.check_lossless(
        verify, kind=kind, randomness="uniforms", rule=name, budget=240_000
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
        counted, kind="path", randomness="jax_key", rule="token", budget=60_000, instances=cases
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


def batch_of(verify):
    def in_batch(tokens, draft_rows, target_rows, sources):
        return [
            verify(*args) for args in zip(tokens, draft_rows, target_rows, sources, strict=True)
        ]

    return in_batch


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


# --- wrong ones


@pytest.mark.parametrize("fault", DIAGNOSES)
@pytest.mark.parametrize("randomness", ["uniforms", "numpy"])
def test_a_fault_of_token_verification_is_named(fault, randomness):
    report = audit.check_lossless(
        variant(foreign.token, fault), kind="path", randomness=randomness, budget=300_000
    )
    assert not report.is_lossless
    assert report.suspects[0] == DIAGNOSES[fault]
    assert len(report.suspects) == 1
    assert f"Looks like {DIAGNOSES[fault][:40]}" in str(report)


@pytest.mark.parametrize("fault", BLOCK_DIAGNOSES)
def test_a_fault_of_block_verification_is_named(fault):
    report = audit.check_lossless(variant(foreign.block, fault), kind="path", randomness="uniforms")
    assert not report.is_lossless
    assert report.suspects == (BLOCK_DIAGNOSES[fault],)


@pytest.mark.parametrize(("how", "fault"), TREE_DIAGNOSES)
def test_a_fault_of_a_tree_is_named(how, fault):
    kind = next(kind for kind, name in TREES.items() if name == how)
    report = audit.check_lossless(
        variant(foreign.tree, fault, how=how), kind=kind, randomness="numpy", budget=300_000
    )
    assert not report.is_lossless
    assert TREE_DIAGNOSES[how, fault] in report.suspects


def test_a_weak_fault_is_seen_and_an_unknown_one_is_placed():
    weak = audit.check_lossless(variant(foreign.token, "floor"), kind="path", randomness="uniforms")
    assert weak.suspects == ("epsilon: q floored at 0.1 in the accept test",)
    third = audit.check_lossless(
        variant(foreign.token, "target cut again"), kind="path", randomness="uniforms"
    )
    assert not third.is_lossless
    assert third.suspects == ()
    shift = third.results[0].shift
    assert (shift.position, shift.token) == (0, 3)
    assert shift.expected == pytest.approx(0.45, abs=1e-6)
    assert shift.observed == pytest.approx(0.45 / 0.95, abs=1e-6)
    assert "No known fault fits" in str(third)
    deep = audit.check_lossless(
        variant(foreign.token, "third by second"), kind="path", randomness="uniforms"
    )
    (wrong,) = [result for result in deep.results if not result.is_right]
    assert (wrong.name, wrong.shift.position) == ("a path of three", 2)


def test_accepting_at_a_draw_of_exactly_0_is_seen_in_the_exact_law():
    report = audit.check_lossless(variant(foreign.token, "<="), kind="path", randomness="uniforms")
    assert not report.is_lossless
    assert max(result.bias for result in report.results) < 1e-6
    assert report.suspects[0].startswith("accept test: <= instead of <")
    assert re.search(r"has target probability 0: .* with probability \d", " ".join(report.failures))


def test_an_interval_of_draws_with_another_outcome_is_seen():
    def island(draft_tokens, draft_rows, target_rows, uniforms):
        if 0.611 < uniforms[0] < 0.612:
            uniforms = np.append(0.0, uniforms[1:])
        return foreign.token(draft_tokens, draft_rows, target_rows, uniforms)

    cases = settings.instances_of_kind("path")[:1]
    report = audit.check_lossless(
        island, kind="path", randomness="uniforms", instances=cases, budget=50_000
    )
    (result,) = report.results
    assert result.is_exact
    assert not report.is_lossless
    assert 1e-4 < result.bias <= 0.6 * 1.001e-3  # where token 0 is drawn; less if a piece is missed


def test_draws_that_have_no_boxes_are_sampled_and_the_report_says_so():
    def races(draft_tokens, draft_rows, target_rows, uniforms):
        # An exponential race: lossless, and its edges lie across the axes.
        clocks = -np.log(1 - uniforms[: target_rows.shape[1]].astype(np.float64))
        row = target_rows[0]
        return [int(np.argmin(np.where(row > 0, clocks / np.where(row > 0, row, 1), np.inf)))]

    cases = [settings.instances_of_kind("path")[0]]
    report = audit.check_lossless(
        races, kind="path", randomness="uniforms", num_uniforms=4, instances=cases, budget=20_000
    )
    assert report.is_lossless
    assert not report.results[0].is_exact
    assert "no exact law" in report.notes[0]


def rare():
    return [settings.instances_of_kind("path")[3]]


@pytest.mark.parametrize("seed", range(3))
def test_a_mixture_of_one_percent_is_seen_within_the_share_of_one_instance(seed):
    def mixed(draft_tokens, draft_rows, target_rows, generator):
        fault = "always" if generator.random() < 0.01 else ""
        return foreign.token(draft_tokens, draft_rows, target_rows, generator, fault=fault)

    report = audit.check_lossless(
        mixed, kind="path", randomness="numpy", instances=rare(), budget=42_000, seed=seed
    )
    assert not report.is_lossless
    assert re.match(
        r"accept test: every candidate is accepted, in about (0\.[789]|1\.[0123])% of the calls",
        report.suspects[0],
    )


def test_one_token_of_a_hundred_from_the_draft_is_seen():
    def mixed(draft_tokens, draft_rows, target_rows, generator):
        if generator.random() < 0.01:
            return [foreign.pick(generator.random(), draft_rows[0])]
        return foreign.token(draft_tokens, draft_rows, target_rows, generator)

    report = audit.check_lossless(
        mixed, kind="path", randomness="numpy", instances=rare(), budget=42_000
    )
    assert not report.is_lossless
    (result,) = report.results
    low, high = result.interval
    assert low < 0.01 * 0.88 < high
    assert (result.shift.position, result.shift.token) == (0, 0)


# --- output, contract, acceptance


CONTRACT = {
    "no bonus": "bonus missing",
    "extra bonus": "too long",
    "in place": "arguments",
}


@pytest.mark.parametrize("fault", CONTRACT)
def test_a_right_law_with_invalid_output_does_not_pass(fault):
    report = audit.check_lossless(
        variant(foreign.token, fault), kind="path", randomness="numpy", budget=2_000
    )
    assert report.is_lossless
    assert not report.passes
    kinds = {kind for result in report.results for kind in result.problems} | {*report.contract}
    assert kinds == {CONTRACT[fault]}
    assert "OUTPUT INVALID" in str(report)


def emission(change):
    """Change what a right verifier emits."""

    def verify(draft_tokens, draft_rows, target_rows, source):
        return change(foreign.token(draft_tokens, draft_rows, target_rows, source), draft_tokens)

    return verify


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda emitted, _: [], "empty"),
        (lambda emitted, _: [*emitted[:-1], 99_999], "range"),
        (lambda emitted, _: [*emitted, -1, 0], "padding"),
        (lambda emitted, drafted: [(drafted[0] + 1) % 2, *emitted[1:]], "prefix"),
    ],
    ids=["empty", "range", "padding", "prefix"],
)
def test_emissions_that_no_verifier_may_emit_are_named(change, kind):
    report = audit.check_lossless(emission(change), kind="path", randomness="numpy", budget=2_000)
    assert not report.passes
    assert kind in {each for result in report.results for each in result.problems}


def test_a_bonus_token_that_is_not_wanted_is_invalid():
    wanted = audit.check_lossless(
        functools.partial(foreign.token, bonus=False),
        kind="path",
        randomness="uniforms",
        bonus=False,
        rule="token",
    )
    assert wanted.passes, str(wanted)
    report = audit.check_lossless(foreign.token, kind="path", randomness="uniforms", bonus=False)
    assert {"bonus"} == {kind for result in report.results for kind in result.problems}
    assert not report.passes


@pytest.mark.parametrize("how", ["point", "with", "without"])
def test_wrong_slots_are_invalid(how):
    kind = next(kind for kind, name in TREES.items() if name == how)
    report = audit.check_lossless(
        variant(foreign.tree, "slots", how=how), kind=kind, randomness="numpy", budget=2_000
    )
    assert report.is_lossless
    assert {"slots"} == {kind for result in report.results for kind in result.problems}


def test_the_second_of_two_twins_is_the_wrong_slot():
    def second(tokens, parents, draft_rows, target_rows, source):
        emitted, slots = foreign.tree(tokens, parents, draft_rows, target_rows, source, how="with")
        twins = [n for n in range(len(tokens)) if slots and parents[n] == 0]
        if slots and len(slots) == 1:
            slots = [max(n for n in twins if tokens[n] == tokens[slots[0]])]
        return emitted, slots

    report = audit.check_lossless(second, kind="with_replacement", randomness="numpy", budget=4_000)
    assert report.is_lossless
    assert "twin" in {kind for result in report.results for kind in result.problems}


def test_randomness_from_elsewhere_and_dependence_on_the_batch_are_found():
    hidden = np.random.default_rng(0)

    def from_elsewhere(*args):
        return foreign.token(*args[:3], hidden)

    report = audit.check_lossless(from_elsewhere, kind="path", randomness="numpy", budget=2_000)
    assert report.is_lossless
    assert list(report.contract) == ["seed"]

    def shared(tokens, draft_rows, target_rows, sources):
        return batch_of(foreign.token)(tokens, draft_rows, target_rows, [sources[0]] * len(tokens))

    report = audit.check_lossless(
        shared, kind="path", randomness="seed", batched=True, budget=2_000
    )
    assert "batch" in report.contract
    assert "depend on its batch" in str(report)


def test_a_lossless_but_wasteful_verifier_is_told_apart():
    for randomness, budget in (("uniforms", 300_000), ("numpy", 60_000)):
        report = audit.check_lossless(
            foreign.token, kind="path", randomness=randomness, rule="block", budget=budget
        )
        assert report.is_lossless
        assert report.is_as_rule is False
        assert not report.passes
        assert report.matches == ("token",)
        assert "wasteful; as token in every instance" in " ".join(str(report).split())
    point_mass = variant(foreign.token, "certain")
    report = audit.check_lossless(point_mass, kind="path", randomness="uniforms")
    assert report.passes
    assert report.matches == ()


# --- the report, the face for test suites, errors


def test_a_failing_assertion_is_a_page_with_the_law_and_the_diagnosis():
    wrong = variant(foreign.token, "residual p")
    with pytest.raises(AssertionError) as failure:
        assert_lossless(wrong, kind="path", randomness="numpy", budget=SMALL)
    page = str(failure.value)
    lines = page.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 96
    assert lines[0].startswith("BIASED")
    assert "Looks like residual: replacement drawn from p instead of the residual" in page
    place = r"position 0, token \d: expected 0\.\d{3}, observed 0\.\d{3}"
    assert re.search(place, " ".join(page.split()))
    table = lines.index("Law of the first token in 'a path of one', the smallest failing instance:")
    assert lines[table + 1].split() == ["tokens", "expected", "observed"]
    assert {line.split()[0] for line in lines[table + 2 : table + 6]} == set("0123")
    assert_lossless(foreign.token, kind="path", randomness="uniforms", rule="token")


def test_the_report_is_json_and_repeats_with_its_seed():
    def check(seed):
        wrong = variant(foreign.token, "reused")
        return audit.check_lossless(
            wrong, kind="path", randomness="numpy", budget=SMALL, seed=seed
        ).to_json()

    first = json.loads(json.dumps(check(1), allow_nan=False))
    assert first["lossless"] is False
    assert first["suspects"] == [DIAGNOSES["reused"]]
    assert first["failures"][0].startswith("law (p ")
    assert first == json.loads(json.dumps(check(1)))
    assert first["results"] != json.loads(json.dumps(check(2)))["results"]


def test_progress_is_called_from_the_start_to_the_end():
    calls = []
    audit.check_lossless(
        foreign.token,
        kind="path",
        randomness="uniforms",
        progress=lambda *step: calls.append(step),
    )
    steps = len(settings.instances_of_kind("path")) + 1
    assert [done for _, done, _ in calls] == list(range(steps + 1))
    assert {total for _, _, total in calls} == {steps}


ERRORS = {
    "kind": ({"kind": "tree"}, "kind is 'tree': must be one of path, "),
    "randomness": ({"randomness": "cuda"}, "randomness is 'cuda': must be one of uniforms, "),
    "rule": ({"rule": "traversal"}, "for kind 'path' must be one of token, block"),
    "budget": ({"budget": 0}, "budget is 0: must be an integer >= 1"),
    "instances": ({"instances": []}, "instances is empty"),
    "num_uniforms": ({"num_uniforms": 0}, "num_uniforms is 0"),
    "batched": ({"batched": 1}, "batched is 1: must be True or False"),
    "verify": ({"verify": "token"}, "verify is 'token', of type str: must be a verifier"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_raise_with_their_value(name):
    given, message = ERRORS[name]
    arguments = {"verify": foreign.token, "kind": "path", "randomness": "numpy", **given}
    with pytest.raises(ValueError, match=re.escape(message)):
        audit.check_lossless(**arguments)


def test_instances_that_do_not_suit_the_kind_raise():
    tree = settings.instances_of_kind("with_replacement")[0]
    given = settings.instances_of_kind("point_mass")[0]
    for kind, instance, message in (
        ("path", tree, "is a tree: kind 'path' needs one candidate at each depth"),
        ("path", given, "has no draft rows or no branching"),
        ("point_mass", tree, "has no candidates"),
    ):
        with pytest.raises(ValueError, match=message):
            audit.check_lossless(foreign.token, kind=kind, randomness="numpy", instances=[instance])


def test_a_verifier_that_raises_is_reported_with_its_instance_and_arguments():
    def broken(draft_tokens, draft_rows, target_rows, source):
        raise RuntimeError("no such row")

    message = r"the verifier raised RuntimeError: no such row; in instance '.*draft_tokens \["
    with pytest.raises(ValueError, match=message) as failure:
        audit.check_lossless(broken, kind="path", randomness="numpy")
    assert isinstance(failure.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "a NoneType, None"),
        (np.zeros((2, 2), np.int32), r"a ndarray of shape \(2, 2\) and dtype int32"),
        (np.zeros(2), r"a ndarray of shape \(2,\) and dtype float64"),
        (3, "a int, 3"),
    ],
    ids=["none", "matrix", "floats", "number"],
)
def test_a_wrong_result_is_described(returned, shown):
    with pytest.raises(ValueError, match=f"returned for the emitted tokens {shown}"):
        audit.check_lossless(lambda *args: returned, kind="path", randomness="numpy")


def test_a_batch_of_a_wrong_size_and_missing_slots_are_described():
    def one_too_few(*args):
        return batch_of(foreign.token)(*args)[1:]

    with pytest.raises(ValueError, match="the batch had 12 sequences"):
        audit.check_lossless(one_too_few, kind="path", randomness="numpy", batched=True)

    def sometimes(*args):
        emitted, slots = foreign.tree(*args)
        return (emitted, slots) if slots else emitted

    with pytest.raises(ValueError, match=r"slots in .* of .* calls"):
        audit.check_lossless(sometimes, kind="without_replacement", randomness="numpy")


def test_torch_that_is_not_installed_names_the_extra():
    try:
        import torch  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"randomness='torch' needs torch: .*\[parity\]"):
            audit.check_lossless(foreign.token, kind="path", randomness="torch")
    else:
        pytest.skip("torch is installed")


# --- the instances and the named faults


@pytest.mark.parametrize("kind", settings.KINDS)
def test_every_rule_of_a_kind_emits_the_targets_text_and_every_fault_another(kind):
    chosen = [make for make in settings.settings_of_kind(kind, True) if make.vocab < 100]

    def text(setting, law):
        found = {}
        for (_, emitted), mass in law.items():
            for rest, chance in setting.follow(emitted, setting.depth + 1 - len(emitted)).items():
                found[emitted + rest] = found.get(emitted + rest, 0) + mass * chance
        return found

    def distance(setting, suspect):
        law = text(setting, suspect.law(setting))
        keys = {*law, *setting.text}
        return sum(abs(law.get(k, 0) - setting.text.get(k, 0)) for k in keys) / 2

    for setting in chosen:
        assert setting.chances.sum() == pytest.approx(1, abs=1e-12)
        for rule in suspects.right_rules(kind).values():
            assert distance(setting, rule) < 1e-12
    words = [fault.words for fault in faults.faults_of_kind(kind)]
    assert len(words) == len(set(words)) > 30
    for fault in faults.faults_of_kind(kind):
        assert any(distance(setting, fault) > 1e-6 for setting in chosen), fault.words


def test_a_plain_rule_behind_the_interface_is_proved_as_it_is():
    """Any rule of the reference, replayed by uniforms, is a foreign verifier."""

    def verify(tokens, parents, draft_rows, target_rows, uniforms):
        count = len(tokens)
        children = [[n for n in range(count) if parents[n] == node] for node in range(count)]
        rows = [
            (np.float64(p), np.float64(q)) for p, q in zip(target_rows, draft_rows, strict=True)
        ]
        nodes = Nodes(children, lambda now, choices: int(tokens[now.child]), rows.__getitem__, True)

        def draw(slot):
            return (
                0.0
                if "tile" in slot
                else float(uniforms[int(slot.split()[1]) - 1 if " " in slot else -1])
            )

        outcome = PLAIN_RULES["traversal"].verify(nodes, Uniforms(draw))
        return list(outcome.tokens), list(outcome.path[1:])

    cases = [case for case in settings.instances_of_kind("without_replacement") if case.vocab < 100]
    report = audit.check_lossless(
        verify,
        kind="without_replacement",
        randomness="uniforms",
        rule="traversal",
        instances=cases[:3],
    )
    assert report.passes, str(report)
    assert all(result.is_exact for result in report.results)
