"""Every rule audited: counts on grids, exact laws, known-good numbers, in one report."""

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
import jax.numpy as jnp

from jaxspec import __version__
from jaxspec.audit.batches import batch_faults
from jaxspec.audit.grid import count_outcomes
from jaxspec.audit.instances import SINGLE_PATH, TWO_LEVEL_TREE, Instance, instances_for
from jaxspec.audit.law import Law, exact_law
from jaxspec.audit.reference import PLAIN_RULES
from jaxspec.audit.rounds import make_round
from jaxspec.checks import Progress
from jaxspec.transfers import moves_data
from jaxspec.verify import RULES, Rule

KNOWN_COUNTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"single_path": (2500, 7500), "two_level_tree": (2000, 500, 3000, 4500)}
)
"""The counts that the grids of 10000 cells must have: theory, not a measurement."""

_POINTS = 2**18
"""Uniform draws that are replayed in the first instance of a rule; a 16th of them in the others."""

# By rule and instance: two draws, each for the named axes. The second of the tree is that of the
# first candidate below the accepted one.
_GRIDS: dict[str, tuple[str, Instance, tuple[str, ...], tuple[str, ...]]] = {
    "single_path": ("token", SINGLE_PATH, ("draft 1",), ("accept 1",)),
    "two_level_tree": ("point_mass", TWO_LEVEL_TREE, ("accept 1",), ("accept 3", "accept 5")),
}


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """Result of an audit of every rule.

    Attributes:
      device: where the verifiers ran.
      versions: of jaxspec, Python, and the libraries involved.
      grids: the counts found, by the names of `KNOWN_COUNTS`.
      laws: the exact law of every rule in each of its instances.
      batches: by rule, which rounds of its batches over a real vocabulary came to something else than
        they must, in words.
    """

    device: str
    versions: Mapping[str, str]
    grids: Mapping[str, tuple[int, ...]]
    laws: tuple[Law, ...] = dataclasses.field(repr=False)
    batches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def failures(self) -> tuple[str, ...]:
        """Say which checks failed, where and by how much; empty if every rule is proved."""
        counts = (
            f"{name}: counted {list(counts)}, wanted {list(KNOWN_COUNTS[name])}"
            for name, counts in self.grids.items()
            if counts != KNOWN_COUNTS[name]
        )
        laws = (f"{law.rule}, {law.case}: {what}" for law in self.laws for what in law.failures)
        batches = (f"{rule}, {what}" for rule, faults in self.batches.items() for what in faults)
        return (*counts, *laws, *batches)

    @property
    def is_proved(self) -> bool:
        """Whether no check failed; False without laws or counts."""
        is_whole = bool(self.laws) and self.grids.keys() == KNOWN_COUNTS.keys()
        return is_whole and not self.failures

    @property
    def greatest_tv(self) -> float:
        """The greatest total variation of any law."""
        return max((law.tv for law in self.laws), default=0.0)

    @property
    def uncertified(self) -> float:
        """The greatest volume of draws that another outcome could hide in; see `Cells`."""
        return max((law.cells.uncertified for law in self.laws), default=1.0)

    def to_json(self) -> dict[str, Any]:
        """Return the report as one object of plain numbers, lists and strings."""
        laws = [law.to_json() for law in self.laws]
        return {"proved": self.is_proved, **vars(self), "laws": laws}


@moves_data
def audit_rules(progress: Progress | None = None) -> AuditReport:
    """Prove every rule of `jaxspec.RULES` on this machine's default device, by counting.

    The contract's two grids are counted; the exact law of one round of every rule is found in each of
    its instances, and compared with that of the plain rule; batches over a real vocabulary, with
    rounds that are unsound among them, are compared with the verdicts that they must have. All of it
    goes through the public jitted verifiers. An interval of width 1e-4 of a draw with another outcome
    is found in the first instance of a rule, one of 1e-3 in each, but for a chance of 1e-6.

    Args:
      progress: called as progress(what, done, total) after each law, from other threads too, one
        call at a time.

    Returns:
      The `AuditReport`.
    """
    rules = tuple(RULES.values())
    steps = len(_GRIDS) + sum(len(instances_for(rule)) + 1 for rule in rules)
    done, lock = itertools.count(), threading.Lock()

    def report(what: str) -> None:
        if progress:
            with lock:
                progress(what, next(done), steps)

    def count(name: str) -> tuple[int, ...]:
        counts = grid_counts(name)
        report(f"grid: {name.replace('_', ' ')}")
        return counts

    def prove(rule: Rule) -> list[Law]:
        laws = []
        instances = instances_for(rule)
        for instance in instances:
            points = _POINTS if instance is instances[0] else _POINTS // 16
            laws.append(exact_law(rule, instance, padded_to=instances, points=points))
            report(f"{rule.name}: {instance.name}")
        return laws

    def batch(rule: Rule) -> tuple[str, ...]:
        faults = batch_faults(rule, PLAIN_RULES[rule.name])
        report(f"{rule.name}: batches")
        return faults

    report("compiling")
    # Most of the time goes into compilation, which lets other threads run.
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        counts, laws = pool.map(count, _GRIDS), pool.map(prove, rules)
        batches = pool.map(batch, rules)
        device, libraries = jax.devices()[0], ("jax", "jaxlib", "numpy")
        kind = f" ({device.device_kind})" if device.device_kind != device.platform else ""
        return AuditReport(
            device=f"{device.platform}{kind}",
            versions={
                "jaxspec": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in libraries},
            },
            grids=dict(zip(_GRIDS, counts, strict=True)),
            laws=tuple(itertools.chain.from_iterable(laws)),
            batches={rule.name: faults for rule, faults in zip(rules, batches, strict=True)},
        )
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt waits only for what is running


def grid_counts(name: str, num: int = 100) -> tuple[int, ...]:
    """Count a grid of `KNOWN_COUNTS` over num x num draws, by the drafted tokens in base V.

    >>> grid_counts("single_path")
    (2500, 7500)
    """
    rule, instance, *axes = _GRIDS[name]
    played = make_round(RULES[rule], instance)
    places = [jnp.array([played.axes.index(axis) for axis in names]) for names in axes]
    depth = played.world.tree.max_depth

    def outcome(u: jax.Array) -> jax.Array:
        draws = jnp.full(len(played.axes), 0.5, jnp.float32)
        for place, value in zip(places, u, strict=True):
            draws = draws.at[place].set(value)
        tokens = played.play(played.world, draws).verdict.tokens[:depth]
        return jnp.sum(tokens * instance.vocab ** jnp.arange(depth)[::-1], dtype=jnp.int32)

    counts = count_outcomes(outcome, (num, num), instance.vocab**depth)
    return tuple(counts.tolist())
