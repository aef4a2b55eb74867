"""The law of a decoded text: exact for every decoder, and wrong for every decoder that is."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js
from jaxspec.audit import DecodingLaw, decoding_law, g_test
from jaxspec.decode import (
    CallableTarget,
    Decoder,
    DecodeState,
    Scores,
)
from jaxspec.draft import (
    AdaptiveTree,
    AdaptiveTreePolicy,
    Draft,
    Drafter,
    FixedTree,
    NoDraft,
    SampledPath,
)
from jaxspec.models.provider import Context, Provider
from jaxspec.trees import make_tree

VOCAB = 3
PROMPT = (0,)


def toy(name: str, seed: int, *, alive: int = VOCAB) -> Provider:
    """A model with a row of its own for each context, on the first tokens of the vocabulary."""

    @functools.cache
    def row_after(context: Context) -> np.ndarray:
        row = np.zeros(VOCAB)
        row[:alive] = np.random.default_rng([seed, *context]).dirichlet(np.ones(alive))
        return row

    return Provider(name, VOCAB, row_after)


DRAFT = toy("draft", 2)
TARGETS = {
    "three tokens of three": (toy("target", 1), 3),
    "four tokens of two, the third has probability 0": (toy("target", 1, alive=2), 4),
}
# Starts at depth 1 and goes to 2 and back, on capacities that it shares with the fixed tree.
POLICY = AdaptiveTreePolicy(
    min_width=1, max_width=2, min_depth=1, max_depth=2, first_depth=1, max_nodes=5
)
PATH = SampledPath(DRAFT, depth=2)
TILE = SampledPath(DRAFT, depth=2, rule=js.RULES["block"])
DRAFTERS: dict[str, Drafter] = {
    "none": NoDraft(),
    "path by token": PATH,
    "path by block": TILE,
    "fixed tree": FixedTree(DRAFT, widths=(2, 1)),
    "adaptive tree": AdaptiveTree(DRAFT, POLICY),
}
each_drafter = pytest.mark.parametrize("name", DRAFTERS)


def assert_lossless(law: DecodingLaw) -> None:
    assert law.tv <= 1e-6
    assert law.impossible == 0
    assert law.misses == 0
    assert sum(law.texts.values()) == pytest.approx(1, abs=1e-9)


# --- lossless


@each_drafter
@pytest.mark.parametrize("bonus", [True, False], ids=["bonus", "no bonus"])
@pytest.mark.parametrize("case", TARGETS)
def test_every_decoder_has_exactly_the_targets_law(case: str, name: str, bonus: bool) -> None:
    target, new_tokens = TARGETS[case]
    law = decoding_law(Decoder(target, DRAFTERS[name], new_tokens, bonus), PROMPT)
    assert_lossless(law)
    assert {len(text) for text in law.texts} == {new_tokens}


@each_drafter
def test_the_law_is_the_targets_up_to_stop_tokens_and_the_end_of_the_context(name: str) -> None:
    target = TARGETS["three tokens of three"][0]
    decoder = Decoder(
        target, DRAFTERS[name], 9, bonus=True, stop_tokens=frozenset([1]), max_context=4
    )
    law = decoding_law(decoder, (2, 0))
    assert_lossless(law)
    assert all(1 not in text[:-1] for text in law.texts)
    assert {len(text) for text in law.texts} == {1, 2}


def test_the_three_scorers_lead_to_one_law() -> None:
    target = TARGETS["three tokens of three"][0]
    laws = [
        decoding_law(
            Decoder(CallableTarget(target, group), DRAFTERS["fixed tree"], 2, bonus=True), PROMPT
        )
        for group in ("node", "all", "depth")
    ]
    assert_lossless(laws[0])
    assert laws[0].texts == laws[1].texts == laws[2].texts


def test_the_depth_of_the_adaptive_tree_changes_within_the_law_that_is_proved() -> None:
    asked: set[tuple[int, int]] = set()

    @dataclasses.dataclass(frozen=True)
    class Watched(AdaptiveTree):
        def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
            draft = super().propose(context, depth, pairs)
            asked.add((len(context), draft.depth))
            return draft

    decoder = Decoder(TARGETS["three tokens of three"][0], Watched(DRAFT, POLICY), 3, bonus=False)
    assert_lossless(decoding_law(decoder, PROMPT))
    # Of one context length both depths came about, so it is the past that decided.
    assert {(1, 1), (2, 2), (2, 1)} <= asked


def test_the_law_of_a_prompt_that_fills_the_context_is_the_empty_text() -> None:
    law = decoding_law(Decoder(TARGETS["three tokens of three"][0], PATH, max_context=1), PROMPT)
    assert law.texts == law.target_texts == {(): 1.0}


def test_the_targets_own_law_is_the_product_of_its_rows_and_ends_at_stop_tokens() -> None:
    rows = {(0,): [0.5, 0.5], (0, 0): [0.25, 0.75], (0, 1): [0.0, 1.0]}
    target = Provider("target", 2, rows.__getitem__)
    whole = {(0, 0): 0.125, (0, 1): 0.375, (1, 1): 0.5}
    assert decoding_law(Decoder(target, new_tokens=2), (0,)).target_texts == whole
    stopping = Decoder(target, new_tokens=2, stop_tokens=frozenset([1]))
    stopped = {(0, 0): 0.125, (0, 1): 0.375, (1,): 0.5}
    assert decoding_law(stopping, (0,)).target_texts == stopped


def test_a_vocabulary_of_more_than_one_block_is_refused() -> None:
    wide = Provider("wide", 513, lambda _: np.full(513, 1 / 513))
    with pytest.raises(ValueError, match="vocab is 513"):
        decoding_law(Decoder(wide, new_tokens=1), PROMPT)


def test_real_runs_on_random_keys_have_the_law_that_was_composed() -> None:
    # Block verification without the bonus: after a rejection the next round must not see the draws
    # that this one has looked at, which no law of independent rounds can tell.
    decoder = Decoder(TARGETS["three tokens of three"][0], TILE, 2, bonus=False)
    law = decoding_law(decoder, PROMPT)
    runs = 2000
    texts = [
        decoder.run(PROMPT, key).new_tokens for key in jax.random.split(jax.random.key(5), runs)
    ]
    every = sorted(law.texts)
    # The exact law as a sample of a billion, beside which the 2000 are all the uncertainty.
    exact = np.array([round(1e9 * law.texts[text]) for text in every])
    found = g_test(np.array([texts.count(text) for text in every]), exact)
    assert set(texts) <= set(every)
    assert found.p_value > found.level
    assert found.detectable < 0.07


# --- what is not lossless is seen


def is_rejected(law: DecodingLaw, *, least_tv: float = 1e-3) -> bool:
    """Whether the law itself is wrong, seen in an audit without a miss."""
    return law.misses == 0 and (law.tv > least_tv or law.impossible > 0)


def audit_of(drafter: Drafter, kind: type[Decoder] = Decoder, **options: Any) -> DecodingLaw:
    given = {"target": TARGETS["three tokens of three"][0], "new_tokens": 2, "bonus": False}
    return decoding_law(kind(drafter=drafter, **{**given, **options}), PROMPT)


def sharpened(row: np.ndarray) -> np.ndarray:
    weights = row.astype(np.float64) ** 2
    return (weights / weights.sum()).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Colder(SampledPath):
    """Records rows that are colder than those that the tokens were drawn from."""

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        draft = super().propose(context, depth, pairs)
        rows = np.array(draft.proposal.draft_rows)
        rows[: draft.depth] = [sharpened(row) for row in rows[: draft.depth]]
        proposal = js.WithReplacement(tree=draft.proposal.tree, draft_rows=jnp.asarray(rows))
        return dataclasses.replace(draft, proposal=proposal)


@dataclasses.dataclass(frozen=True)
class Uniform(SampledPath):
    """Records uniform rows. The middle of each token's share there gives this very token."""

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        draft = super().propose(context, depth, pairs)
        rows = jnp.full((self.depth, VOCAB), 1 / VOCAB)
        proposal = js.WithReplacement(tree=draft.proposal.tree, draft_rows=rows)
        return dataclasses.replace(draft, proposal=proposal)


@dataclasses.dataclass(frozen=True)
class Argmax(SampledPath):
    """Takes the most probable token and records the row as if it had been drawn from it."""

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        draft = super().propose(context, depth, pairs)
        tokens = [context[-1]]
        for _ in range(draft.depth):
            (row,), _ = self.draft.rows([(*context[:-1], *tokens)])
            tokens.append(int(row.argmax()))
        tree = make_tree(tokens, range(-1, draft.depth), max_nodes=3, max_depth=2)
        rows, _ = self.draft.rows([(*context[:-1], *tokens[: n + 1]) for n in range(2)])
        proposal = js.WithReplacement(tree=tree, draft_rows=jnp.asarray(rows))
        return dataclasses.replace(draft, proposal=proposal)


@dataclasses.dataclass(frozen=True)
class Picky(SampledPath):
    """Looks at the token that this round's draw gave and drops it if it is improbable."""

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        draft = super().propose(context, depth, pairs)
        tokens = np.asarray(draft.proposal.tree.tokens)
        rows = np.asarray(draft.proposal.draft_rows)
        kept = 0
        while kept < draft.depth and rows[kept, tokens[kept + 1]] >= 0.4:
            kept += 1
        return draft if kept == draft.depth else super().propose(context, kept, pairs)


@dataclasses.dataclass(frozen=True)
class Trimmed(SampledPath):
    """Ends a draft at its first token of low probability, which is proposed or dropped."""

    drops: bool = True

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        draft = super().propose(context, depth, pairs)
        tokens = np.asarray(draft.proposal.tree.tokens)
        rows = np.asarray(draft.proposal.draft_rows)
        improbable = [n for n in range(draft.depth) if rows[n, tokens[n + 1]] < 0.3]
        if not improbable:
            return draft
        return super().propose(context, improbable[0] + (not self.drops), pairs)


def trimmed(*, drops: bool, rule: str = "token") -> DecodingLaw:
    even = Provider("even", VOCAB, lambda _: [0.5, 0.5, 0.0])
    draft = Provider("nine to one", VOCAB, lambda _: [0.9, 0.1, 0.0])
    drafter = Trimmed(draft, 2, js.RULES[rule], drops)
    return decoding_law(Decoder(even, drafter, 2, bonus=False), PROMPT)


KILL_P, KILL_Q = np.array([1, 3, 7, 9]) / 20, np.array([12, 3, 4, 1]) / 20
"""The row pair of the known-bad variants of one round: there the biases are known exactly."""

UNEVEN = Provider("uneven", 4, lambda _: KILL_Q)
DRAW = {
    name: jax.jit(js.RULES[name].proposal.draw)
    for name in ("with_replacement", "without_replacement")
}


@dataclasses.dataclass(frozen=True)
class Siblings:
    """Two candidates for the next token, sampled, and then changed by looking at them."""

    rule: js.Rule
    change: Callable[[list[int]], list[int]]
    draft: Provider = UNEVEN
    max_nodes: int = 3
    first_depth: int = 1

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        (row,), usage = self.draft.rows([context])
        drawn = DRAW[self.rule.name](pairs[1:], jnp.asarray(row, jnp.float32)).tolist()
        tokens = self.change(drawn) if depth else []
        tree = make_tree(
            [context[-1], *tokens],
            [-1, *[0] * len(tokens)],
            max_nodes=3,
            max_children=2,
            max_depth=1,
            distinct_siblings=False,
        )
        proposal = self.rule.proposal(tree=tree, draft_rows=jnp.asarray([row, row], jnp.float32))
        return Draft(proposal=proposal, depth=int(depth > 0), usage=usage)

    def next_depth(self, depth: int, accepted: int, proposed: int) -> int:
        return 1

    def describe(self) -> dict[str, Any]:
        return {"drafter": "two siblings"}


def siblings(rule: str, change: Callable[[list[int]], list[int]] = list) -> DecodingLaw:
    target = Provider("kill row", 4, lambda _: KILL_P)
    return decoding_law(Decoder(target, Siblings(js.RULES[rule], change), 1, bonus=False), PROMPT)


def probable(tokens: list[int]) -> list[int]:
    return [token for token in tokens if KILL_Q[token] > 0.18]


def by_score(tokens: list[int]) -> list[int]:
    return sorted(tokens, key=lambda token: -KILL_Q[token])


def without_repeats(tokens: list[int]) -> list[int]:
    return list(dict.fromkeys(tokens))


def with_the_last_improbable_dropped(tokens: list[int]) -> list[int]:
    return tokens if KILL_Q[tokens[1]] > 0.18 else tokens[:1]


@dataclasses.dataclass(frozen=True)
class Reversed(SampledPath):
    """Draws its tokens in reverse order, which is another cut of the same draws: no fault."""

    def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
        return super().propose(context, depth, 1 - 2.0**-24 - pairs)


@dataclasses.dataclass(frozen=True)
class Uncapped(Decoder):
    """Drafts the depth that the policy wants, whatever room is left, and emits it all."""

    def propose(self, state: DecodeState, pairs: jax.Array) -> Draft:
        return self.drafter.propose(state.tokens, state.depth, pairs)


@dataclasses.dataclass(frozen=True)
class KeepsOn(Decoder):
    """Keeps the drafted tokens after one that was rejected and replaced."""

    def commit(
        self, state: DecodeState, draft: Draft, scores: Scores, verdict: js.Verdict
    ) -> DecodeState:
        drafted = np.asarray(draft.proposal.tree.tokens)[1 : draft.depth + 1]
        tokens = np.array(verdict.tokens)
        count = int(verdict.num_tokens)
        tokens[count : draft.depth] = drafted[count:]
        count = max(count, draft.depth)
        kept = dataclasses.replace(verdict, tokens=tokens, num_tokens=np.int32(count))
        return super().commit(state, draft, scores, kept)


@dataclasses.dataclass(frozen=True)
class RunsOver(Decoder):
    """Drafts below a stop token and takes what comes after it into the text."""

    def propose(self, state: DecodeState, pairs: jax.Array) -> Draft:
        deaf = dataclasses.replace(self, stop_tokens=frozenset())
        return Decoder.propose(deaf, state, pairs)

    def commit(
        self, state: DecodeState, draft: Draft, scores: Scores, verdict: js.Verdict
    ) -> DecodeState:
        deaf = dataclasses.replace(self, stop_tokens=frozenset())
        after = Decoder.commit(deaf, state, draft, scores, verdict)
        if after.finished or not self.stop_tokens & set(after.new_tokens):
            return after
        return dataclasses.replace(after, finished="stop")


class OneLate(CallableTarget):
    """Scores each node by the context that lacks the last token: one position late."""

    def rows(self, tree: js.Tree, context: Sequence[int], *, bonus: bool = False) -> Scores:
        scores = super().rows(tree, context, bonus=bonus)
        late = super().rows(tree, context, bonus=True).rows
        parents = np.asarray(tree.parents)
        rows = np.where(parents[:, None] >= 0, late[parents], late[:1])
        return dataclasses.replace(scores, rows=rows)


FAULTS: dict[str, Callable[[], DecodingLaw]] = {
    "draft rows on record colder than those drawn from": lambda: audit_of(Colder(DRAFT, 2)),
    "the same, verified as a block": lambda: audit_of(Colder(DRAFT, 2, js.RULES["block"])),
    "uniform rows on record for nearly uniform draws": lambda: audit_of(
        Uniform(Provider("nearly uniform", VOCAB, lambda _: [0.45, 0.3, 0.25]), 2)
    ),
    "the most probable tokens with the row of a sample": lambda: audit_of(Argmax(DRAFT, 2)),
    "a depth that looks at this round's draws": lambda: audit_of(Picky(DRAFT, 2)),
    "a sampled token dropped for its low probability": lambda: trimmed(drops=True),
    "a sampled token dropped, verified as a block": lambda: trimmed(drops=True, rule="block"),
    "a last round without a cap": lambda: audit_of(PATH, Uncapped, new_tokens=1),
    "a last round of an adaptive tree without a cap": lambda: audit_of(
        DRAFTERS["adaptive tree"], Uncapped, bonus=True
    ),
    "drafted tokens kept after a rejected one": lambda: audit_of(PATH, KeepsOn),
    "tokens after a stop token": lambda: audit_of(PATH, RunsOver, stop_tokens=frozenset([1])),
    "rows of the wrong position": lambda: audit_of(
        PATH, target=OneLate(TARGETS["three tokens of three"][0])
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_decoder_that_is_not_lossless_is_seen(name: str) -> None:
    assert is_rejected(FAULTS[name]())


def test_a_draft_that_drops_its_improbable_token_has_a_first_token_law_of_its_own() -> None:
    law = trimmed(drops=True)
    first = [sum(p for text, p in law.texts.items() if text[0] == token) for token in (0, 1)]
    assert first == pytest.approx([0.55, 0.45], abs=1e-6)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_that_stops_after_its_improbable_token_is_lossless(rule: str) -> None:
    assert_lossless(trimmed(drops=False, rule=rule))


@pytest.mark.parametrize(
    ("rule", "change", "tv"),
    [
        ("with_replacement", list, 0),
        ("with_replacement", probable, 18 / 125),
        ("with_replacement", by_score, 9 / 80),
        ("with_replacement", without_repeats, 29 / 500),
        ("without_replacement", list, 0),
        ("without_replacement", with_the_last_improbable_dropped, 3 / 40),
    ],
)
def test_sampled_siblings_may_not_be_dropped_sorted_or_merged_by_looking_at_them(
    rule: str, change: Callable[[list[int]], list[int]], tv: float
) -> None:
    law = siblings(rule, change)
    assert law.misses == 0
    assert law.tv == pytest.approx(tv, abs=1e-6)


def test_progress_of_a_law_of_texts_goes_from_the_prompt_to_the_longest_text() -> None:
    calls: list[tuple[str, int, int]] = []
    decoder = Decoder(TARGETS["three tokens of three"][0], PATH, 2, bonus=False)
    decoding_law(decoder, PROMPT, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 2)
    assert {call[2] for call in calls} == {2}
    assert any("evaluations" in call[0] for call in calls)


def test_a_draft_in_half_precision_leads_to_exactly_the_targets_law() -> None:
    def half(context: Context) -> np.ndarray:
        row = np.random.default_rng([2, *context]).dirichlet(np.ones(VOCAB)).astype(np.float16)
        row[row.argmax()] -= np.float16(row.sum(dtype=np.float64) - 0.9992)
        return row  # of a mass within the tolerance of its type

    assert_lossless(audit_of(SampledPath(Provider("half", VOCAB, half), 2)))


def test_a_draft_that_draws_by_another_cut_of_its_draws_is_lossless() -> None:
    assert_lossless(audit_of(Reversed(DRAFT, 2)))


def test_candidates_picked_at_random_and_verified_as_point_masses_are_lossless() -> None:
    @dataclasses.dataclass(frozen=True)
    class AtRandom(FixedTree):
        def propose(self, context: Context, depth: int, pairs: jax.Array) -> Draft:
            draft = super().propose(context, depth, pairs)
            tree = draft.proposal.tree
            shift = int(3 * pairs[1, 1])
            tokens = np.asarray(tree.tokens)
            moved = np.where(np.asarray(tree.parents) >= 0, (tokens + shift) % VOCAB, tokens)
            tree = dataclasses.replace(tree, tokens=jnp.asarray(moved))
            return dataclasses.replace(draft, proposal=js.PointMass(tree=tree))

    assert_lossless(audit_of(AtRandom(DRAFT, (2, 1))))


def test_a_draft_with_a_state_of_its_own_is_refused_or_a_miss() -> None:
    calls = iter(range(10**9))
    turns = Provider("turns", VOCAB, lambda _: np.eye(VOCAB)[next(calls) % VOCAB])
    with pytest.raises(ValueError, match="is the draft a pure function"):
        audit_of(SampledPath(turns, 2))
    calls = iter(range(10**9))
    changes = Provider("changes", VOCAB, lambda _: np.eye(VOCAB)[int(next(calls) > 6)])
    assert audit_of(SampledPath(changes, 2), new_tokens=1).misses > 0


def test_a_decoder_that_draws_for_itself_fails() -> None:
    @dataclasses.dataclass(frozen=True)
    class Peeks(Decoder):
        def propose(self, state: DecodeState, pairs: jax.Array) -> Draft:
            accept = js.round_draws(state.key, 3, len(state.tokens) - 1).verify.accept
            return self.drafter.propose(state.tokens, 1 if accept[1] < 0.5 else 0, pairs)

    with pytest.raises((TypeError, ValueError), match="key"):
        audit_of(PATH, Peeks)
