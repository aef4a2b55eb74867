"""One call for a flat batch: each sequence as if it were alone, whatever is beside it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hostile

import jaxspec as js
from jaxspec import layouts

BATCH, LONGEST, VOCAB = 6, 3, 5
TOKENS = BATCH * LONGEST + 2  # entries, of which the last are padding
ROWS = TOKENS + BATCH


@dataclasses.dataclass
class Engine:
    """A round as an engine holds it; rows are logits, wider than the vocabulary, garbage beyond."""

    counts: np.ndarray  # [B], -1 for a place without a request
    is_sampled: np.ndarray  # [B]
    tokens: np.ndarray  # [total]
    draft: np.ndarray  # [total, V + 2]
    target: np.ndarray  # [total + B, V + 3]
    temperature: np.ndarray  # [B]
    draws: js.Draws  # [B]
    has_bonus_rows: bool

    @classmethod
    def at_random(cls, seed: int, *, has_bonus_rows: bool = True) -> "Engine":
        rng = np.random.default_rng(seed)
        draft = rng.dirichlet(np.ones(VOCAB), TOKENS).astype(np.float32)
        target = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
        uniform = rng.integers(0, 2**24, (BATCH, LONGEST + 3)).astype(np.float32) / 2**24
        return cls(
            counts=rng.integers(-1, LONGEST + 1, BATCH).astype(np.int32),
            is_sampled=rng.random(BATCH) < 0.6,
            tokens=np.array([rng.choice(VOCAB, p=row / row.sum()) for row in draft], np.int32),
            draft=np.pad(draft, ((0, 0), (0, 2)), constant_values=np.nan),
            target=np.pad(target, ((0, 0), (0, 3)), constant_values=np.inf),
            temperature=rng.choice([0.0, 0.5, 1.0, 2.0], BATCH).astype(np.float32),
            draws=js.Draws(accept=uniform[:, :-2], final=uniform[:, -2:]),
            has_bonus_rows=has_bonus_rows,
        )

    def verify(self, rule: str = "token", **options: Any) -> layouts.FlatOutput:
        draws = jax.tree.map(jnp.asarray, self.draws)
        output = layouts.verify_flat(self.batch(), draws, js.RULES[rule], **options)
        return jax.tree.map(np.asarray, output)

    def batch(self) -> layouts.FlatBatch:
        return layouts.FlatBatch(
            draft_token_ids=jnp.asarray(self.tokens),
            num_draft_tokens=jnp.asarray(self.counts),
            draft_rows=js.Probabilities(values=jnp.asarray(self.draft), vocab=VOCAB),
            target_rows=js.Logits(
                values=jnp.asarray(self.target),
                temperature=jnp.asarray(self.temperature),
                vocab=VOCAB,
            ),
            has_bonus_rows=self.has_bonus_rows,
            is_sampled=jnp.asarray(self.is_sampled),
        )

    def rows(self, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens, draft rows and target rows of a sequence (logits, NaN if missing)."""
        used = np.maximum(self.counts, 0)
        start, count = int(used[:b].sum()), int(used[b])
        drawn = int((used * self.is_sampled)[:b].sum())
        row = start + int((self.counts[:b] >= 0).sum()) * self.has_bonus_rows
        logits = np.full((LONGEST + 1, VOCAB), np.nan)
        stop = min(row + count + self.has_bonus_rows, len(self.target))
        logits[: stop - row] = self.target[row:stop, :VOCAB]
        tokens = self.tokens[start : start + count]
        draft = np.eye(VOCAB)[tokens]
        if self.is_sampled[b]:
            draft = self.draft[drawn : drawn + count, :VOCAB]
        return tokens, draft, logits

    def alone(self, rule: str = "token") -> list[js.Verdict | None]:
        """The verdict of each sequence by itself; None for one without rows."""
        verdicts: list[js.Verdict | None] = []
        token = drawn = row = 0
        for b, count in enumerate(self.counts.tolist()):
            if count < 0 or (count == 0 and not self.has_bonus_rows):
                verdicts.append(None)
                continue
            tokens = np.zeros(LONGEST, np.int32)
            tokens[:count] = self.tokens[token : token + count]
            tree = js.chain(jnp.asarray(tokens), jnp.int32(count))
            draft = np.full((LONGEST, VOCAB), 1 / VOCAB, np.float32)
            draft[:count] = self.draft[drawn : drawn + count, :VOCAB]
            target = np.zeros((LONGEST + 1, VOCAB), np.float32)
            stop = row + count + self.has_bonus_rows
            target[: stop - row] = self.target[row:stop, :VOCAB]
            proposal: js.Proposal = js.PointMass(tree=tree)
            if self.is_sampled[b]:
                proposal = js.WithReplacement(tree=tree, draft_rows=jnp.asarray(draft))
            temperature = jnp.asarray(self.temperature[b])
            verdict = js.RULES[rule].verify(
                jax.tree.map(lambda x, b=b: jnp.asarray(x[b]), self.draws),
                proposal,
                js.Logits(values=jnp.asarray(target), temperature=temperature),
                self.has_bonus_rows,
            )
            verdicts.append(jax.tree.map(np.asarray, verdict))
            token, row = token + count, stop
            drawn += count if self.is_sampled[b] else 0
        return verdicts


def assert_as_alone(output: layouts.FlatOutput, b: int, alone: js.Verdict | None) -> None:
    if alone is None:
        alone = js.Verdict(
            tokens=np.full(LONGEST + 1, -1),
            num_tokens=0, num_accepted=0, path=np.array([0]), stop_node=0, status=0,
        )  # fmt: skip
    np.testing.assert_array_equal(output.tokens[b], alone.tokens)
    for name in ("num_tokens", "num_accepted", "status"):
        assert getattr(output, name)[b] == getattr(alone, name), name


@pytest.mark.parametrize("has_bonus_rows", [True, False])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_sequence_is_verified_as_if_it_were_alone(rule: str, has_bonus_rows: bool) -> None:
    seen = set()
    for seed in range(12):
        engine = Engine.at_random(seed, has_bonus_rows=has_bonus_rows)
        output = engine.verify(rule)
        for b, verdict in enumerate(engine.alone(rule)):
            assert_as_alone(output, b, verdict)
            seen.add((verdict is None, bool(engine.is_sampled[b]), int(output.num_accepted[b])))
    assert {each[2] for each in seen} == set(range(LONGEST + 1))
    assert {each[:2] for each in seen} >= {(True, True), (False, True), (False, False)}


def test_the_slots_to_keep_are_those_of_the_root_and_of_the_accepted_tokens() -> None:
    for seed in range(12):
        engine = Engine.at_random(seed)
        output = engine.verify()
        flat = [b for b, count in enumerate(engine.counts) for _ in range(count + 1)]
        for b, count in enumerate(engine.counts.tolist()):
            kept = output.slots[b][output.slots[b] >= 0].tolist()
            own = [slot for slot, owner in enumerate(flat) if owner == b]
            assert kept == own[: output.num_accepted[b] + 1 if count >= 0 else 0]


def test_a_sequence_without_rows_sees_nothing_of_the_next_one() -> None:
    engine = Engine.at_random(3, has_bonus_rows=False)
    engine.counts[:] = [0, 2, -1, 0, 1, 3]
    engine.target[:] = np.nan
    output = engine.verify()
    for b in (0, 2, 3):
        assert_as_alone(output, b, None)
    assert output.slots[:, 0].tolist() == [0, 1, -1, 4, 5, 7]
    assert (output.status[[1, 4, 5]] & js.Status.NON_FINITE_ROW).all()


def test_bonus_tokens_that_are_drawn_already_follow_accepted_paths_only() -> None:
    bonus = jnp.arange(BATCH)[:, None] % VOCAB
    for seed in range(6):
        engine = Engine.at_random(seed, has_bonus_rows=False)
        output, without = engine.verify(bonus_token_ids=bonus), engine.verify()
        for b, count in enumerate(engine.counts.tolist()):
            wanted = without.tokens[b, : without.num_tokens[b]].tolist()
            if count >= 0 and without.num_accepted[b] == count:
                wanted.append(b % VOCAB)
            assert output.tokens[b, : output.num_tokens[b]].tolist() == wanted
            assert (output.tokens[b, output.num_tokens[b] :] == -1).all()


def test_a_bonus_token_outside_the_vocabulary_is_flagged_and_not_emitted() -> None:
    seen = 0
    for seed in range(4):
        engine = Engine.at_random(seed, has_bonus_rows=False)
        without = engine.verify()
        for bad in (-1, -7, VOCAB, 2**31 - 1):
            output = engine.verify(bonus_token_ids=jnp.full(BATCH, bad))
            is_whole = (engine.counts >= 0) & (without.num_accepted == engine.counts)
            flagged = (output.status & js.Status.BAD_CANDIDATE) != 0
            np.testing.assert_array_equal(flagged, is_whole)
            np.testing.assert_array_equal(output.tokens, without.tokens)
            seen += int(is_whole.sum())
    assert seen > 0


def test_hostile_sequences_emit_no_wrong_token_and_leave_the_others_as_they_are() -> None:
    rng = np.random.default_rng(0)
    healthy = 0
    for seed in range(60):
        engine = Engine.at_random(100 + seed)
        wanted = engine.alone()
        bad = int(rng.integers(0, BATCH))
        count, kind = int(engine.counts[bad]), seed % 6
        start = int(np.maximum(engine.counts[:bad], 0).sum())
        rows = start + int((engine.counts[:bad] >= 0).sum())
        rows = slice(rows, rows + count + 1)
        if kind == 0:
            engine.target[rows, rng.integers(0, VOCAB)] = np.nan
        elif kind == 1:
            engine.temperature[bad] = rng.choice([np.nan, np.inf, -1])
        elif kind == 2:
            engine.tokens[start : start + max(count, 0)] = rng.choice([-7, VOCAB, 2**31 - 1])
        elif kind == 3:
            engine.draws.accept[bad] = rng.choice([np.nan, -1, 2])
            engine.draws.final[bad] = np.nan
        elif kind == 4:  # only the last can be told apart from an engine's own bookkeeping
            bad, count = BATCH - 1, 0
            engine.counts[bad] = rng.choice([TOKENS, 2**31 - 1, -(2**31), LONGEST + 1])
        else:
            engine.target[rows, :VOCAB] = -np.inf
        output = engine.verify()
        assert ((output.tokens >= -1) & (output.tokens < VOCAB)).all()
        for b in set(range(BATCH)) - {bad}:
            assert_as_alone(output, b, wanted[b])
            healthy += 1
        if kind == 4:
            assert output.status[bad] == js.Status.BAD_TREE
            assert output.num_tokens[bad] == 0
    assert healthy > 200


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    if temperature == 0:
        return np.eye(VOCAB)[np.argmax(logits, axis=-1)]
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_hostile_requests_by_the_thousand(rule: str) -> None:
    seen = hostile.attack(8_000 if rule == "token" else 4_000, rule)
    assert all(seen[fault] > 0 for fault in (*hostile.FAULTS, "healthy"))
    assert seen["flagged"] > seen["count"]


def test_counts_whose_sum_wraps_around_hand_no_sequence_the_tokens_of_another() -> None:
    engine = Engine.at_random(0)
    engine.counts[:] = [2**31 - 1, 2**31 - 1, 2, 2, -1, 0]
    output = engine.verify()
    assert (output.num_tokens == 0).all()
    assert (output.status == np.where(engine.counts == -1, 0, int(js.Status.BAD_TREE))).all()
    assert (output.slots == -1).all()


@pytest.mark.parametrize("has_bonus_rows", [True, False])
def test_log_probabilities_are_those_of_the_rows_that_scored_the_emitted_tokens(
    has_bonus_rows: bool,
) -> None:
    num_scored = 0
    for seed in range(6):
        engine = Engine.at_random(seed, has_bonus_rows=has_bonus_rows)
        bonus = None if has_bonus_rows else jnp.zeros((BATCH, 1), jnp.int32)
        output = engine.verify(bonus_token_ids=bonus)
        batch = engine.batch()
        raw = js.Logits(values=batch.target_rows.values, temperature=jnp.float32(1), vocab=VOCAB)
        found = [layouts.emitted_log_probs(batch, output, rows) for rows in (None, raw)]
        for b, count in enumerate(engine.counts.tolist()):
            for processed, temperature in ((0, engine.temperature[b]), (1, 1.0)):
                law = softmax(engine.rows(b)[2], temperature)
                wanted = np.zeros(LONGEST + 1)
                for t in range(min(int(output.num_tokens[b]), count + has_bonus_rows)):
                    wanted[t] = np.log(law[t, output.tokens[b, t]])
                    num_scored += 1
                np.testing.assert_allclose(found[processed][b], wanted, rtol=1e-4, atol=2e-6)
    assert num_scored > 40


def test_accept_probabilities_are_min_1_p_over_q_and_decide_as_the_token_rule_does() -> None:
    for seed in range(6):
        engine = Engine.at_random(seed)
        engine.tokens[-TOKENS // 3 :: 4] = VOCAB  # outside the vocabulary
        output = engine.verify()
        found = np.asarray(layouts.accept_probs(engine.batch(), LONGEST))
        for b, count in enumerate(np.maximum(engine.counts, 0).tolist()):
            tokens, draft, logits = engine.rows(b) if (engine.tokens < VOCAB).all() else (None,) * 3
            if tokens is not None:
                law, places = softmax(logits, engine.temperature[b]), np.arange(count)
                p, q = law[places, tokens], draft[places, tokens]
                np.testing.assert_allclose(found[b, :count], np.minimum(1, p / q), rtol=1e-4)
            assert (found[b, count:] == 0).all()
            is_accepted = engine.draws.accept[b, 1:] < found[b]
            assert output.num_accepted[b] == np.argmin(np.append(is_accepted, False))


def test_synthetic_acceptance_never_passes_for_a_verified_output() -> None:
    engine = Engine.at_random(2)
    engine.counts[:] = [3, 2, -1, 0, 1, TOKENS]
    engine.target[:] = np.nan  # nothing is read
    draws = jax.tree.map(jnp.asarray, engine.draws)
    for acceptance, accepted in ((0.0, [0] * 6), (1.0, [3, 2, 0, 0, 1, 0])):
        output = layouts.synthetic_output(engine.batch(), draws, acceptance, 4)
        assert (np.asarray(output.status) == -1).all()
        assert output.num_accepted.tolist() == accepted
        assert output.num_tokens.tolist() == [n + 1 for n in accepted[:2]] + [0] + [
            n + 1 for n in accepted[3:5]
        ] + [0]
        emitted = [*engine.tokens[: accepted[0]].tolist(), 4]
        assert output.tokens[0].tolist() == emitted + [-1] * (LONGEST + 1 - len(emitted))
        assert output.slots[1].tolist() == ([4, 5, 6, -1] if acceptance else [4, -1, -1, -1])


def test_synthetic_acceptance_has_the_chance_that_is_asked_for() -> None:
    rate, num = 0.7, 4096
    batch = layouts.FlatBatch(
        draft_token_ids=jnp.ones(2 * num, jnp.int32),
        num_draft_tokens=jnp.full(num, 2, jnp.int32),
        draft_rows=None,
        target_rows=jnp.full((3 * num, 2), 0.5),
        has_bonus_rows=True,
    )
    points = (jnp.arange(num, dtype=jnp.float32) + 0.5) / num
    accept = jnp.stack([jnp.zeros(num), points, (points * 61.0) % 1.0], axis=1)
    output = layouts.synthetic_output(batch, js.Draws(accept=accept, final=accept[:, :2]), rate)
    shares = np.bincount(np.asarray(output.num_accepted), minlength=3) / num
    np.testing.assert_allclose(shares, [1 - rate, rate * (1 - rate), rate**2], atol=0.01)


def test_a_request_draws_by_its_seed_and_position_alone() -> None:
    seeds, positions = [7, 2**32 + 7, 2**64 - 1], jnp.array([0, 5, 2**31 - 1])
    keys = layouts.request_keys(np.array(seeds, np.uint64))
    draws = layouts.request_draws(keys, positions, LONGEST)
    assert len({float(draws.final[b, 1]) for b in range(3)}) == 3
    for b, position in enumerate(positions):
        alone = js.round_draws(layouts.request_keys([seeds[b]])[0], LONGEST + 1, int(position))
        np.testing.assert_array_equal(draws.accept[b], alone.verify.accept)
        np.testing.assert_array_equal(draws.final[b], alone.verify.final)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "7", None])
def test_a_seed_that_is_no_64_bit_integer_is_an_error_that_names_its_place(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seeds: entry 1 is .*: must be an integer from 0"):
        layouts.request_keys([3, seed])


def test_what_does_not_fit_a_flat_batch_is_an_error_that_says_what_does() -> None:
    engine = Engine.at_random(0)
    with pytest.raises(ValueError, match="rule 'traversal' is for trees: a flat batch holds paths"):
        engine.verify("traversal")
    with pytest.raises(ValueError, match="bonus_token_ids are given beside the bonus rows"):
        engine.verify(bonus_token_ids=jnp.zeros((BATCH, 1), jnp.int32))
    with pytest.raises(AssertionError, match="target rows: the slab is empty"):
        dataclasses.replace(engine, target=engine.target[:0]).verify()
    engine.draft = engine.draft[:2]
    with pytest.raises(ValueError, match="draft rows: 2 given, must be at least 3"):
        engine.verify()
