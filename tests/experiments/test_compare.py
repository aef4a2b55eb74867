"""Comparisons: the cost of each decoder worked out by hand, and whether it has the target's law."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js
from jaxspec import experiments
from jaxspec.decode import Decoder
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, FixedTree, SampledPath
from jaxspec.models import Answer, Provider

PROMPT = (0,)
POLICY = AdaptiveTreePolicy(
    min_width=1, max_width=2, min_depth=1, max_depth=2, first_depth=1, max_nodes=5
)


VOCAB = 3  # as in the toys of other tests, whose compiled programs serve here; two ever occur


class Counted:
    """A model of two tokens whose row depends on the last token; it counts what it is asked."""

    def __init__(self, share_of_other: float, *, is_batched: bool = False) -> None:
        self.queries = self.calls = 0
        self.share = share_of_other
        ask = self.batch if is_batched else self.one
        self.provider = Provider("counted", VOCAB, ask, is_batched=is_batched)

    def row(self, context) -> list[float]:
        self.queries += 1
        row = [1 - self.share, self.share]
        return [*(row if context[-1] == 0 else row[::-1]), 0.0]

    def one(self, context):
        self.calls += 1
        return self.row(context)

    def batch(self, queries):
        self.calls += 1
        return [Answer(query.id, self.row(query.context)) for query in queries]


def path(draft, depth, rule="token"):
    return SampledPath(draft.provider, depth, js.RULES[rule])


def compare(target, drafter, new_tokens, **options):
    options = {"new_tokens": new_tokens, **options}
    return experiments.compare(target.provider, drafter, PROMPT, jax.random.key(5), **options)


def counts(run, *names):
    return tuple(getattr(run.metrics, name) for name in names)


TARGET = ("target_queries", "target_calls", "target_batches")
DRAFT = ("draft_queries", "draft_calls", "draft_batches")
DONE = ("rounds", "new_tokens", "drafted", "accepted")


@pytest.mark.parametrize("is_batched", [False, True], ids=["one by one", "batched"])
def test_a_path_of_2_that_is_always_right_costs_what_is_worked_out_by_hand(is_batched):
    # The target goes 0 1 0 1 ..., the draft too: rounds of 2 and the bonus token, three times.
    target, draft = (Counted(1.0, is_batched=is_batched) for _ in range(2))
    found = compare(target, path(draft, 2), 9)
    assert found.baseline.text == found.speculative.text == (1, 0, 1, 0, 1, 0, 1, 0, 1)
    assert counts(found.baseline, *DONE) == (9, 9, 0, 0)
    assert counts(found.baseline, *TARGET) == (9, 9, 9)
    assert counts(found.baseline, *DRAFT) == (0, 0, 0)
    assert counts(found.speculative, *DONE) == (3, 9, 6, 6)
    assert counts(found.speculative, *TARGET) == (9, 3 if is_batched else 9, 3)
    assert counts(found.speculative, *DRAFT) == (6, 6, 6)
    assert found.speculative.metrics.tokens_per_target_batch == 3
    assert found.baseline.metrics.acceptance.value is None
    # The counts in the report are those that the callbacks kept themselves.
    assert target.queries == 18
    assert target.calls == 9 + (3 if is_batched else 9)
    assert (draft.queries, draft.calls) == (6, 6)


def test_without_the_bonus_no_leaf_is_asked_about_and_the_last_round_is_capped():
    # Rounds of 2, 2, 2, 2 and, the budget being 9, of 1.
    target, draft = Counted(1.0), Counted(1.0)
    found = compare(target, path(draft, 2), 9, bonus=False)
    assert counts(found.speculative, *DONE) == (5, 9, 9, 9)
    assert counts(found.speculative, *TARGET) == (9, 9, 5)
    assert (target.queries, draft.queries) == (9 + 9, 9)


@pytest.mark.parametrize("is_batched", [False, True], ids=["one by one", "batched"])
def test_a_fixed_tree_whose_second_siblings_are_right_costs_what_is_worked_out_by_hand(is_batched):
    # Widths 2, 1: five nodes. The draft prefers the wrong token, so that at the root the second
    # sibling is accepted and the lone candidate below it is not: 2 tokens a round. With 2 tokens
    # to go one level is drafted, three nodes, and the bonus follows.
    target = Counted(1.0, is_batched=is_batched)
    draft = Counted(0.25, is_batched=is_batched)
    found = experiments.compare_tree_decoding(
        target.provider, draft.provider, PROMPT, jax.random.key(5), new_tokens=6, shape=(2, 1)
    )
    assert found.speculative.name == "fixed tree"
    run = found.speculative
    assert run.text == found.baseline.text == (1, 0) * 3
    assert counts(run, *DONE) == (3, 6, 4 + 4 + 2, 3)
    assert counts(run, *TARGET) == (5 + 5 + 3, 3 if is_batched else 13, 3)
    assert counts(run, *DRAFT) == (3 + 3 + 1, 2 + 2 + 1 if is_batched else 7, 2 + 2 + 1)
    assert [(r.hits, r.chances) for r in run.metrics.by_depth] == [(3, 3), (0, 2)]
    assert [(r.hits, r.chances) for r in run.metrics.by_rank] == [(0, 5), (3, 3)]
    assert run.metrics.block_efficiency == 2
    assert (target.queries, draft.queries) == (6 + 13, 7)


def test_an_adaptive_tree_that_deepens_costs_what_is_worked_out_by_hand():
    # A certain draft: width 1. Depth 1, then 2 as all was accepted, then 0 as one token is left.
    target, draft = Counted(1.0), Counted(1.0)
    found = compare(target, AdaptiveTree(draft.provider, policy=POLICY), 6)
    assert counts(found.speculative, *DONE) == (3, 6, 3, 3)
    assert counts(found.speculative, *TARGET) == (2 + 3 + 1, 6, 3)
    assert counts(found.speculative, *DRAFT) == (3, 3, 3)
    assert (target.queries, draft.queries) == (6 + 6, 3)


@pytest.mark.parametrize(
    "drafter",
    [
        lambda draft: path(draft, 2),
        lambda draft: path(draft, 2, "block"),
        lambda draft: FixedTree(draft.provider, (2, 1)),
        lambda draft: AdaptiveTree(draft.provider, policy=POLICY),
    ],
    ids=["path", "block", "tree", "adaptive"],
)
def test_both_runs_have_one_target_prompt_key_and_exact_budget_and_one_exact_law(drafter):
    steps = []
    target, draft = Counted(0.75), Counted(0.375)
    found = compare(
        target,
        drafter(draft),
        7,
        name="mine",
        law_tokens=3,
        keep_records=True,
        progress=lambda *step: steps.append(step),
    )
    for run in (found.baseline, found.speculative):
        assert run.decoder["target"] == target.provider.name
        assert len(run.text) == run.metrics.new_tokens == 7
        assert (run.prompt, run.finished) == (PROMPT, "budget")
        assert (run.request["key_data"], run.request["new_tokens"]) == ([0, 5], 7)
        assert len(run.records) == run.metrics.rounds
        mine = [done for what, done, total in steps if what == f"decoding: {run.name}"]
        assert len(mine) == run.metrics.rounds
        assert mine[-1] == 7
    assert found.baseline.decoder["drafter"] == "no draft"
    assert (found.baseline.name, found.speculative.name) == ("plain", "mine")
    assert found.law.test is None
    assert found.law.tv <= 1e-6
    assert found.law.target_tv <= 1e-6
    assert found.law.agrees
    again = compare(target, drafter(draft), 7, name="mine", baseline=found.baseline)
    assert again.baseline is found.baseline
    assert again.speculative == found.speculative  # the key decides
    assert again.law is None
    assert again.speculative.records == ()


def test_a_baseline_of_another_budget_is_a_mismatch():
    target, draft = Counted(0.75), Counted(0.375)
    found = compare(target, path(draft, 2), 2)
    with pytest.raises(experiments.MismatchError, match="continuation length differs: 2 and 3"):
        compare(target, path(draft, 2), 3, baseline=found.baseline)


@dataclasses.dataclass(frozen=True)
class Mislabelled(SampledPath):
    """Draws from the draft and records uniform rows: the commonest fault in this field."""

    def finish(self, state, view):
        uniform = jnp.full_like(state.rows, 1 / state.rows.shape[-1])
        return super().finish(dataclasses.replace(state, rows=uniform), view)


def test_the_exact_law_tells_a_decoder_whose_recorded_rows_are_wrong_by_its_total_variation():
    # A fair target and a draft that is always right about the next token's being the other one,
    # recorded as uniform: always accepted, so "1 0 1" always comes, of probability 1/8.
    target, draft = Counted(0.5).provider, Counted(1.0).provider
    found = experiments.compare(
        target,
        Mislabelled(draft, depth=2),
        PROMPT,
        jax.random.key(0),
        new_tokens=3,
        law_tokens=3,
        bonus=False,
    )
    assert found.law.tv == pytest.approx(7 / 8, abs=1e-6)
    assert found.law.target_tv == pytest.approx(7 / 8, abs=1e-6)
    assert not found.law.agrees


WIDE = 20


def wide(name: str, row) -> Provider:
    row = np.asarray(row, np.float32)
    return Provider(name, WIDE, lambda context: row)


UNIFORM = wide("uniform", np.full(WIDE, 1 / WIDE))
# Mostly on four tokens; the draft's favourites are others than the target's.
PEAKED = wide("peaked", [0.23] * 4 + [0.005] * 16)
SHARP = wide("sharp", [0.81] + [0.01] * 19)
SHIFTED = wide("shifted", [0.01] * 3 + [0.23] * 4 + [0.05 / 13] * 13)


def test_a_large_vocabulary_is_sampled_and_a_lossless_decoder_passes_with_its_power_stated():
    steps = []
    law = experiments.compare_laws(
        Decoder(PEAKED),
        Decoder(PEAKED, SampledPath(SHIFTED, depth=2)),
        PROMPT,
        jax.random.key(1),
        tokens=2,
        runs=150,
        progress=lambda *step: steps.append(step),
    )
    assert law.tv is None
    assert law.target_tv is None
    assert law.agrees
    assert law.test.sizes == (150, 150)
    assert law.test.degrees >= 8
    assert law.test.detectable < 0.5
    assert steps == [(done, 300) for done in range(1, 301)]


def test_a_sampled_law_that_is_really_different_is_detected():
    # The target is uniform and so are the recorded rows: all is accepted, and the draft's own law
    # comes out, 0.76 from the target's in the first token alone.
    law = experiments.compare_laws(
        Decoder(UNIFORM),
        Decoder(UNIFORM, Mislabelled(SHARP, depth=2)),
        PROMPT,
        jax.random.key(1),
        tokens=2,
        runs=60,
    )
    assert law.test.detectable < 0.6
    assert law.test.p_value < law.test.level
    assert not law.agrees


def test_first_tokens_are_those_of_the_decoder_at_its_full_depth():
    seen = []

    def ask(context):
        seen.append(context)
        return np.full(WIDE, 1 / WIDE)

    drafter = SampledPath(Provider("seen", WIDE, ask), depth=2)
    experiments.compare_laws(
        Decoder(UNIFORM),
        Decoder(UNIFORM, drafter),
        PROMPT,
        jax.random.key(0),
        tokens=2,
        runs=2,
        new_tokens=9,
    )
    # A budget of these 2 tokens would have left room for one drafted token beside the bonus.
    assert max(map(len, seen)) >= len(PROMPT) + 1


@pytest.mark.parametrize("option", [{"tokens": 0}, {"tokens": 1.5}, {"runs": 0}])
def test_a_comparison_of_nothing_is_an_error(option):
    (name,) = option
    options = {"key": jax.random.key(0), "tokens": 2, "runs": 2, **option}
    with pytest.raises(ValueError, match=f"{name} is .*: must be"):
        experiments.compare_laws(Decoder(UNIFORM), Decoder(UNIFORM), PROMPT, **options)
    silent = Counted(0.5)
    with pytest.raises(ValueError, match=f"law_{name} is "):
        compare(silent, path(silent, 2), 3, **{f"law_{name}": -option[name] or -1})
    assert silent.queries == 0  # before anything is decoded


def test_a_run_of_a_prompt_in_an_array_is_plain_json(tmp_path):
    options = {"key": jax.random.key(0), "new_tokens": 1, "keep_records": True}
    run = experiments.run(Decoder(UNIFORM), np.array([0, 1]), **options)
    experiments.save(tmp_path / "run.json", [run])
    assert json.loads((tmp_path / "run.json").read_text())["content"][0]["prompt"] == [0, 1]
    assert experiments.load(tmp_path / "run.json") == [run]


def test_laws_of_two_targets_are_not_compared():
    with pytest.raises(experiments.MismatchError, match="differs: 'uniform' and 'peaked'"):
        experiments.compare_laws(
            Decoder(UNIFORM), Decoder(PEAKED), PROMPT, jax.random.key(0), tokens=1, runs=1
        )
