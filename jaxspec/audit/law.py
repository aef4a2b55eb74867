"""The exact law of one round, compared with the target's."""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.audit.boxes import Cells, search
from jaxspec.audit.instances import Instance
from jaxspec.audit.rounds import DraftLength, DrawSiblings, MakeRows, make_round
from jaxspec.checks import Progress, assert_kind
from jaxspec.transfers import moves_data
from jaxspec.verify import Rule, Verifier
from jaxspec.verify.rules import assert_rule


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
      known_accepted: what it must be, if that is known.
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
    text: np.ndarray = dataclasses.field(repr=False)
    target_text: np.ndarray = dataclasses.field(repr=False)
    cells: Cells

    @property
    def is_proved(self) -> bool:
        """Whether the rule is lossless here: certified, within 1e-6, nothing impossible."""
        known = self.expected_accepted if self.known_accepted is None else self.known_accepted
        is_whole = abs(self.total_mass - 1) <= 1e-9 and self.cells.misses == 0
        errors = (self.tv, self.flagged, abs(self.expected_accepted - known))
        return is_whole and self.impossible == 0 and all(error <= 1e-6 for error in errors)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, without arrays, as one object."""
        fields = vars(self) | vars(self.cells) | {"cells": len(self.cells.low)}
        fields["proved"] = self.is_proved
        return {k: v for k, v in fields.items() if isinstance(v, str | float | int | None)}


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
    dtype: DTypeLike = jnp.float32,
    padded_to: Iterable[Instance] = (),
    batch: int = 256,
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
        a custom `RowSource`; default the rows as they are.
      tests_deepest_first: in which order `verify` reads its accept draws, from the deepest candidate
        back or from the root; default the rule's. The search follows it: in the wrong order it
        overlooks edges, and finds a lossless verifier biased.
      dtype: what the rows are stored in. The mass of a row in half precision is not 1; its law, by
        which a token is drawn and by which the text is judged, is row / sum(row).
      padded_to: instances to share a compiled program with: sizes are padded to fit all of them. An
        instance whose draft runs out of support needs a vocabulary as large as theirs.
      batch: see `search`; 4096 is up to three times as fast for millions of evaluations.
      progress: see `search`.

    Returns:
      The `Law`. Each edge is known to 2^-24, so total variations of a few 1e-8 are those of float32.

    Raises:
      ValueError: `num_drafted` is given for point masses, which are not drawn.

    >>> import jaxspec as js
    >>> coin = Instance("coin", {(): (0.25, 0.75)}, {(): (0.5, 0.5)}, branching=(1,))
    >>> law = exact_law(js.RULES["token"], coin, js.verify_block)
    >>> law.is_proved, round(law.expected_accepted, 6)
    (True, 0.75)
    """
    assert_rule("rule", rule)
    assert_kind("instance", instance, Instance, "an Instance, such as one of instances_for(rule)")
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
        cells = search(played.play, world, len(played.axes), order, batch=batch, progress=progress)
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
    known = instance.expected_accepted.get(rule.name)
    return Law(
        rule=rule.name,
        case=instance.name,
        tv=float(np.abs(text - target).sum() / 2),
        impossible=float(impossible),
        flagged=float(np.sum(cells.mass * (verdict.status != 0))),
        total_mass=float(cells.mass.sum()),
        expected_accepted=float(np.sum(cells.mass * verdict.num_accepted)),
        known_accepted=None if known is None else float(known),
        text=text,
        target_text=target,
        cells=cells,
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
        rows = table[places].astype(np.float64)
        law = law[..., None] * (rows / rows.sum(axis=-1, keepdims=True))
        places = places[..., None] * vocab + np.arange(vocab) + 1
    return law
