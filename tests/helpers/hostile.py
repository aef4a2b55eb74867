"""Hostile requests among healthy ones in flat batches: what is emitted is compared with single calls.

`python -m tests.helpers.hostile 1000000` runs as many sequences, and prints what it has seen.
"""

import collections
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec as js
from jaxspec import layouts

BATCH, LONGEST = 512, 3
TOTAL = BATCH * (LONGEST + 1)  # the counts of a batch may be one too many, and are held
FAULTS = ("target", "draft", "token", "draws", "temperature", "top_k", "top_p", "count", "huge")


class Requests:
    """A batch of requests as rectangles [B, T, ...], from which the flat arrays are cut."""

    def __init__(self, seed: int, vocab: int) -> None:
        rng = np.random.default_rng(seed)
        most = LONGEST + 1
        self.vocab = vocab
        self.counts = rng.integers(-1, most, BATCH).astype(np.int32)
        self.is_sampled = rng.random(BATCH) < 0.6
        draft = rng.random((BATCH, most, vocab)) * (rng.random((BATCH, most, vocab)) < 0.8)
        draft[..., 0] += 0.1
        self.draft = (draft / draft.sum(axis=-1, keepdims=True)).astype(np.float32)
        below = self.draft.cumsum(axis=-1)[..., :-1] < rng.random((BATCH, most, 1))
        self.tokens = below.sum(axis=-1).astype(np.int32)
        self.target = rng.normal(0, 2, (BATCH, most + 1, vocab)).astype(np.float32)
        self.temperature = rng.choice([0.0, 0.5, 1.0, 2.0], BATCH).astype(np.float32)
        self.top_k = rng.choice([-1, 0, 1, 3], BATCH).astype(np.int32)
        self.top_p = rng.choice([0.6, 1.0], BATCH).astype(np.float32)
        draws = rng.integers(0, 2**24, (BATCH, LONGEST + 3)).astype(np.float32) / 2**24
        self.accept, self.final = draws[:, :-2], draws[:, -2:]
        self.faults: list[str | None] = [None] * BATCH
        for b in np.flatnonzero(rng.random(BATCH) < 0.3):
            self.faults[b] = self._spoil(int(b), rng)

    def _spoil(self, b: int, rng: np.random.Generator) -> str:
        fault = str(rng.choice(FAULTS[:-1]))
        if b == BATCH - 1 and rng.random() < 0.8:
            fault = "huge"  # of another sequence it would move all that follow
        place, token = int(rng.integers(LONGEST)), int(rng.integers(self.vocab))
        if fault == "target":
            where = slice(None) if rng.random() < 0.3 else token
            self.target[b, place, where] = rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38])
        elif fault == "draft":
            self.draft[b, place, token] = rng.choice([np.nan, np.inf, -1, 0, 5, 1e-45])
        elif fault == "token":
            self.tokens[b, place] = rng.choice([-(2**31), -2, -1, self.vocab, 2**31 - 1])
        elif fault == "draws":
            self.accept[b, place + 1] = rng.choice([np.nan, -1, 1, np.inf])
            self.final[b, rng.integers(2)] = rng.choice([np.nan, -1, 1, np.inf])
        elif fault == "temperature":
            self.temperature[b] = rng.choice([np.nan, np.inf, -1, 1e-45, 3e38])
        elif fault == "top_k":
            self.top_k[b] = rng.choice([-2, -(2**31), 2**31 - 1])
        elif fault == "top_p":
            self.top_p[b] = rng.choice([np.nan, -1, 0, 1.5, 1e-45])
        elif fault == "count":
            self.counts[b] = rng.choice([-2, -(2**31), LONGEST + 1])
        else:
            self.counts[b] = rng.choice([TOTAL + 1, 2**31 - 1, 2**31 - 2])
        return fault

    def flat(self) -> tuple[layouts.FlatBatch, js.Draws]:
        """What an engine hands over: garbage after the end, and in the padding of each row."""
        held = np.where(self.counts > LONGEST + 1, 0, np.maximum(self.counts, 0))
        is_drafted = np.arange(LONGEST + 1) < held[:, None]
        is_row = np.arange(LONGEST + 2) <= np.where(self.counts < 0, -1, held)[:, None]

        def laid(values: np.ndarray, size: int, garbage: float) -> np.ndarray:
            slab = np.full((size, *values.shape[1:]), garbage, values.dtype)
            slab[: len(values)] = values
            width = [(0, 0)] * (slab.ndim - 1) + [(0, 3 if slab.ndim > 1 else 0)]
            return np.pad(slab, width, constant_values=garbage)

        batch = layouts.FlatBatch(
            draft_token_ids=jnp.asarray(laid(self.tokens[is_drafted], TOTAL, -9)),
            num_draft_tokens=jnp.asarray(self.counts),
            draft_rows=js.Probabilities(
                values=laid(self.draft[is_drafted & self.is_sampled[:, None]], TOTAL, np.nan),
                vocab=self.vocab,
            ),
            target_rows=self.logits(laid(self.target[is_row], TOTAL + BATCH, np.inf)),
            has_bonus_rows=True,
            is_sampled=jnp.asarray(self.is_sampled),
        )
        return batch, js.Draws(accept=jnp.asarray(self.accept), final=jnp.asarray(self.final))

    def logits(self, values: np.ndarray) -> js.Logits:
        return js.Logits(
            values=jnp.asarray(values),
            temperature=jnp.asarray(self.temperature),
            top_k=jnp.asarray(self.top_k),
            top_p=jnp.asarray(self.top_p),
            vocab=self.vocab,
        )

    def alone(self, rule: str) -> js.Verdict:
        """The verdicts of the single calls, as the user's plain `vmap` gives them."""
        counts = np.where((self.counts < 0) | (self.counts > LONGEST), 0, self.counts)
        point_masses = np.eye(self.vocab, dtype=np.float32)[self.tokens.clip(0, self.vocab - 1)]
        draft = np.where(self.is_sampled[:, None, None], self.draft, point_masses)
        verdict = _alone(
            rule,
            js.Draws(accept=jnp.asarray(self.accept), final=jnp.asarray(self.final)),
            jnp.asarray(self.tokens[:, :LONGEST]),
            jnp.asarray(counts),
            jnp.asarray(draft[:, :LONGEST]),
            self.logits(self.target[:, : LONGEST + 1]),
        )
        return jax.tree.map(np.asarray, verdict)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, 0, 0))
def _alone(rule, draws, tokens, count, draft, target):  # type: ignore[no-untyped-def]
    return js.RULES[rule].verify(draws, js.sampled_path(tokens, draft, count), target, True)


def attack(num: int, rule: str = "token", vocab: int = 7) -> collections.Counter[str]:
    """Verify at least `num` sequences, assert what must hold, and count what has been seen."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(-(-num // BATCH)):
        requests = Requests(seed, vocab)
        batch, draws = requests.flat()
        output = layouts.verify_flat(batch, draws, js.RULES[rule])
        output = jax.tree.map(np.asarray, output)
        wanted = requests.alone(rule)
        tokens, counts = output.tokens, requests.counts
        assert ((tokens >= -1) & (tokens < vocab)).all(), seed
        is_filled = np.arange(LONGEST + 1) < output.num_tokens[:, None]
        assert ((tokens >= 0) == is_filled).all(), seed
        is_refused = (counts < -1) | (counts > LONGEST)
        assert (output.num_tokens[is_refused | (counts == -1)] == 0).all(), seed
        assert (output.status[is_refused] == js.Status.BAD_TREE).all(), seed
        # A fault is the request's own: the single call meets it too, and decides alike; except that
        # of a draft row it reads no more than the candidate, beside which it does not see a NaN.
        is_draft = np.array([fault == "draft" for fault in requests.faults])
        same = ~is_refused & (counts >= 0) & ~is_draft
        for name in ("tokens", "num_tokens", "num_accepted"):
            ours, theirs = getattr(output, name), getattr(wanted, name)
            np.testing.assert_array_equal(ours[same], theirs[same], err_msg=f"{seed} {name}")
        healthy = np.array([fault is None for fault in requests.faults])
        assert (output.status[healthy] == 0).all(), seed
        seen.update(fault or "healthy" for fault in requests.faults)
        seen["flagged"] += int((output.status != 0).sum())
        seen["emitted"] += int(output.num_tokens.sum())
    return seen


if __name__ == "__main__":
    for each in ("token", "block"):
        print(each, dict(attack(int(sys.argv[1]) // 2, each)))
