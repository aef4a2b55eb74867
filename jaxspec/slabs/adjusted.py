"""Logits adjusted token by token as they are read: bias, penalties, allowed tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp

from jaxspec.checks import assert_array, struct
from jaxspec.slabs.base import (
    AnySlab,
    Slab,
    assert_slab,
    end_to_end,
    entries_at,
    read,
    spread,
    take,
)
from jaxspec.slabs.bits import bits_at, read_bits, words_of
from jaxspec.tiles import tokens_from

Load: TypeAlias = Callable[[Any, jax.Array], jax.Array]
"""Loads the entries of a row, of a slab or of sets of tokens, at the places that are read."""


@struct
class Penalties:
    """What tokens cost that occurred before, for M sequences.

    Attributes:
      counts: int [M, V], how often each token occurs in the output so far, any integer dtype.
      in_prompt: uint32 or int32 [M, ceil(V / 32)], the tokens of the prompts (`token_bits`), which
        count for the repetition penalty alone. None for none.
      repetition: float32 [M], positive: logits above 0 of tokens that occurred in prompt or output are
        divided by it, others multiplied. 1 for none.
      frequency: float32 [M], nats subtracted for each occurrence in the output. 0 for none.
      presence: float32 [M], nats subtracted once for a token that occurs in the output. 0 for none.
    """

    counts: jax.Array  # [M, V]
    in_prompt: jax.Array | None = None  # [M, ceil(V / 32)]
    repetition: jax.Array  # [M]
    frequency: jax.Array  # [M]
    presence: jax.Array  # [M]


@struct
class AdjustedLogits(Slab):
    """Logits after bias, penalties and the mask of allowed tokens: a slab for `Logits`.

    They are adjusted in one order, that of vLLM and transformers: bias; repetition, frequency and
    presence penalty; then tokens that are not allowed get -inf. `Logits` applies temperature and
    filters to the result. (sglang adds the bias last.) NaN and +inf stay, also where they are masked,
    so that an invalid row is rejected whatever is allowed.

    Entries are computed as they are read, so only rows that a verifier visits are adjusted. Settings
    of a request, M of them, are given once and not for each row; what is allowed, and what lies above
    a node in the draft, are given for each row. Every None costs nothing.

    Attributes:
      values: float [R, W], logits in nats, or another slab of logits.
      allowed: uint32 or int32 [R, ceil(V / 32)], the tokens allowed in each row (`token_bits`). A
        grammar gives the set of a node by the tokens above it. None allows all.
      bias: float [M, V], added; -inf forbids a token. None for none.
      penalties: `Penalties` of the M sequences; None for none.
      above: int32 [R, D], the drafted tokens from the root's child down to each row's node, then -1:
        they count as output (`Tree.tokens_above`). None for none.
      sequence: int32 [R], which of the M sequences each row is of, -1 for one without bias and
        penalties. None: all rows are of sequence 0. A row of one beyond M is invalid, and so is one
        with a negative count or a penalty out of range: it has the entry +inf.

    >>> from jaxspec import Logits, dense_rows
    >>> from jaxspec.slabs import token_bits
    >>> allowed = token_bits(jnp.array([[True, True, False]]))
    >>> slab = AdjustedLogits(
    ...     values=jnp.zeros((1, 3)), bias=jnp.log(jnp.array([[3.0, 1.0, 9.0]])), allowed=allowed)
    >>> dense_rows(Logits(values=slab, temperature=jnp.float32(1)), 1).round(6).tolist()
    [[0.75, 0.25, 0.0]]
    """

    values: AnySlab  # [R, W]
    allowed: jax.Array | None = None  # [R, ceil(V / 32)]
    bias: jax.Array | None = None  # [M, V]
    penalties: Penalties | None = None
    above: jax.Array | None = None  # [R, D]
    sequence: jax.Array | None = None  # [R]

    @property
    def shape(self) -> tuple[int, int]:
        """That of the values."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def dtype(self) -> Any:
        """Entries are computed in float32."""
        return jnp.dtype(jnp.float32)

    def read(self, row: jax.Array, start: Any, size: int) -> jax.Array:
        """Adjust the logits of consecutive tokens."""
        row = jnp.clip(row, 0, self.shape[0] - 1)
        return self._adjusted(
            row,
            tokens_from(start, size),
            lambda slab, at: read(slab, at, start, size),
            lambda words, at: read_bits(words, at, start, size),
        )

    def at(self, rows: jax.Array, tokens: jax.Array) -> jax.Array:
        """Adjust single logits."""
        return self._adjusted(
            rows,
            tokens,
            lambda slab, at: entries_at(slab, at, tokens),
            lambda words, at: bits_at(words, at, tokens),
        )

    def _adjusted(
        self, row: jax.Array, tokens: jax.Array, load: Load, load_bits: Load
    ) -> jax.Array:
        """Return the entries of tokens [...]; `row` is one row, or one for each token."""
        given = load(self.values, row).astype(jnp.float32)
        logit = given
        owner = jnp.zeros_like(row) if self.sequence is None else self.sequence[row]
        is_owned, owner = owner >= 0, jnp.maximum(owner, 0)
        if self.bias is not None:
            bias = load(self.bias, owner).astype(jnp.float32)
            logit += jnp.where(is_owned, bias, 0.0)
        if self.penalties is not None:
            penalized = self._penalized(self.penalties, logit, row, owner, tokens, load, load_bits)
            logit = jnp.where(is_owned, penalized, logit)
        if (tables := jax.tree.leaves((self.bias, self.penalties))) and self.sequence is not None:
            logit = jnp.where(owner < tables[0].shape[0], logit, jnp.inf)
        if self.allowed is not None:
            logit = jnp.where(load_bits(self.allowed, row), logit, -jnp.inf)
        return jnp.where(given < jnp.inf, logit, given)  # NaN and +inf stay

    def _penalized(
        self,
        penalties: Penalties,
        logit: jax.Array,
        row: jax.Array,
        owner: jax.Array,
        tokens: jax.Array,
        load: Load,
        load_bits: Load,
    ) -> jax.Array:
        count = load(penalties.counts, owner).astype(jnp.float32)
        if self.above is not None:
            above = self.above[row]
            for depth in range(above.shape[-1]):
                count += jnp.where(above[..., depth] == tokens, 1.0, 0.0)
        has_occurred = count > 0
        is_repeated = has_occurred
        if penalties.in_prompt is not None:
            is_repeated |= load_bits(penalties.in_prompt, owner)
        settings = ("repetition", "frequency", "presence")
        repetition, frequency, presence = (
            getattr(penalties, name)[owner].astype(jnp.float32) for name in settings
        )
        by = jnp.where(is_repeated, repetition, 1.0)
        logit = jnp.where(logit > 0, logit / by, logit * by)
        logit -= frequency * count + jnp.where(has_occurred, presence, 0.0)
        is_valid = (repetition > 0) & jnp.isfinite(repetition + frequency + presence)
        return jnp.where(is_valid & (count >= 0), logit, jnp.inf)

    def take(self, rows: jax.Array) -> Self:
        """Take rows of all that is given by row; the sequences stay."""
        taken: dict[str, Any] = {
            name: None if getattr(self, name) is None else take(getattr(self, name), rows)
            for name in ("values", *_BY_ROW)
        }
        return dataclasses.replace(self, **taken)

    def end_to_end(self, batch: int, is_mapped: Any) -> Self:
        """Lay rows end to end, and the sequences of the batch if they are not shared."""
        values, _ = end_to_end(self.values, batch, is_mapped.values)
        if not any(jax.tree.leaves(is_mapped.values)):
            everyone = jnp.arange(self.values.shape[0], dtype=jnp.int32)
            values = take(self.values, jnp.tile(everyone, batch))
        rows = values.shape[0] // batch
        by_row: dict[str, Any] = {
            name: spread(getattr(self, name), batch, getattr(is_mapped, name))
            for name in _BY_ROW
            if getattr(self, name) is not None
        }
        given: dict[str, Any] = {"bias": self.bias, "penalties": self.penalties}
        mapped = {"bias": is_mapped.bias, "penalties": is_mapped.penalties}
        if any(jax.tree.leaves(mapped)):
            given = jax.tree.map(lambda x, mapped: spread(x, batch, mapped), given, mapped)
            total = jax.tree.leaves(given)[0].shape[0]
            most = total // batch
            starts = jnp.repeat(jnp.arange(batch, dtype=jnp.int32) * most, rows)
            own = by_row.get("sequence", jnp.zeros(batch * rows, jnp.int32))
            own = jnp.where(own >= 0, own + starts, own)
            # One beyond the tables is not the first of the next.
            by_row["sequence"] = jnp.where(own - starts < most, own, total)
        return dataclasses.replace(self, values=values, **by_row, **given)

    def validate(self, name: str, vocab: int | None) -> None:
        """Assert static shapes and dtypes."""
        assert_slab(name, self.values, vocab)
        rows, width = self.shape
        vocab = width if vocab is None else vocab
        words = words_of(vocab)
        if self.allowed is not None:
            assert_array(
                f"{name} rows: allowed", self.allowed, {"R": rows, "words": None}, jnp.integer
            )
            _assert_wide(f"{name} rows: allowed", self.allowed, words, "words")
        if self.above is not None:
            assert_array(f"{name} rows: above", self.above, {"R": rows, "D": None}, jnp.integer)
        if self.sequence is not None:
            assert_array(f"{name} rows: sequence", self.sequence, {"R": rows}, jnp.integer)
        num = None
        if self.bias is not None:
            assert_array(f"{name} rows: bias", self.bias, {"M": None, "V": None}, jnp.floating)
            _assert_wide(f"{name} rows: bias", self.bias, vocab, "entries")
            num = self.bias.shape[0]
        if (penalties := self.penalties) is not None:
            place = f"{name} rows: penalties."
            assert_array(f"{place}counts", penalties.counts, {"M": num, "V": None}, jnp.integer)
            _assert_wide(f"{place}counts", penalties.counts, vocab, "entries")
            num = penalties.counts.shape[0]
            if (bits := penalties.in_prompt) is not None:
                assert_array(f"{place}in_prompt", bits, {"M": num, "words": None}, jnp.integer)
                _assert_wide(f"{place}in_prompt", bits, words, "words")
            for field in ("repetition", "frequency", "presence"):
                value = getattr(penalties, field)
                assert_array(f"{place}{field}", value, {"M": num}, jnp.floating)


_BY_ROW = ("allowed", "above", "sequence")


def _assert_wide(name: str, array: jax.Array, least: int, unit: str) -> None:
    if array.shape[1] < least:
        raise AssertionError(
            f"{name} has rows of {array.shape[1]} {unit}: the vocabulary needs {least}"
        )
