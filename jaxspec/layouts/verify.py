"""One call for a round of a flat batch: an engine's arrays in, its output tokens out."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import struct
from jaxspec.draws import THREEFRY, Draws, round_draws
from jaxspec.layouts.flat import FlatBatch, flat_output, path_at
from jaxspec.trees import NONE
from jaxspec.values import entries_of, number, value_error
from jaxspec.verify import RULES, Rule, Verdict
from jaxspec.verify.rules import assert_rule
from jaxspec.verify.verdict import Status, flag


@struct
class FlatOutput:
    """What an engine takes from a round.

    Attributes:
      tokens: int32 [B, T + 1], the tokens to emit, then -1.
      num_tokens: int32 [B], how many.
      num_accepted: int32 [B], how many of them were drafted.
      slots: int32 [B, T + 1], which of the total + B entries of the forward pass (of each sequence the
        root, then its drafted tokens) are to be kept in the cache: the root's and the accepted
        tokens', then -1.
      status: int32 [B], bits of `Status`.
    """

    tokens: jax.Array  # [B, T + 1]
    num_tokens: jax.Array  # [B]
    num_accepted: jax.Array  # [B]
    slots: jax.Array  # [B, T + 1]
    status: jax.Array  # [B]


@functools.partial(jax.jit, static_argnames="rule")
def verify_flat(
    batch: FlatBatch,
    draws: Draws,
    rule: Rule = RULES["token"],
    bonus_token_ids: jax.Array | None = None,
) -> FlatOutput:
    """Verify a round of a flat batch (traced).

    Rows stay where they are: a sequence is an offset into them. What comes out for a sequence does not
    depend on the others, on its place among them, or on padding. A place without a request, and a
    sequence without rows (nothing drafted and no bonus rows), emit nothing.

    Args:
      batch: the batch.
      draws: the uniforms, with a leading axis B; T is their number of nodes less one, and at least
        the most tokens that a sequence drafts. See `request_draws`.
      rule: a rule for paths: `RULES["token"]`, `RULES["block"]` or a custom one.
      bonus_token_ids: int [B] or [B, 1], for a batch without bonus rows: the tokens that follow fully
        accepted paths, drawn from the target. One outside the vocabulary is not emitted, and sets
        `Status.BAD_CANDIDATE`.

    Returns:
      The `FlatOutput`. A count beyond T, or beyond the entries that there are, sets `Status.BAD_TREE`
      and emits nothing.

    Raises:
      ValueError: `rule` is not for paths, bonus tokens are given beside bonus rows, or an argument
        does not fit.
      AssertionError: a shape or dtype is wrong.

    Guarantee: as that of the rule; a draft without rows is a point mass.

    >>> rows = jnp.full((5, 2), 0.5)  # sequences of 2 and 1 tokens, with their bonus rows
    >>> batch = FlatBatch(draft_token_ids=jnp.array([1, 0, 1]), num_draft_tokens=jnp.array([2, 1]),
    ...                   draft_rows=rows[:3], target_rows=rows, has_bonus_rows=True)
    >>> draws = request_draws(request_keys([7, 8]), jnp.array([40, 12]), max_spec_len=2)
    >>> output = verify_flat(batch, draws)
    >>> output.num_accepted.tolist(), output.slots.tolist()
    ([2, 1], [[0, 1, 2], [3, 4, -1]])
    """
    assert_rule("rule", rule)
    if not rule.is_path and rule.proposal.is_measured:
        raise ValueError(f"rule {rule.name!r} is for trees: a flat batch holds paths")
    if bonus_token_ids is not None and batch.has_bonus_rows:
        raise ValueError("bonus_token_ids are given beside the bonus rows that decide them")
    counts = jnp.asarray(batch.num_draft_tokens, jnp.int32)

    def one(sequence: jax.Array, draws: Draws) -> Verdict:
        proposal, rows = path_at(batch, sequence, draws.accept.shape[0] - 1)
        return rule.verify(draws, proposal, rows, batch.has_bonus_rows)

    verdicts = jax.vmap(one)(jnp.arange(counts.shape[0], dtype=jnp.int32), draws)
    return flat_result(batch, verdicts, bonus_token_ids)


def flat_result(
    batch: FlatBatch, verdicts: Verdict, bonus_token_ids: jax.Array | None
) -> FlatOutput:
    """Return verdicts [B] as an engine takes them; nothing for a sequence without rows."""
    counts = jnp.asarray(batch.num_draft_tokens, jnp.int32)
    # What would be the first row of a sequence without rows is the next one's: it decides nothing.
    has_no_rows = (counts < 0) | ((counts == 0) & (not batch.has_bonus_rows))
    is_bad = counts < NONE

    def unless_none(values: jax.Array, nothing: int) -> jax.Array:
        return jnp.where(has_no_rows.reshape(-1, *[1] * (values.ndim - 1)), nothing, values)

    verdicts = replace(
        verdicts,
        tokens=unless_none(verdicts.tokens, NONE),
        num_accepted=unless_none(verdicts.num_accepted, 0),
        path=verdicts.path.at[:, 1:].set(unless_none(verdicts.path[:, 1:], NONE)),
        status=jnp.where(is_bad, verdicts.status, unless_none(verdicts.status, 0)),
    )
    tokens = flat_output(batch, verdicts, bonus_token_ids)
    # A bonus token follows a path that is accepted whole, unless it is none.
    is_whole = (counts >= 0) & (verdicts.num_accepted == counts) & (bonus_token_ids is not None)
    is_lost = is_whole & (jnp.sum(tokens != NONE, axis=1, dtype=jnp.int32) == counts)
    first = jnp.asarray(batch.first_slots, jnp.int32)[:, None]
    is_held = (counts >= 0) & (batch.cu_num_draft_tokens <= batch.draft_token_ids.shape[0])
    is_kept = (verdicts.path != NONE) & is_held[:, None]
    return FlatOutput(
        tokens=tokens,
        num_tokens=jnp.sum(tokens != NONE, axis=1, dtype=jnp.int32),
        num_accepted=verdicts.num_accepted,
        slots=jnp.where(is_kept, first + verdicts.path, NONE),
        status=verdicts.status | flag(is_lost, Status.BAD_CANDIDATE),
    )


def request_keys(seeds: Sequence[int] | np.ndarray) -> jax.Array:
    """Return the PRNG keys of requests with integer seeds, as engines give them.

    Args:
      seeds: [B], integers from 0 to 2^64 - 1; all 64 bits count, in 32-bit mode too.

    Returns:
      Typed keys [B].

    Raises:
      ValueError: a seed is something else, naming its place.

    >>> keys = request_keys([3, 2**32 + 3])
    >>> keys.shape, bool(keys[0] == jax.random.key(3)), bool(keys[0] == keys[1])
    ((2,), True, False)
    """
    entries = entries_of(seeds)
    if entries is None:
        raise value_error("seeds", seeds, "a sequence of integers")
    wanted, most = "an integer from 0 to 2^64 - 1", 2**64 - 1
    given = [
        number(f"seeds: entry {b}", seed, int, (0, most), wanted) for b, seed in enumerate(entries)
    ]
    words = np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in given], np.uint32).reshape(-1, 2)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=THREEFRY)


def request_draws(keys: jax.Array, positions: jax.Array, max_spec_len: int) -> Draws:
    """Return the draws of a round of many requests (traced), each by its own key and position.

    They are those of `jaxspec.round_draws`: a request decodes the same text in any batch. No draw is
    read twice, since the positions of a request's rounds rise; so this is lossless for every rule.

    Args:
      keys: typed keys [B].
      positions: int32 [B], of the root of each sequence in its text.
      max_spec_len: T, the most tokens that a sequence drafts.

    Returns:
      The `Draws`, with a leading axis B.
    """
    draw = functools.partial(round_draws, num_nodes=max_spec_len + 1)
    return jax.vmap(lambda key, position: draw(key, position=position).verify)(keys, positions)
