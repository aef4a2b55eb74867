"""Calls of a foreign verifier: its arrays, its source of randomness, and what it returns.

A verifier that JAX can trace is compiled once for each shape of arguments, and called for many
sequences at a time; any other is called from the host, one sequence or one batch at a time.
"""

import dataclasses
import functools
import itertools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.boxes import UNITS
from jaxspec.audit.settings import Setting, is_path
from jaxspec.extras import require
from jaxspec.trees import NONE

RANDOMNESS = ("uniforms", "jax_key", "numpy", "torch", "seed")
"""What a foreign verifier draws from: explicit uniforms, a key, a generator, or an integer."""

Sources = Any
"""Sources of randomness, one for each call: a list, or an array with a leading axis."""

_TRACED_BATCH = 256
_HOST_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Emissions:
    """What a verifier returned for L calls.

    Attributes:
      tokens: int64 [L, W], from the first -1 of a call on padding.
      slots: int64 [L, W], accepted nodes, padded with -1; None where it returns no slots.
    """

    tokens: np.ndarray
    slots: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A verifier around an engine's sampler.

    Attributes:
      verify: the verifier.
      own_uniforms: how many of the explicit uniforms of a sequence it takes itself.
    """

    verify: Callable[..., Any]
    own_uniforms: int

    def __call__(self, *arguments: Any) -> Any:
        """Verify."""
        return self.verify(*arguments)


@dataclasses.dataclass
class Foreign:
    """A foreign verifier, called in settings.

    Attributes:
      verify: the function.
      randomness: one of `RANDOMNESS`.
      batched: whether it takes a batch.
      num_uniforms: K, for explicit uniforms; None for the number of nodes of a setting, and those that
        an adapter takes.
      seed: of the draws that it is given.
      calls: sequences verified so far.
      modified: names of arguments that it has modified in place.
    """

    verify: Callable[..., Any]
    randomness: str
    batched: bool = False
    num_uniforms: int | None = None
    seed: int = 0
    calls: int = 0
    modified: set[str] = dataclasses.field(default_factory=set)
    _programs: dict[Any, Callable[..., Any] | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Import torch if it is needed; seed the draws."""
        self._torch = None
        if self.randomness == "torch":
            self._torch = require("randomness='torch'", "torch", "parity")
        self._sources = np.random.SeedSequence(self.seed)
        self._running: list[Any] = []
        self._is_traceable = self.randomness in ("uniforms", "jax_key")

    def num_axes(self, setting: Setting) -> int:
        """Return K, the uniforms of one call."""
        if self.num_uniforms is not None:
            return self.num_uniforms
        own = self.verify.own_uniforms if isinstance(self.verify, Adapted) else 0
        return len(setting.parents) + own

    def sources(self, setting: Setting, seeds: np.ndarray) -> Sources:
        """Return one fresh source of randomness for each seed, int64 [L]."""
        if self.randomness == "uniforms":
            size = self.num_axes(setting)
            draws = [np.random.default_rng(seed).integers(0, UNITS, size) for seed in seeds]
            return (np.array(draws).reshape(len(seeds), size) / UNITS).astype(np.float32)
        if self.randomness == "jax_key":
            return jax.vmap(jax.random.key)(jnp.asarray(seeds.astype(np.uint32)))
        if self.randomness == "numpy":
            return [np.random.default_rng(seed) for seed in seeds]
        if self._torch is not None:
            return [self._torch.Generator().manual_seed(int(seed)) for seed in seeds]
        return [int(seed) for seed in seeds]

    def sample(self, setting: Setting, drawings: np.ndarray) -> Emissions:
        """Verify the candidates of each drawing, int64 [L], with new independent randomness."""
        (child,) = self._sources.spawn(1)
        generator = np.random.default_rng(child)
        if self.randomness in ("numpy", "torch"):
            # Generators run on from call to call: to make one costs more than to verify.
            most = _HOST_BATCH if self.batched else 1
            while len(self._running) < most:
                seeds = generator.integers(0, 2**31, most)
                self._running = list(self.sources(setting, seeds))
            return self.emit(setting, drawings, self._running)
        if self.randomness == "uniforms":
            draws = generator.integers(0, UNITS, (len(drawings), self.num_axes(setting)))
            return self.emit(setting, drawings, (draws / UNITS).astype(np.float32))
        if self.randomness == "jax_key":
            key = jax.random.key(int(generator.integers(0, 2**31)))
            return self.emit(setting, drawings, jax.random.split(key, len(drawings)))
        return self.emit(setting, drawings, generator.integers(0, 2**31, len(drawings)).tolist())

    def emit(self, setting: Setting, drawings: np.ndarray, sources: Sources) -> Emissions:
        """Verify the candidates of each drawing with its source, which are used again if too few."""
        self.calls += len(drawings)
        program = self.program(setting)
        if program is not None:
            return self._emit_traced(program, setting, drawings, sources)
        if self.batched:
            return self.emit_batches(setting, drawings, sources, _HOST_BATCH)
        return self._emit_singly(setting, drawings, sources)

    def program(self, setting: Setting) -> Callable[..., Any] | None:
        """Return the compiled verifier of a setting's shape, None if JAX cannot trace it."""
        shape = is_path(setting.kind), setting.target.shape[1:], setting.draft is None
        if shape not in self._programs:
            self._programs[shape] = self._trace(setting) if self._is_traceable else None
        return self._programs[shape]

    # --- host calls

    def _arrays(self, setting: Setting, drawings: Any) -> list[Any]:
        """Return the arguments for drawings, an index [L] or a number; None for no draft rows."""
        draft = setting.draft
        if is_path(setting.kind):
            found: list[Any] = [setting.tokens[drawings][..., 1:]]
            found.append(None if draft is None else draft[drawings][..., :-1, :])
        else:
            tokens = setting.tokens[drawings]
            parents = np.broadcast_to(setting.parents, tokens.shape).copy()
            found = [tokens, parents, None if draft is None else draft[drawings]]
        found.append(setting.target[drawings])
        arrays = [None if each is None else np.array(each) for each in found]
        if self._torch is not None:
            return [None if each is None else self._torch.from_numpy(each) for each in arrays]
        if self.randomness == "jax_key":
            return [None if each is None else jnp.asarray(each) for each in arrays]
        return arrays

    def _names(self, setting: Setting) -> list[str]:
        first = ["draft_tokens"] if is_path(setting.kind) else ["tokens", "parents"]
        return [*first, "draft_rows", "target_rows"]

    def _emit_singly(self, setting: Setting, drawings: np.ndarray, sources: Sources) -> Emissions:
        results: list[Any] = [None] * len(drawings)
        order = np.argsort(drawings, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(drawings[order])) + 1)
        for group in groups:
            drawing = int(drawings[group[0]]) if len(group) else 0
            args = self._arrays(setting, drawing)
            for place in group.tolist():
                if self.modified:
                    args = self._arrays(setting, drawing)
                results[place] = self._call(setting, args, sources[place % len(sources)])
            changed = self._changed(setting, args, drawing)
            if changed and not self.modified:
                self.modified |= changed
                return self._emit_singly(setting, drawings, sources)
            self.modified |= changed
        return emissions_of([_parse(*_split(result, setting), setting) for result in results])

    def emit_batches(
        self, setting: Setting, drawings: np.ndarray, sources: Sources, size: int
    ) -> Emissions:
        """Verify from the host in batches of a size, the last of which may be smaller."""
        parsed = []
        for start in range(0, len(drawings), size):
            part = drawings[start : start + size]
            args = self._arrays(setting, part)
            own = (
                sources[start : start + len(part)] if len(sources) > size else sources[: len(part)]
            )
            result = self._call(setting, args, own)
            self.modified |= self._changed(setting, args, part)
            parsed += _parse_batch(result, setting, len(part))
        return emissions_of(parsed)

    def _changed(self, setting: Setting, args: list[Any], drawings: Any) -> set[str]:
        fresh = self._arrays(setting, drawings)
        return {
            name
            for name, old, new in zip(self._names(setting), fresh, args, strict=True)
            if old is not None and not np.array_equal(np.asarray(old), np.asarray(new))
        }

    def _call(self, setting: Setting, args: list[Any], source: Any) -> Any:
        try:
            return self.verify(*args, source)
        except Exception as error:
            given = ", ".join(
                f"{name} {None if each is None else np.asarray(each).tolist()}"
                for name, each in zip(self._names(setting), args, strict=True)
                if setting.vocab <= 8 or name not in ("draft_rows", "target_rows")
            )
            raise ValueError(
                f"the verifier raised {type(error).__name__}: {error}; in instance "
                f"{setting.name!r}, called with {given} and {self.randomness} {source!r}"
            ) from error

    # --- traced calls

    def _trace(self, setting: Setting) -> Callable[..., Any] | None:
        """Compile the verifier for a setting's shape; None if that fails.

        The first program must emit what calls from the host do; if not, none is used.
        """

        def one(*args: Any) -> Any:
            emitted, slots = _split(self.verify(*args), setting)
            return jnp.asarray(emitted), None if slots is None else jnp.asarray(slots)

        program = jax.jit(one if self.batched else jax.vmap(one))
        drawings = np.arange(4) % len(setting.tokens)
        sources = self.sources(setting, np.arange(4))
        try:
            found = self._emit_traced(program, setting, drawings, sources)
        except Exception:
            return None
        if not any(self._programs.values()):
            emit = functools.partial(self.emit_batches, size=4)
            host = (emit if self.batched else self._emit_singly)(setting, drawings, sources)
            ours, theirs = (map(text_of, each.tokens.tolist()) for each in (found, host))
            self._is_traceable = list(ours) == list(theirs)
        return program if self._is_traceable else None

    def _emit_traced(
        self,
        program: Callable[..., Any],
        setting: Setting,
        drawings: np.ndarray,
        sources: Sources,
    ) -> Emissions:
        is_key = self.randomness == "jax_key"
        if not len(drawings):
            return Emissions(np.zeros((0, 1), np.int64), None)
        numbers = np.asarray(jax.random.key_data(sources) if is_key else sources)
        found = []
        for start in range(0, len(drawings), _TRACED_BATCH):
            part = np.arange(start, start + _TRACED_BATCH).clip(max=len(drawings) - 1)
            source = numbers[part % len(numbers)]
            args = self._arrays(setting, drawings[part])
            results = program(*args, jax.random.wrap_key_data(source) if is_key else source)
            kept = min(_TRACED_BATCH, len(drawings) - start)
            found.append([None if each is None else np.asarray(each)[:kept] for each in results])
        tokens, slots = (
            None if each[0] is None else np.concatenate(each) for each in zip(*found, strict=True)
        )
        if tokens is None or tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"traced results {tokens}: must be integers, one row for each sequence"
            )
        return Emissions(tokens.astype(np.int64), slots)


def _split(result: Any, setting: Setting) -> tuple[Any, Any]:
    """Take (emitted, slots) apart; a path's verifier returns no slots."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if is_path(setting.kind) or not is_pair or all(np.ndim(each) == 0 for each in result):
        return result, None
    return result[0], result[1]


def _integers(what: str, value: Any, setting: Setting) -> np.ndarray:
    """Return what was returned for one sequence as int64 [L]."""
    try:
        found = np.asarray(value)
    except Exception as error:
        raise ValueError(_wrong(what, value, setting)) from error
    if found.size == 0 and found.ndim == 1:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(_wrong(what, value, setting))
    return found


def _wrong(what: str, value: Any, setting: Setting) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    kind = type(value).__name__
    found = f"{kind} of shape {tuple(shape)} and dtype {dtype}" if shape is not None else kind
    return (
        f"the verifier returned for {what} a {found}, {reprlib.repr(value)}, in instance "
        f"{setting.name!r}: must be a 1-D sequence of integers (with batched=True one for each "
        "sequence, or an array [B, W] padded with -1)"
    )


_Ints = np.ndarray | Sequence[int]
_Parsed = tuple[_Ints, _Ints | None]


def _parse(emitted: Any, slots: Any, setting: Setting) -> _Parsed:
    tokens = _integers("the emitted tokens", emitted, setting)
    return tokens, None if slots is None else _integers("the slots", slots, setting)


def _parse_batch(result: Any, setting: Setting, size: int) -> list[_Parsed]:
    """Take the results of a batch apart: [B, W] or B sequences, and for trees maybe the slots."""
    emitted, slots = result, None
    if not is_path(setting.kind) and isinstance(result, tuple) and len(result) == 2:
        emitted, slots = result
    for what, value in (("the batch's emitted tokens", emitted), ("the batch's slots", slots)):
        if value is not None and (not hasattr(value, "__len__") or len(value) != size):
            raise ValueError(_wrong(what, value, setting) + f"; the batch had {size} sequences")
    each_slots = itertools.repeat(None) if slots is None else slots
    return [_parse(*each, setting) for each in zip(emitted, each_slots, strict=False)]


def emissions_of(parsed: Sequence[_Parsed]) -> Emissions:
    """Pad what was returned for each call; slots are given for all of them or none."""

    def padded(rows: Sequence[_Ints]) -> np.ndarray:
        found = np.full((len(rows), max(map(len, rows), default=0) + 1), NONE, np.int64)
        for place, row in enumerate(rows):
            found[place, : len(row)] = row
        return found

    slots = [row for _, row in parsed if row is not None]
    if 0 < len(slots) < len(parsed):
        raise ValueError(
            f"the verifier returned slots in {len(slots)} of {len(parsed)} calls: must be (emitted, "
            "slots) in all of them, or emitted tokens alone"
        )
    return Emissions(padded([row for row, _ in parsed]), padded(slots) if slots else None)


def text_of(row: Sequence[int]) -> list[int]:
    """Return emitted tokens up to the first -1."""
    row = list(row)
    return row[: row.index(NONE)] if NONE in row else row
