"""Every rule audited at once: counts on grids, exact laws, known-good numbers, in one record."""

import dataclasses
import itertools
import os
import platform
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import jax

from jaxspec import __version__
from jaxspec.audit.brief import brief
from jaxspec.audit.grid import single_path_counts, two_level_tree_counts
from jaxspec.audit.instances import instances_for
from jaxspec.audit.law import Law, Progress, exact_law
from jaxspec.audit.rounds import Capacity
from jaxspec.transfers import moves_data
from jaxspec.verify import RULES, Rule

KNOWN_COUNTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"single_path": (2500, 7500), "two_level_tree": (2000, 500, 3000, 4500)}
)
"""The counts that the grids of 10000 cells must have: theory, not a measurement."""


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit of every rule found.

    Attributes:
      grids: the counts found, by the names of `KNOWN_COUNTS`.
      laws: the exact law of every rule in each of its instances.
      device: where the verifiers ran.
      versions: of jaxspec, of Python, and of the libraries that took part.
    """

    grids: Mapping[str, tuple[int, ...]]
    laws: tuple[Law, ...]
    device: str
    versions: Mapping[str, str]

    __repr__ = brief

    @property
    def is_proved(self) -> bool:
        """Whether every count is the known one and every law is the target's; without laws not."""
        are_lossless = bool(self.laws) and all(law.is_proved for law in self.laws)
        return self.grids == KNOWN_COUNTS and are_lossless

    @property
    def greatest_tv(self) -> float:
        """The greatest total variation of any law."""
        return max((law.tv for law in self.laws), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return the report as one object of plain numbers, lists and strings."""
        return {
            "proved": self.is_proved,
            "device": self.device,
            "versions": dict(self.versions),
            "grids": {name: list(counts) for name, counts in self.grids.items()},
            "laws": [
                {
                    "rule": law.rule,
                    "case": law.case,
                    "tv": law.tv,
                    "impossible": law.impossible,
                    "flagged": law.flagged,
                    "total_mass": law.total_mass,
                    "expected_accepted": law.expected_accepted,
                    "known_accepted": law.known_accepted,
                    "cells": len(law.cells.low),
                    "evaluations": law.cells.evaluations,
                    "replays": law.cells.replays,
                    "misses": law.cells.misses,
                    "proved": law.is_proved,
                }
                for law in self.laws
            ],
        }


@moves_data
def audit_rules(progress: Progress | None = None) -> AuditReport:
    """Prove every rule of `jaxspec.RULES` on this machine's default device, by counting.

    The contract's two grids are counted, and the exact law of one round of every rule is found in
    each of its instances, all through the public jitted verifiers.

    Args:
      progress: see `Progress`. It may be called from other threads, one call at a time.

    Returns:
      The `AuditReport`.
    """
    counters = {"single_path": single_path_counts, "two_level_tree": two_level_tree_counts}
    rules = tuple(RULES.values())
    steps = len(counters) + sum(len(instances_for(rule)) for rule in rules)
    done = itertools.count()
    lock = threading.Lock()

    def tell(what: str) -> None:
        if progress:
            with lock:
                progress(what, next(done), steps)

    def count(name: str) -> tuple[int, ...]:
        counts = tuple(counters[name]())
        tell(f"grid: {name.replace('_', ' ')}")
        return counts

    def prove(rule: Rule) -> list[Law]:
        # One capacity for all instances of a rule: it compiles once.
        capacity = Capacity.of(instances_for(rule))
        laws = []
        for instance in instances_for(rule):
            laws.append(exact_law(rule, instance, capacity=capacity))
            tell(f"{rule.name}: {instance.name}")
        return laws

    tell("compiling")
    # Most of the time goes into compilation, which lets other threads run.
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        counts, laws = pool.map(count, counters), pool.map(prove, rules)
        return AuditReport(
            grids=dict(zip(counters, counts, strict=True)),
            laws=tuple(itertools.chain.from_iterable(laws)),
            device=device_name(),
            versions=library_versions(),
        )
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits for what is running, no more


def device_name() -> str:
    """Name the device that JAX computes on by default."""
    device = jax.devices()[0]
    kind = device.device_kind
    return device.platform if kind == device.platform else f"{device.platform} ({kind})"


def library_versions() -> dict[str, str]:
    """Return the versions of all that decides what is computed."""
    libraries = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
    return {"jaxspec": __version__, "python": platform.python_version(), **libraries}
