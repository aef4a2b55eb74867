"""The exact law of one round, compared with the target's."""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.audit.boxes import TOLERANCE, Cells, search
from jaxspec.audit.choices import exact_outcomes
from jaxspec.audit.instances import Instance, laws_of
from jaxspec.audit.reference import PLAIN_RULES, PlainRule, plain_program
from jaxspec.audit.rounds import DraftLength, DrawSiblings, MakeRows, make_round
from jaxspec.audit.statistics import total_variation
from jaxspec.audit.verdicts import field_faults, outcome_law, replay_faults
from jaxspec.checks import Progress, assert_function, assert_kind
from jaxspec.transfers import moves_data
from jaxspec.verify import Rule, Verifier
from jaxspec.verify.rules import assert_rule

_REPLAYS = 256
"""Random draws at which verdicts are compared with the plain rule's."""


@dataclasses.dataclass(frozen=True)
class Law:
    """The exact law of one round of a rule in an instance, compared with the target's.

    Attributes:
      rule: name of the rule.
      case: name of the instance.
      tv: total variation between the law of the text (the round's tokens completed by the target
        to D + 1) and the target's joint law.
      impossible: total mass of rounds that emit text of target mass 0. A `<=` instead of `<` shows
        here alone, as a mass of 2^-24.
      flagged: mass of rounds whose status is not clean.
      total_mass: of all boxes.
      expected_accepted: mean number of accepted tokens.
      known_accepted: what it must be: that of the plain rule, None if there is none.
      verdict_tv: total variation between the law of accepted nodes and emitted tokens and that of the
        plain rule; None if there is none. A lossless rule in another's place shows here.
      details: what the fields of the verdicts, the law of the text and that of the verdict show, in
        words, where they are wrong.
      text: float64 [V] * (D + 1), the law of the text.
      target_text: float64 [V] * (D + 1), the target's joint law.
      cells: the partition; its outcomes are the `drafted` candidates [M, N] and the `verdict`s.
    """

    rule: str
    case: str
    tv: float
    impossible: float
    flagged: float
    total_mass: float
    expected_accepted: float
    known_accepted: float | None
    verdict_tv: float | None
    details: tuple[str, ...]
    text: np.ndarray = dataclasses.field(repr=False)
    target_text: np.ndarray = dataclasses.field(repr=False)
    cells: Cells

    @property
    def failures(self) -> tuple[str, ...]:
        """Say which checks failed, where and by how much; empty if the rule is proved here."""
        known = self.expected_accepted if self.known_accepted is None else self.known_accepted
        checks = {
            f"the boxes have mass {self.total_mass!r}": abs(self.total_mass - 1) > 1e-9,
            f"{self.cells.misses} of {self.cells.replays} replays are not as their box: an interval "
            "of draws between the edges has another outcome, or draws are read in another order": (
                self.cells.misses > 0
            ),
            f"total variation {self.tv:.1e} from the target's law": self.tv > TOLERANCE,
            f"text of target probability 0 with probability {self.impossible:.1e}": (
                self.impossible > 0
            ),
            f"a status that is not 0 with probability {self.flagged:.1e}": (
                self.flagged > TOLERANCE
            ),
            f"accepts {self.expected_accepted:.6f} tokens a round, the rule {known:.6f}": (
                abs(self.expected_accepted - known) > TOLERANCE
            ),
            f"total variation {self.verdict_tv or 0:.1e} from the rule's law of verdicts": (
                (self.verdict_tv or 0) > TOLERANCE
            ),
        }
        return (*(what for what, is_wrong in checks.items() if is_wrong), *self.details)

    @property
    def is_proved(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, without arrays, as one object."""
        fields = vars(self) | vars(self.cells) | {"cells": len(self.cells.low)}
        fields |= {"proved": self.is_proved, "uncertified": self.cells.uncertified}
        plain = {k: v for k, v in fields.items() if isinstance(v, str | float | int | None)}
        return plain | {"failures": list(self.failures)}


@moves_data
def exact_law(
    rule: Rule,
    instance: Instance,
    verify: Verifier | None = None,
    draw: DrawSiblings | None = None,
    *,
    num_drafted: DraftLength | None = None,
    rows: MakeRows | None = None,
    tests_deepest_first: bool | None = None,
    reference: PlainRule | None = None,
    dtype: DTypeLike | None = None,
    padded_to: Iterable[Instance] = (),
    batch: int = 256,
    points: int = 2**12,
    progress: Progress | None = None,
) -> Law:
    """Compute the exact law of one round, draft draws included, from the public jitted verifier.

    `draw` and `num_drafted` are where the choices of a draft are tested: whether it may stop, drop,
    sort or merge candidates as it does. A draft may depend on tokens drawn before, never on the token
    that it decides about; see `jaxspec.draft.Drafter`.

    The draws are searched lazily if possible: candidates that the verifier did not read, by its
    `stop_node`, are left out. If the certificate shows misses, they are searched again in full.

    Args:
      rule: which verifier, and how candidates are drawn; one of `jaxspec.RULES` or a custom `Rule`.
      instance: where it is played.
      verify: another verifier of the same arguments, audited instead of the rule's.
      draw: another way to draw siblings, (pairs [C, 2], draft row [V]) -> tokens [C], audited instead
        of the proposal's.
      num_drafted: how many of the drawn candidates are proposed, for a draft that stops by looking at
        them: (tokens [N - 1], draft rows of their parents [N - 1, V]) -> int32 []; default all.
      rows: makes a row source of dense rows of probabilities [N, V], for target and draft, to audit
        a custom `RowSource`; default the rows as they are stored, logits if the instance has settings.
      tests_deepest_first: in which order `verify` reads its accept draws, from the deepest candidate
        back or from the root; default the rule's. The search follows it: in the wrong order it
        overlooks edges, and finds a lossless verifier biased.
      reference: the plain rule that verdicts are compared with; default that of the rule's name,
        unless `draw` or `num_drafted` replace the kind's way to draw. Without one, for a custom
        rule, only the law of the text and the fields of the verdicts are checked.
      dtype: what the rows are stored in, instead of the instance's.
      padded_to: instances to share a compiled program with: sizes are padded to fit all of them, save
        those that cannot share one: with other settings or dtype, above one tile of tokens or not.
      batch: see `search`; 4096 is up to three times as fast for millions of evaluations.
      points: see `search`: what other outcome hides in a volume of 14 / points of all draws is not
        seen with a probability of 1e-6.
      progress: see `search`.

    Returns:
      The `Law`. Each edge is known to 2^-24, so total variations of a few 1e-8 are those of float32.

    Raises:
      ValueError: an argument is no function that JAX can trace, or `num_drafted` is given for point
        masses, which are not drawn.

    >>> import jaxspec as js
    >>> coin = Instance("coin", {(): (0.25, 0.75)}, {(): (0.5, 0.5)}, branching=(1,))
    >>> law = exact_law(js.RULES["token"], coin, js.verify_block)
    >>> law.is_proved, round(law.expected_accepted, 6)
    (True, 0.75)
    """
    assert_rule("rule", rule)
    assert_kind("instance", instance, Instance, "an Instance, such as one of instances_for(rule)")
    functions = {"verify": verify, "draw": draw, "num_drafted": num_drafted, "rows": rows}
    for name, function in functions.items():
        if function is not None:
            which = "such as jaxspec.verify_path" if name == "verify" else "or None"
            assert_function(name, function, f"a function that JAX can trace, {which}")
    played = make_round(
        rule,
        instance,
        verify=verify,
        draw=draw,
        num_drafted=num_drafted,
        rows=rows,
        tests_deepest_first=tests_deepest_first,
        dtype=dtype,
        padded_to=padded_to,
    )
    worlds = [(played.world, played.causal_order)]
    if played.lazy_order is not None:
        worlds = [(replace(played.world, lazy=jnp.bool_(True)), played.lazy_order), *worlds]
    for world, order in worlds:
        try:
            cells = search(
                played.play,
                world,
                len(played.axes),
                order,
                batch=batch,
                points=points,
                progress=progress,
            )
        except jax.errors.JAXTypeError as error:
            given = [name for name, function in functions.items() if function is not None]
            raise ValueError(
                f"JAX cannot trace {' or '.join(given) or 'the rule'} (cause below): a verifier that "
                "is no JAX function is audited by jaxspec.audit.check_lossless"
            ) from error
        if not cells.misses:
            break
    verdict = cells.outcomes.verdict
    table, length = np.asarray(played.world.target), played.world.tree.max_depth + 1
    target = law_of_text(table, length)
    text = np.zeros_like(target)
    impossible = 0.0
    for mass, tokens, count in zip(cells.mass, verdict.tokens, verdict.num_tokens, strict=True):
        emitted = tuple(int(token) for token in tokens[:count])
        if min(emitted, default=0) < 0 or max(emitted, default=0) >= table.shape[1]:
            impossible += mass
            continue
        if target[emitted].sum() == 0:
            impossible += mass
        text[emitted] += mass * law_of_text(table, length, emitted)
    details = field_faults(played, cells)
    tv = float(np.abs(text - target).sum() / 2)
    if tv > TOLERANCE:
        details.append(_first_difference(text, target))
    known = verdict_tv = None
    if reference is None and draw is None and num_drafted is None:
        reference = PLAIN_RULES.get(rule.name)
    if reference is not None:
        program = plain_program(
            reference,
            rule.proposal,
            played.world.tree,
            *(laws_of(np.asarray(rows)) for rows in (played.world.target, played.world.draft)),
            bonus=instance.bonus,
        )
        wanted, found = exact_outcomes(program), outcome_law(cells)
        known = sum(mass * outcome.num_accepted for outcome, mass in wanted.items())
        verdict_tv = total_variation(found, wanted)
        if verdict_tv > TOLERANCE:
            most = max(
                {*found, *wanted},
                key=lambda each: abs(found.get(each, 0.0) - wanted.get(each, 0.0)),
            )
            details.append(
                f"accepted nodes {list(most.path[1:])} and tokens {list(most.tokens)} have "
                f"probability {found.get(most, 0.0):.6f}, by the rule {wanted.get(most, 0.0):.6f}"
            )
        if verify is None:  # another verifier may read its draws in another way
            wrong, where = replay_faults(played, program, _REPLAYS, batch=batch)
            if wrong:
                details.append(f"{wrong} of {_REPLAYS} rounds read other draws: {where}")
    return Law(
        rule=rule.name,
        case=instance.name,
        tv=tv,
        impossible=float(impossible),
        flagged=float(np.sum(cells.mass * (verdict.status != 0))),
        total_mass=float(cells.mass.sum()),
        expected_accepted=float(np.sum(cells.mass * verdict.num_accepted)),
        known_accepted=known,
        verdict_tv=verdict_tv,
        details=tuple(details),
        text=text,
        target_text=target,
        cells=cells,
    )


def _first_difference(text: np.ndarray, target: np.ndarray) -> str:
    """Say at which token the law of a text first differs, and for which token most."""
    for position in range(text.ndim):
        rest = tuple(range(position + 1, text.ndim))
        found, wanted = text.sum(axis=rest), target.sum(axis=rest)
        if np.abs(found - wanted).sum() / 2 > TOLERANCE / 2 or position == text.ndim - 1:
            break
    most = np.unravel_index(np.argmax(np.abs(found - wanted)), found.shape)
    before, token = [int(x) for x in most[:-1]], int(most[-1])
    after = f" after {before}" if before else ""
    return (
        f"emitted token {position}{after}: token {token} has probability {found[most]:.6f}, by the "
        f"target {wanted[most]:.6f}"
    )


def law_of_text(table: np.ndarray, length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Return the law of what follows a prefix up to `length` tokens, float64 [V] * (the rest).

    Args:
      table: float [contexts, V], rows as they are stored, as `World.target`. The law of each is
        row / sum(row), in float64.
      length: of the text, the prefix included.
      prefix: tokens of the text.
    """
    vocab = table.shape[1]
    places = np.array(functools.reduce(lambda place, token: place * vocab + token + 1, prefix, 0))
    law = np.array(1.0)
    for _ in range(length - len(prefix)):
        law = law[..., None] * laws_of(table[places])
        places = places[..., None] * vocab + np.arange(vocab) + 1
    return law
