"""The exact law of what the compiled loop emits: its own program, a round at a time, on given draws.

One round of the loop is a function of a state and of uniforms. Its draws are cut into boxes of one
outcome by `search`, and each outcome is a state that the next round starts from. Two states are one
only if everything that the loop reads of them is equal, bit for bit, stale slots of the caches
included: what a rejected candidate leaves behind shows in the law if a later round sees it.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.audit.boxes import UNITS, Play, replay, search
from jaxspec.audit.rounds import causal_nodes, draws_of
from jaxspec.decode import BatchState, CompiledDecoder, Ending
from jaxspec.draws import RoundDraws
from jaxspec.models.provider import Context
from jaxspec.proposals import PointMass

_TOGETHER = 16
"""States whose next round is searched in one go."""

_READ = ("tokens", "length", "depth", "ending", "sampling", "target_cache", "draft_cache")
"""What the loop reads of a state, and changes in a round."""


class Texts(NamedTuple):
    """The law of the texts, and how it was found."""

    law: dict[Context, float]
    searches: int
    misses: int


class _Reached(NamedTuple):
    """A state, and the probability of coming to it."""

    mass: float
    state: BatchState


def law_of_texts(
    decoder: CompiledDecoder,
    start: BatchState,
    *,
    batch: int,
    report: Callable[[int, str], None],
) -> Texts:
    """Compute the law of all that a decoder emits from the start of one text on.

    Args:
      decoder: its draws are replaced.
      start: a batch of one.
      batch: evaluations in one call of the compiled program, which is the only one.
      report: called as report(tokens done, what).
    """
    play, nodes = _round_of(decoder), decoder.drafter.capacity.max_nodes
    is_sampled = decoder.drafter.rule.proposal is not PointMass
    num_drafted = nodes - 1 if is_sampled else 0
    num_axes = 1 + num_drafted + nodes
    prompt = int(start.prompt_length[0])
    # No round at first: the prompt is read.
    world = _world([start], 0)
    read = replay(play, world, np.zeros((1, num_axes), np.float32), batch=batch)
    start = dataclasses.replace(start, prefilled=jnp.int32(prompt))
    pending = [_Reached(1.0, _state_of(start, jax.tree.map(lambda leaf: leaf[0], read[1])))]
    law: dict[Context, float] = defaultdict(float)
    searches = misses = 0
    while pending:
        found: dict[bytes, _Reached] = {}
        done = min(int(each.state.length[0]) for each in pending) - prompt
        for first in range(0, len(pending), _TOGETHER):
            report(done, f"{len(pending):,} states, {searches:,} rounds")
            some = pending[first : first + _TOGETHER]
            order = _tested(decoder, [each.state for each in some])
            drafted = list(range(1, 1 + num_drafted))
            causal = [0, *drafted, *(num_drafted + node for node in order), num_axes - 1]
            world = _world([each.state for each in some], 1)
            cells = search(play, world, num_axes, causal, batch=batch)
            volumes = np.prod((cells.high - cells.low)[:, 1:] / UNITS, axis=1)
            searches, misses = searches + len(some), misses + cells.misses
            for cell, volume in enumerate(volumes.tolist()):
                number, words = jax.tree.map(lambda leaf, cell=cell: leaf[cell], cells.outcomes)
                content = b"".join(leaf.tobytes() for leaf in jax.tree.leaves(words))
                mass = volume * some[int(number)].mass
                if content in found:
                    mass += found[content].mass
                    found[content] = found[content]._replace(mass=mass)
                else:
                    found[content] = _Reached(mass, _state_of(start, words))
        for each in found.values():
            if int(each.state.ending[0]) != Ending.NONE:
                text = np.asarray(each.state.tokens[0, prompt : int(each.state.length[0])])
                law[tuple(text.tolist())] += each.mass
        pending = [each for each in found.values() if int(each.state.ending[0]) == Ending.NONE]
    return Texts(dict(law), searches, misses)


def _tested(decoder: CompiledDecoder, states: Sequence[BatchState]) -> list[int]:
    """List the nodes in the order in which their accept draws can first matter."""
    nodes, rule = decoder.drafter.capacity.max_nodes, decoder.drafter.rule
    if not rule.tests_deepest_first:
        return list(range(1, nodes))  # level by level, as they are numbered
    if rule.is_path:
        return list(range(nodes - 1, 0, -1))
    # Budgets cut trees; the order of the largest is that of all.
    arrays = [jax.tree.map(jnp.asarray, state) for state in states]
    trees = [jax.device_get(decoder.decide(state)[1].tree) for state in arrays]
    largest = max(trees, key=lambda tree: int(tree.level_sizes.sum()))
    tested = causal_nodes(jax.tree.map(lambda x: x[0], largest), deepest_first=True)
    return [*tested, *(node for node in range(1, nodes) if node not in tested)]


def _world(states: Sequence[BatchState], rounds: int) -> tuple[BatchState, jax.Array, jax.Array]:
    """Stack states, padded to one number of them: what `search` hands to the function."""
    padded = [*states, *[states[-1]] * (_TOGETHER - len(states))]

    def stack(*leaves: Any) -> jax.Array:
        if jax.dtypes.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
            return jnp.stack(leaves)
        return jnp.asarray(np.stack([np.asarray(leaf) for leaf in leaves]))

    return jax.tree.map(stack, *padded), jnp.float32(len(states)), jnp.int32(rounds)


@functools.lru_cache(maxsize=16)
def _round_of(decoder: CompiledDecoder) -> Play:
    """Make the function of uniforms that runs a round of one of several states.

    It returns which of them it was, and what the loop reads of the state after it, as words.
    """
    nodes = decoder.drafter.capacity.max_nodes
    is_sampled = decoder.drafter.rule.proposal is not PointMass
    params = decoder.target.params, decoder.drafter.params

    def play(world: Any, u: jax.Array) -> tuple[jax.Array, Any]:
        stacked, count, rounds = world
        number = jnp.minimum(u[0] * count, count - 1).astype(jnp.int32)
        state = jax.tree.map(lambda leaf: leaf[number], stacked)
        inside = jnp.zeros(nodes, jnp.float32)
        if is_sampled:
            inside = inside.at[1:].set(u[1:nodes])
        pairs = jnp.stack([jnp.full(nodes, 0.5, jnp.float32), inside], axis=1)
        draws = RoundDraws(draft=pairs, verify=draws_of(u[-nodes:-1], u[-1:]))
        given = dataclasses.replace(decoder, draws=lambda *_: draws)
        after = given.loop(*params, state, rounds)
        return number, jax.tree.map(_words, [getattr(after, name) for name in _READ])

    return play


def _words(leaf: jax.Array) -> jax.Array:
    """Return the bits of an array as int32."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.int32)
    return lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.int32)


def _state_of(like: BatchState, words: Any) -> BatchState:
    """Return a state of which the words of a round are known; its counters are those of `like`."""

    def array(leaf: jax.Array, word: np.ndarray) -> np.ndarray:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return (word.view(np.float32) if is_float else word).astype(leaf.dtype)

    given = [getattr(like, name) for name in _READ]
    fields: dict[str, Any] = dict(zip(_READ, jax.tree.map(array, given, words), strict=True))
    return dataclasses.replace(like, **fields)
