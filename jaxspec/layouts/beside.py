"""What an engine may want of a round beside its tokens: each a call of its own, free if not made."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.draws import Draws
from jaxspec.layouts.flat import FlatBatch, path_at, rows_of
from jaxspec.layouts.verify import FlatOutput, flat_result
from jaxspec.loops import when
from jaxspec.rows import RowsLike, RowSource, as_source, vocab_of
from jaxspec.trees import NONE
from jaxspec.verify import Verdict


@jax.jit
def emitted_log_probs(
    batch: FlatBatch, output: FlatOutput, rows: RowsLike | None = None
) -> jax.Array:
    """Return the log-probabilities of the emitted tokens under the rows that scored them (traced).

    It reads the row of each emitted token once, where it lies.

    Args:
      batch: the batch.
      output: of `verify_flat` for it.
      rows: laid out as `batch.target_rows`. None for those, as they are sampled from. For the raw
        row, `Logits` of the same values at temperature 1 without filters.

    Returns:
      float32 [B, T + 1], natural logarithms; -inf for a probability below the least float32. 0 where
      nothing is emitted, and for bonus tokens drawn before, whose rows are not in the batch.

    >>> rows = jnp.array([[0.25, 0.75], [0.5, 0.5]])
    >>> batch = FlatBatch(draft_token_ids=jnp.array([1]), num_draft_tokens=jnp.array([1]),
    ...                   draft_rows=None, target_rows=rows, has_bonus_rows=True)
    >>> output = synthetic_output(batch, Draws(accept=jnp.zeros((1, 2)), final=jnp.zeros((1, 2))), 1.0)
    >>> jnp.exp(emitted_log_probs(batch, output)).tolist()
    [[0.75, 0.5]]
    """
    counts = jnp.asarray(batch.num_draft_tokens, jnp.int32)[:, None]
    given = batch.target_rows if rows is None else rows
    first = jnp.asarray(batch.first_rows, jnp.int32)
    places = jnp.arange(output.tokens.shape[1], dtype=jnp.int32)[None]
    is_wanted = (output.tokens >= 0) & (places < counts + int(batch.has_bonus_rows))

    def at(sequence: jax.Array, place: jax.Array, spans: bool) -> jax.Array:
        source = rows_of("target", given, sequence, first[sequence])
        return _probability(source, place, output.tokens[sequence, place], spans)

    found = _each(at, is_wanted)
    return jnp.where(is_wanted, jnp.log(jnp.where(is_wanted, found, 1.0)), 0.0)


@functools.partial(jax.jit, static_argnames="max_spec_len")
def accept_probs(batch: FlatBatch, max_spec_len: int) -> jax.Array:
    """Return the probability with which `RULES["token"]` accepts each candidate it tests (traced).

    That is min(1, p(x) / q(x)), given that the candidates before it are accepted. It reads the rows of
    all candidates once, also of those that a round does not reach.

    Args:
      batch: the batch.
      max_spec_len: T, the most tokens that a sequence drafts.

    Returns:
      float32 [B, T]; 0 beyond a sequence's candidates, and for one that cannot be accepted: of an
      invalid row, outside the vocabulary, or impossible under its draft row.
    """
    tokens, is_candidate, is_held = _candidates(batch, max_spec_len)
    is_wanted = is_candidate & is_held[:, None]

    def at(sequence: jax.Array, place: jax.Array, spans: bool) -> jax.Array:
        proposal, rows = path_at(batch, sequence, max_spec_len)
        token, q = tokens[sequence, place], jnp.float32(1)
        p = _probability(rows, place, token, spans)
        if proposal.draft_rows is not None:
            drawn_from = as_source("draft_rows", proposal.draft_rows)
            q = _probability(drawn_from, place, token, spans)
        is_possible = (p >= 0) & (p < jnp.inf) & (q > 0) & (q < jnp.inf)
        safe_p, safe_q = (jnp.where(is_possible, each, 1.0) for each in (p, q))
        return jnp.where(is_possible, jnp.minimum(safe_p, safe_q) / safe_q, 0.0)

    return _each(at, is_wanted)


@jax.jit
def synthetic_output(
    batch: FlatBatch,
    draws: Draws,
    acceptance: jax.Array | float,
    filler_token_id: jax.Array | int = 0,
) -> FlatOutput:
    """Return an output of a made-up acceptance, for load tests (traced): NOTHING IS VERIFIED.

    No row is read. Candidates are accepted with a given chance whatever the target says, and what
    follows them is a filler: the text has not the target's law, and is not to be shown to a user.

    Args:
      batch: the batch.
      draws: the uniforms, with a leading axis B, as for `verify_flat`.
      acceptance: float [] or [B], the chance that a candidate is accepted if those before it are.
      filler_token_id: the token that takes the place of replacements and bonus tokens.

    Returns:
      A `FlatOutput` of the shapes of `verify_flat`, whose status is -1, every bit of it set, so that
      it never passes for a verified one.

    Guarantee: none.
    """
    longest = draws.accept.shape[1] - 1
    counts = jnp.asarray(batch.num_draft_tokens, jnp.int32)
    drafted, is_candidate, is_held = _candidates(batch, longest)
    chance = jnp.broadcast_to(jnp.asarray(acceptance, jnp.float32), counts.shape)[:, None]
    places = jnp.arange(longest + 1, dtype=jnp.int32)[None]
    is_accepted = is_candidate & (draws.accept[:, 1:] < chance)
    accepted = jnp.sum(jnp.cumprod(is_accepted, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    accepted = jnp.where(is_held, accepted, 0)
    ends = is_held & ((accepted < counts) | batch.has_bonus_rows)
    room = jnp.full((counts.shape[0], 1), NONE, jnp.int32)
    tokens = jnp.where(places < accepted[:, None], jnp.concatenate([drafted, room], axis=1), NONE)
    is_filler = (places == accepted[:, None]) & ends[:, None]
    verdicts = Verdict(
        tokens=jnp.where(is_filler, jnp.asarray(filler_token_id, jnp.int32), tokens),
        num_tokens=accepted + ends.astype(jnp.int32),
        num_accepted=accepted,
        path=jnp.where(places <= accepted[:, None], places, NONE),
        stop_node=accepted,
        status=jnp.zeros_like(counts),
    )
    return replace(flat_result(batch, verdicts, None), status=jnp.full_like(counts, NONE))


def _candidates(batch: FlatBatch, longest: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return tokens [B, T], which of them count and are in the vocabulary, and which paths fit [B]."""
    counts = jnp.asarray(batch.num_draft_tokens, jnp.int32)
    end = jnp.asarray(batch.cu_num_draft_tokens, jnp.int32)
    is_held = (counts <= longest) & (end <= batch.draft_token_ids.shape[0])
    numbers = jnp.arange(counts.shape[0], dtype=jnp.int32)
    tokens = jax.vmap(lambda b: path_at(batch, b, longest)[0].tree.tokens[1:])(numbers)
    target = as_source("target_rows", batch.target_rows)
    is_token = (tokens >= 0) & (tokens < vocab_of(target, target.values))
    places = jnp.arange(longest, dtype=jnp.int32)[None]
    return tokens, is_token & (places < counts[:, None]), is_held


def _probability(source: RowSource, place: jax.Array, token: jax.Array, spans: bool) -> jax.Array:
    """Return the probability of one token of one row, which is read once."""
    row = replace(source.row(place), spans=spans)
    norm = source.visit(row)
    return source.probability(row.read(token, 1), token[None], norm)[0]


def _each(at: Callable[[jax.Array, jax.Array, bool], jax.Array], is_wanted: jax.Array) -> jax.Array:
    """Return `at(sequence, place, spans)`, float32 [B, T], where it is wanted, else 0.

    On CPU one after the other, so that no other row is read; elsewhere place by place.
    """
    num, length = is_wanted.shape
    numbers, places = (jnp.arange(n, dtype=jnp.int32) for n in (num, length))

    def one(sequence: jax.Array, place: jax.Array, spans: bool) -> jax.Array:
        return when(is_wanted[sequence, place], lambda: at(sequence, place, spans))

    def in_turn() -> jax.Array:
        def of(sequence: jax.Array) -> jax.Array:
            return lax.map(lambda place: one(sequence, place, spans=True), places)

        return lax.map(of, numbers)

    def side_by_side() -> jax.Array:
        def of(place: jax.Array) -> jax.Array:
            return jax.vmap(lambda sequence: one(sequence, place, spans=False))(numbers)

        return lax.map(of, places).T

    return lax.platform_dependent(cpu=in_turn, default=side_by_side)
