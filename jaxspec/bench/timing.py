"""How the verifiers are timed: calls in turn, ratios call by call; what a compiled program takes."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

LEAST_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of a sample and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, sample: Sequence[float] | np.ndarray) -> "Spread":
        """Summarise a sample."""
        low, median, high = np.quantile(np.asarray(sample, np.float64), (0.25, 0.5, 0.75)).tolist()
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, and what it took to compile.

    Attributes:
      run: calls it and waits for the result.
      trace_seconds: CPU time of tracing and lowering, in Python.
      compile_seconds: CPU time of XLA, all threads.
      temporary_bytes: greatest temporary memory of a call; None where the platform does not say.
    """

    run: Callable[..., Any]
    trace_seconds: float
    compile_seconds: float
    temporary_bytes: int | None


def compiled(function: Callable[..., Any], *args: Any) -> Program:
    """Compile a function for the shapes of its arguments."""
    begin = time.process_time()
    lowered = jax.jit(function).trace(*args).lower()
    middle = time.process_time()
    program = lowered.compile()
    end = time.process_time()
    memory = program.memory_analysis()
    return Program(
        run=lambda *args: jax.block_until_ready(program(*args)),
        trace_seconds=middle - begin,
        compile_seconds=end - middle,
        temporary_bytes=None if memory is None else int(memory.temp_size_in_bytes),
    )


@contextlib.contextmanager
def as_if_first() -> Iterator[None]:
    """Compile as if for the first time: forget traces, and use no cache on disk."""
    is_used = jax.config.values["jax_enable_compilation_cache"]
    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", is_used)
        compilation_cache.reset_cache()


def interleave(
    calls: Mapping[str, Callable[[], Any]], *, repeats: int, seconds: float
) -> dict[str, np.ndarray]:
    """Time calls in turn, one of each, so that a drift in the speed of the machine is shared.

    Each is called once before. The turns end after `repeats`, or once `seconds` have passed and there
    were three.

    Returns:
      The time of each call in seconds, float64 [turns].
    """
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for turn in range(repeats):
        if turn >= LEAST_CALLS and time.perf_counter() - start >= seconds:
            break
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begin)
    return {name: np.array(each) for name, each in taken.items()}
