"""Flat batches: drafted paths end to end, as vLLM and tpu-inference hold them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_kind, static_field, struct
from jaxspec.layouts.arrays import Array, Path, library_of
from jaxspec.layouts.point_masses import or_point_masses
from jaxspec.logits import Logits
from jaxspec.proposals import PointMass, WithReplacement, sampled_path
from jaxspec.rows import RowsLike, RowSource, as_source, vocab_of
from jaxspec.slabs import AdjustedLogits, Penalties
from jaxspec.transfers import moves_data
from jaxspec.trees import NONE, chain
from jaxspec.verify import Verdict


@struct
class FlatBatch:
    """The drafted paths of a batch, end to end, as vLLM and tpu-inference hold them.

    Rows may be sources, `Logits` with one temperature, top_k and top_p for each sequence, [B], or for
    all, []; and wider than the vocabulary. There may be more entries and rows than the counts need.

    Attributes:
      draft_token_ids: int [total], those of sequence 0 first. Entries that no sequence counts are
        padding.
      num_draft_tokens: int [B], drafted tokens of each sequence; may be 0. -1 marks a place without a
        request, which has no rows.
      draft_rows: [total, V], the law that each token was drawn from; None for point masses (n-grams).
      target_rows: [total + B, V], of each sequence the rows that score its tokens, then its bonus row;
        [total, V] without bonus rows.
      has_bonus_rows: whether bonus rows are among the target rows. If not, the engine takes bonus
        tokens that are drawn already.
      is_sampled: bool [B], which sequences have draft rows; the tokens of the others are point masses
        and have none. None for all, or without draft rows for none.
    """

    draft_token_ids: jax.Array  # [total]
    num_draft_tokens: jax.Array  # [B]
    draft_rows: RowsLike | None  # [total, V]
    target_rows: RowsLike  # [total + B, V]
    has_bonus_rows: bool = static_field()
    is_sampled: jax.Array | None = None  # [B]

    @property
    def cu_num_draft_tokens(self) -> jax.Array:
        """Tokens up to and including each sequence, int [B]; it starts at the entry before."""
        return self._tokens.cumsum(dtype=self._tokens.dtype)

    @property
    def first_tokens(self) -> jax.Array:
        """Index of each sequence's first token, int [B]."""
        return self.cu_num_draft_tokens - self._tokens

    @property
    def first_draft_rows(self) -> jax.Array:
        """Index of each sequence's first draft row, int [B]."""
        rows = self._tokens
        if self.is_sampled is not None:
            rows = rows * self.is_sampled.astype(rows.dtype)
        return rows.cumsum(dtype=rows.dtype) - rows

    @property
    def first_slots(self) -> jax.Array:
        """Index of each sequence's root among all roots and drafted tokens, int [B]."""
        is_used = (self.num_draft_tokens >= 0).astype(self.num_draft_tokens.dtype)
        return self.first_tokens + is_used.cumsum(dtype=is_used.dtype) - is_used

    @property
    def first_rows(self) -> jax.Array:
        """Index of each sequence's first target row, int [B]."""
        return self.first_slots if self.has_bonus_rows else self.first_tokens

    def adjusted(
        self,
        max_spec_len: int,
        *,
        allowed: jax.Array | None = None,
        bias: jax.Array | None = None,
        penalties: Penalties | None = None,
    ) -> Self:
        """Return the batch with the settings of its requests applied to the target's logits (traced).

        Rows are adjusted as they are read; see `jaxspec.slabs.AdjustedLogits`. Tokens drafted before a
        row count as output for its penalties.

        Args:
          max_spec_len: T, the most tokens that a sequence drafts.
          allowed: uint32 or int32 [total + B, ceil(V / 32)], one set of tokens for each target row.
          bias: float [B, V], added to the logits of each sequence.
          penalties: of the sequences, [B].

        Raises:
          ValueError: the target rows are not `Logits`.
        """
        source = self.target_rows
        assert_kind("target_rows", source, Logits, "Logits, to be adjusted")
        assert isinstance(source, Logits)
        rows = jnp.arange(source.values.shape[0], dtype=jnp.int32)
        first = jnp.asarray(self.first_rows, jnp.int32)
        counts = jnp.asarray(self.num_draft_tokens, jnp.int32)
        count = jnp.where(counts < 0, 0, counts + int(self.has_bonus_rows))
        after = rows[:, None] - first[None]
        is_own = (after >= 0) & (after < count[None])
        sequence = jnp.where(jnp.any(is_own, axis=1), jnp.argmax(is_own, axis=1), NONE)
        places = jnp.arange(max_spec_len, dtype=jnp.int32)[None]
        start = jnp.asarray(self.first_tokens, jnp.int32)[sequence]
        drafted = jnp.asarray(self.draft_token_ids, jnp.int32)
        where = jnp.clip(start[:, None] + places, 0, max(drafted.shape[0] - 1, 0))
        is_above = (sequence >= 0)[:, None] & (places < (rows - first[sequence])[:, None])
        above = jnp.where(is_above, drafted[where] if drafted.shape[0] else NONE, NONE)
        slab = AdjustedLogits(
            values=source.values,
            allowed=allowed,
            bias=bias,
            penalties=penalties,
            above=above if penalties is not None else None,
            sequence=sequence.astype(jnp.int32),
        )
        return replace(self, target_rows=replace(source, values=slab))

    @property
    def _tokens(self) -> jax.Array:
        counts = self.num_draft_tokens
        # A count beyond the entries is as bad as one just beyond: sums of such may not wrap around.
        most = counts.dtype.type(min(self.draft_token_ids.shape[0] + 1, np.iinfo(counts.dtype).max))
        return library_of(counts).clip(counts, counts.dtype.type(0), most)


def flat_from_paths(paths: Sequence[Path], *, has_bonus_rows: bool = True) -> FlatBatch:
    """Lay paths end to end (traced: the length of a path is a shape).

    Args:
      paths: (tokens [T], draft rows [T, V] or None, target rows [T + 1, V]) of each sequence.
      has_bonus_rows: whether to keep the bonus row, the last target row of a path.

    Returns:
      The batch.

    Raises:
      ValueError: there are no paths, or the rows of one do not fit; naming the sequence and shape.
    """
    if not paths:
        raise ValueError("paths is empty: a batch has at least one sequence")
    vocab, is_sampled = paths[0][2].shape[-1], paths[0][1] is not None
    for b, (tokens, draft, target) in enumerate(paths):
        if (draft is not None) != is_sampled:
            raise ValueError(
                f"sequence {b}: draft rows must be given for all sequences or for none"
            )
        for name, rows, num in (("draft", draft, len(tokens)), ("target", target, len(tokens) + 1)):
            if rows is not None and rows.shape != (num, vocab):
                given = f"sequence {b}: {name} rows have shape {rows.shape}"
                raise ValueError(f"{given}: must be {(num, vocab)} for {len(tokens)} tokens")
    library, (tokens, draft, target) = library_of(paths[0][2]), zip(*paths, strict=True)
    return FlatBatch(
        draft_token_ids=library.concatenate(tokens),
        num_draft_tokens=library.asarray([len(each) for each in tokens], dtype=np.int32),
        draft_rows=library.concatenate(draft) if is_sampled else None,
        target_rows=library.concatenate(
            [rows[: len(rows) - (not has_bonus_rows)] for rows in target]
        ),
        has_bonus_rows=has_bonus_rows,
    )


@moves_data
def paths_from_flat(batch: FlatBatch) -> list[Path]:
    """Cut a batch whose rows are arrays, with bonus rows, into its paths: undo `flat_from_paths`.

    Args:
      batch: the batch.

    Returns:
      (tokens [T], draft rows [T, V] or None, target rows [T + 1, V]) of each sequence, in NumPy.

    Raises:
      ValueError: bonus rows are missing, a count is negative, or the counts need more entries than
        there are; naming the place and the numbers.
    """
    if not batch.has_bonus_rows:
        raise ValueError("the batch has no bonus rows: a path of T tokens has T + 1 target rows")
    counts = np.asarray(batch.num_draft_tokens)
    for b in np.flatnonzero(counts < 0):
        raise ValueError(f"num_draft_tokens[{b}] is {counts[b]}: must be at least 0")
    total = int(counts.sum())
    least = {"draft_token_ids": total, "draft_rows": total, "target_rows": total + len(counts)}
    held = {name: getattr(batch, name) for name in least}
    for name, values in held.items():
        if values is not None and len(values) < least[name]:
            raise ValueError(f"{name} has {len(values)} entries: the counts need {least[name]}")
    tokens, target = (np.asarray(held[name]) for name in ("draft_token_ids", "target_rows"))
    draft = None if batch.draft_rows is None else np.asarray(batch.draft_rows)
    paths = []
    for n, start, row in zip(counts, batch.first_tokens, batch.first_rows, strict=True):
        own = slice(start, start + n)
        paths.append(
            (tokens[own], None if draft is None else draft[own], target[row : row + n + 1])
        )
    return paths


def path_at(
    batch: FlatBatch, sequence: jax.Array | int, max_spec_len: int
) -> tuple[PointMass | WithReplacement, RowSource]:
    """Return one sequence of a batch as verifiers take it (traced).

    No row is copied: under `jax.vmap` over `sequence` the slabs stay whole, and each sequence is an
    offset into them.

    Args:
      batch: the batch; rows that are logits are given as `Logits`.
      sequence: int32 [], which sequence.
      max_spec_len: T, the most tokens that a sequence drafts.

    Returns:
      (proposal of a path of capacity T, target rows). The proposal is a `PointMass` without draft
      rows, else a `WithReplacement`. A batch without bonus rows is verified with `bonus=False`.

    >>> rows = jnp.full((5, 2), 0.5)  # sequences of 2 and 1 tokens, with their bonus rows
    >>> batch = FlatBatch(draft_token_ids=jnp.array([1, 0, 1]), num_draft_tokens=jnp.array([2, 1]),
    ...                   draft_rows=rows[:3], target_rows=rows, has_bonus_rows=True)
    >>> proposal, target = path_at(batch, 1, max_spec_len=2)
    >>> proposal.tree.tokens.tolist(), int(proposal.draft_rows.first), int(target.first)
    ([-1, 1, -1], 2, 3)
    """
    counts = (batch.num_draft_tokens, batch.first_tokens, batch.first_rows, batch.first_draft_rows)
    count, start, row, drawn = (jnp.asarray(each, jnp.int32)[sequence] for each in counts)
    # What is not held shows as a path of an impossible length: no token of another is taken.
    total = batch.draft_token_ids.shape[0]
    is_held = (start >= 0) & (start <= total) & (count <= total - start)
    count = jnp.where(is_held, count, max_spec_len + 1)
    room = jnp.zeros(max_spec_len, jnp.int32)  # a slice at the end must not be clamped
    tokens = jnp.concatenate([jnp.asarray(batch.draft_token_ids, jnp.int32), room])
    tokens = jax.lax.dynamic_slice(tokens, (start,), (max_spec_len,))
    target = rows_of("target", batch.target_rows, sequence, row)
    if batch.draft_rows is None:
        return PointMass(tree=chain(tokens, count)), target
    draft = rows_of("draft", batch.draft_rows, sequence, drawn)
    if batch.is_sampled is not None:
        is_sampled = jnp.asarray(batch.is_sampled)[sequence]
        draft = or_point_masses(draft, is_sampled, tokens)
    return sampled_path(tokens, draft, count), target


def rows_of(name: str, rows: RowsLike, sequence: jax.Array | int, first: jax.Array) -> RowSource:
    """Return the rows of one sequence: its parameters, and where it begins in the slab."""
    source = as_source(name, rows)
    if source.first is not None:
        raise ValueError(f"first of the {name} rows is given: the counts of a flat batch decide it")
    slab, parameters = source.split()
    own = jax.tree.map(lambda x: x[sequence] if jnp.ndim(x) else x, parameters)
    return replace(own, values=slab, first=first)


def flat_output(
    batch: FlatBatch, verdicts: Verdict, bonus_token_ids: jax.Array | None = None
) -> jax.Array:
    """Return the verdicts of a batch as vLLM's output_token_ids (traced).

    Args:
      batch: the batch.
      verdicts: those of its sequences, with a leading axis B.
      bonus_token_ids: int [B] or [B, 1], for a batch without bonus rows: the tokens that follow fully
        accepted paths.

    Returns:
      int32 [B, T + 1], the emitted tokens, then placeholders -1.
    """
    if bonus_token_ids is None:
        return verdicts.tokens
    bonus = jnp.asarray(bonus_token_ids, jnp.int32).reshape(-1, 1)
    target = as_source("target_rows", batch.target_rows)
    is_token = (bonus >= 0) & (bonus < vocab_of(target, target.values))
    counts = jnp.asarray(batch.num_draft_tokens, jnp.int32)[:, None]
    slots = jnp.arange(verdicts.tokens.shape[1], dtype=jnp.int32)[None]
    is_bonus = (slots == counts) & (verdicts.num_accepted[:, None] == counts)
    return jnp.where(is_bonus, jnp.where(is_token, bonus, NONE), verdicts.tokens)


def emitted_from_flat(batch: FlatBatch, output_token_ids: Array, max_spec_len: int) -> Array:
    """Return what an output emits as the engines read it: all entries but placeholders (traced).

    Args:
      batch: the batch.
      output_token_ids: int [B, T + 1] (vLLM), or [total + B] with the bonus tokens of all sequences at
        the end (tpu-inference). Placeholders are -1.
      max_spec_len: T.

    Returns:
      int [B, T + 1], the emitted tokens of each sequence, then -1.

    Raises:
      ValueError: the output has another shape.

    >>> batch = flat_from_paths([(np.array([4, 5]), None, np.ones((3, 6)) / 6)])
    >>> emitted_from_flat(batch, np.array([[4, -1, 3]]), 2).tolist()  # a bonus after a rejection
    [[4, 3, -1]]
    """
    output, library = output_token_ids, library_of(output_token_ids)
    num, total = batch.num_draft_tokens.shape[0], batch.draft_token_ids.shape[0]
    if output.shape == (total + num,):
        slots = library.arange(max_spec_len, dtype=np.int32)[None]
        places = library.minimum(batch.first_tokens[:, None] + slots, total + num - 1)
        own = library.where(slots < batch.num_draft_tokens[:, None], output[places], NONE)
        output = library.concatenate([own, output[total:, None]], axis=1)
    if output.shape != (num, max_spec_len + 1):
        wanted = f"{(num, max_spec_len + 1)} or {(total + num,)}"
        raise ValueError(f"output_token_ids has shape {output_token_ids.shape}: must be {wanted}")
    order = library.argsort(output == NONE, axis=1, stable=True)
    return library.take_along_axis(output, order, axis=1)
