"""Two rounds in a row as one function of uniforms, and the law of the text that they leave.

A fault of one round shows in the law of one round. Draws that are read again in a later round show
only here.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.instances import RowsByContext
from jaxspec.audit.law import law_of_text
from jaxspec.audit.rounds import Outcome, Round, World, make_round

LENGTH = 3
"""Tokens of the text whose law is computed. A round may emit fewer; the target completes the text."""

Play = Callable[[Any, jax.Array], Outcome]
Text = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TwoRounds:
    """A function of uniforms to be searched.

    Attributes:
      play: maps (world, float32 [K]) to the outcomes of several rounds, with a leading axis.
      world: rows by context, deep enough for the second round.
      num_axes: K.
      causal_order: the axes in the order in which they can first matter.
      text: maps the tokens [rounds, D + 1] of what was played to the text of two rounds.
    """

    play: Play
    world: World
    num_axes: int
    causal_order: tuple[int, ...]
    text: Callable[[np.ndarray], Text]

    def search(self, batch: int = 128) -> audit.Cells:
        return audit.search(self.play, self.world, self.num_axes, self.causal_order, batch=batch)

    def total_variation(self, cells: audit.Cells) -> float:
        """Return how far the law of the first `LENGTH` tokens is from the target's joint law."""
        target = law_of_text(np.asarray(self.world.target), LENGTH)
        law = np.zeros_like(target)
        for mass, tokens in zip(cells.mass, cells.outcomes.verdict.tokens, strict=True):
            start = self.text(tokens)[:LENGTH]
            law[start] += mass * target[start] / target[start].sum()
        return float(np.abs(law - target).sum() / 2)


def two_rounds(rule: js.Rule, instance: audit.Instance) -> TwoRounds:
    """Play two rounds, each with separate draws, the second after what the first emitted."""
    one = make_round(rule, instance)
    num_axes = len(one.axes)
    return TwoRounds(
        play=_in_turn(one.play),
        world=_deepened(one, instance),
        num_axes=2 * num_axes,
        causal_order=(*one.causal_order, *(num_axes + axis for axis in one.causal_order)),
        text=lambda tokens: (*_emitted(tokens[0]), *_emitted(tokens[1])),
    )


def keyed_by_position(
    rule: js.Rule, instance: audit.Instance, verify: Callable[..., js.Verdict] | None = None
) -> TwoRounds:
    """Play two rounds of a path whose draws belong to positions of the text, as if that were safe.

    The draft and accept draws of a position serve whichever round drafts a token for it: what a
    rejected round has looked at, the next one reads again. For the search to see every edge, the
    second round is played after each text that the first could leave, and the axes are ordered as
    the tests are, over the whole text. Binary residuals and no bonus: the final draw decides
    nothing.
    """
    one = make_round(rule, instance, verify=verify)
    drafted, vocab = one.world.tree.max_depth, instance.vocab
    roots = [root for n in range(LENGTH) for root in itertools.product(range(vocab), repeat=n)]
    positions = drafted + LENGTH - 1
    accepts = list(range(positions, 2 * positions))
    if rule.tests_deepest_first:
        accepts.reverse()

    def text(tokens: np.ndarray) -> Text:
        first = _emitted(tokens[0])
        return (*first, *(_emitted(tokens[roots.index(first)]) if first in roots else ()))

    return TwoRounds(
        play=_after_all(one.play, tuple(map(len, roots)), drafted),
        world=_deepened(one, instance),
        num_axes=2 * positions,
        causal_order=(*range(positions), *accepts),
        text=text,
    )


@functools.cache
def _in_turn(play_one: Play) -> Play:
    def play(world: World, u: jax.Array) -> Outcome:
        def step(place: jax.Array, u: jax.Array) -> tuple[jax.Array, Outcome]:
            outcome = play_one(_seen_from(world, place), u)
            return _extend(place, outcome.verdict, world.target.shape[1]), outcome

        return lax.scan(step, jnp.int32(0), u.reshape(2, -1))[1]

    return play


@functools.cache
def _after_all(play_one: Play, root_positions: tuple[int, ...], drafted: int) -> Play:
    def play(world: World, u: jax.Array) -> Outcome:
        draft, accept = u.reshape(2, -1)

        def from_root(place: jax.Array, position: jax.Array) -> Outcome:
            mine = [lax.dynamic_slice_in_dim(x, position, drafted) for x in (draft, accept)]
            return play_one(_seen_from(world, place), jnp.concatenate([*mine, jnp.full(1, 0.5)]))

        return jax.vmap(from_root)(jnp.arange(len(root_positions)), jnp.array(root_positions))

    return play


def _deepened(one: Round, instance: audit.Instance) -> World:
    """Lay rows out deep enough for a round after any text: child x of context i is i V + x + 1."""
    contexts = [
        context
        for length in range(LENGTH + one.world.tree.max_depth + 1)
        for context in itertools.product(range(instance.vocab), repeat=length)
    ]

    def table(rows: RowsByContext) -> jax.Array:
        return jnp.array([[float(x) for x in rows.get(c, rows[()])] for c in contexts], jnp.float32)

    target, draft = table(instance.target), table(instance.draft or instance.target)
    return _with_rows(one.world, target, draft)


def _seen_from(world: World, place: jax.Array) -> World:
    """Take a context for the root of the next round."""
    vocab = world.target.shape[1]
    child = jnp.arange(1, vocab + 1)[None]
    levels = [place[None]]
    for _ in range(world.tree.max_depth):
        levels.append((levels[-1][:, None] * vocab + child).reshape(-1))
    below = jnp.concatenate(levels)
    return _with_rows(world, world.target[below], world.draft[below])


def _with_rows(world: World, target: jax.Array, draft: jax.Array) -> World:
    return dataclasses.replace(
        world, target=target, draft=draft, stored_target=target, stored_draft=draft
    )


def _extend(place: jax.Array, verdict: js.Verdict, vocab: int) -> jax.Array:
    """Add what a round emitted to the context it started from."""
    for slot in range(verdict.tokens.shape[0]):
        longer = place * vocab + verdict.tokens[slot] + 1
        place = jnp.where(slot < verdict.num_tokens, longer, place)
    return place


def _emitted(tokens: np.ndarray) -> Text:
    return tuple(token for token in tokens.tolist() if token >= 0)
