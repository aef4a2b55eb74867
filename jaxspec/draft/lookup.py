"""Prompt lookup: what followed an earlier occurrence of the last tokens.

The candidates follow from the text alone and are point masses, so the law of the text is the
target's for any match. A round without a match is a plain step.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checks import assert_between, assert_kind
from jaxspec.draft.base import Drafter, Proposed, View, with_ends
from jaxspec.draft.shape import MAX_NODES, Capacity
from jaxspec.models.batched import per_sequence
from jaxspec.proposals import PointMass
from jaxspec.trees import Tree, chain, tree_of_parents
from jaxspec.verify import RULES, Rule

LENGTHS: Mapping[int, int] = {5: 15, 4: 8, 3: 4}
"""Tokens to draft by length of the match."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup(Drafter):
    """A path, or a tree of several matches, copied from the text.

    The longest match is taken, among equals the latest. The copy continues beyond the end of the text
    into itself, so a text that repeats is drafted to full length.

    Attributes:
      lengths: tokens drafted by length of the match; a match longer than any key counts as one of the
        greatest key, one shorter than the least is none.
      matches: how many of the best matches to draft from; their common beginnings are merged, so
        from 2 on the candidates are a tree.
      max_nodes: most nodes of a tree, the root counted; default all that could be needed.
      rule: for point masses.

    References:
      Saxena, "Prompt Lookup Decoding", 2023.
    """

    lengths: Mapping[int, int] = dataclasses.field(default_factory=lambda: dict(LENGTHS))
    matches: int = 1
    max_nodes: int | None = None
    rule: Rule = RULES["point_mass"]

    def __post_init__(self) -> None:
        """Raise ValueError for lengths that draft nothing, or too many nodes."""
        wanted = "a mapping from the length of a match to the tokens drafted, such as {4: 8, 3: 4}"
        assert_kind("lengths", self.lengths, Mapping, wanted)
        if not self.lengths:
            raise ValueError(
                "lengths are empty: give the tokens to draft after a match of a length"
            )
        for match, drafted in self.lengths.items():
            assert_between(f"lengths are {dict(self.lengths)}: a match", match, 1, MAX_NODES)
            assert_between(f"lengths are {dict(self.lengths)}: a draft", drafted, 1, MAX_NODES - 1)
        assert_between("matches", self.matches, 1, MAX_NODES)
        if self.max_nodes is not None:
            assert_between("max_nodes, the root counted,", self.max_nodes, 2)
        if self.capacity.max_nodes > MAX_NODES:
            raise ValueError(
                f"{self.matches} matches of {max(self.lengths.values())} tokens: more than "
                f"{MAX_NODES} nodes, the most that a tree may have; give max_nodes"
            )
        super().__post_init__()

    @property
    def capacity(self) -> Capacity:
        """Room for all matches at full length, within `max_nodes`."""
        longest = max(self.lengths.values())
        wanted = 1 + self.matches * longest
        nodes = wanted if self.max_nodes is None else min(wanted, self.max_nodes)
        depth = min(longest, nodes - 1)
        return Capacity(max_nodes=nodes, max_children=self.matches, max_depth=depth)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """One for each length, besides the root alone and the whole tree."""
        return with_ends([1 + n for n in self.lengths.values()], self.capacity.max_nodes)

    def propose(self, view: View) -> Proposed:
        """Look each text up in itself."""

        def one(tokens: jax.Array, length: jax.Array, depth: jax.Array, is_stop: jax.Array) -> Tree:
            drafted, counts, at = self.find(tokens, length)
            counts = jnp.minimum(counts, depth)
            # No node is spent below a stop token.
            stops = is_stop[at]
            until = jnp.argmax(stops, axis=1).astype(jnp.int32) + 1
            counts = jnp.where(jnp.any(stops, axis=1), jnp.minimum(counts, until), counts)
            if self.matches == 1:
                size = self.capacity.max_depth
                return chain(drafted[0, :size], jnp.minimum(counts[0], size))
            return merge(drafted, counts, self.capacity)

        is_stop = view.is_stop(view.tokens)
        tree = per_sequence(one)(view.tokens, view.length, view.depth, is_stop)
        return Proposed(proposal=PointMass(tree=tree))

    def find(self, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return what followed the best matches of a text [S], the best match first.

        Returns:
          (int32 [M, D] tokens, int32 [M] how many count, int32 [M, D] their places in the text).
        """
        slots = tokens.shape[0]
        ends = jnp.arange(slots, dtype=jnp.int32)
        last = length - 1
        longest = max(self.lengths)
        matched = jnp.zeros(slots, jnp.int32)
        is_open = ends < last
        for back in range(longest):
            earlier = jnp.roll(tokens, back)  # at each end, the token `back` before it
            is_same = (earlier == tokens[jnp.maximum(last - back, 0)]) & (ends >= back)
            is_open &= is_same & (last >= back)
            matched = jnp.where(is_open, back + 1, matched)
        is_match = matched >= min(self.lengths)
        score = jnp.where(is_match, matched * slots + ends, -1)
        best, at = jax.lax.top_k(score, min(self.matches, slots))
        at = at.astype(jnp.int32)
        # A text that is followed by a copy of itself repeats with the distance to the match.
        distance = jnp.maximum(last - at, 1)
        ahead = jnp.arange(max(self.lengths.values()), dtype=jnp.int32)
        copied = jnp.clip(at[:, None] + 1 + ahead[None] % distance[:, None], 0, slots - 1)
        table = np.zeros(longest + 1, np.int32)
        for match in range(min(self.lengths), longest + 1):
            table[match] = self.lengths[max(key for key in self.lengths if key <= match)]
        counts = jnp.where(best >= 0, jnp.asarray(table)[matched[at]], 0)
        return tokens[copied], counts, copied


def merge(paths: jax.Array, counts: jax.Array, capacity: Capacity) -> Tree:
    """Merge paths from one root into a tree, each common beginning once.

    Nodes are numbered level by level, in the order of the paths; those beyond the capacity are left
    off, deepest first.

    Args:
      paths: int32 [M, D], tokens.
      counts: int32 [M], how many tokens of each path count.
      capacity: of the tree; C at least M.

    >>> paths, counts = jnp.array([[5, 7, 9], [5, 8, 9]]), jnp.array([3, 2])
    >>> capacity = Capacity(max_nodes=6, max_children=2, max_depth=3)
    >>> tree = jax.jit(merge, static_argnums=2)(paths, counts, capacity)
    >>> tree.tokens.tolist(), tree.parents.tolist()
    ([-1, 5, 7, 8, 9, -1], [-1, 0, 1, 1, 2, -1])
    """
    number, depth = paths.shape
    levels = jnp.arange(depth, dtype=jnp.int32)
    is_there = (levels[None] < counts[:, None]) & (levels < capacity.max_depth)[None]
    # Entry [m, k, d]: paths m and k agree up to depth d, where both are.
    is_same = jnp.cumprod((paths[:, None] == paths[None]).astype(jnp.int32), axis=2) > 0
    is_same &= is_there[:, None] & is_there[None]
    first = jnp.argmax(is_same, axis=1).astype(jnp.int32)  # the earliest such path k, [M, D]
    is_new = is_there & (first == jnp.arange(number, dtype=jnp.int32)[:, None])
    ranks = jnp.cumsum(is_new.T.reshape(-1), dtype=jnp.int32).reshape(depth, number).T
    node = jnp.take_along_axis(ranks, first, axis=0)  # [M, D]
    parent = jnp.concatenate([jnp.zeros((number, 1), jnp.int32), node[:, :-1]], axis=1)
    place = jnp.where(is_new, node, capacity.max_nodes)
    empty = jnp.full(capacity.max_nodes, -1, jnp.int32)
    return tree_of_parents(
        empty.at[place].set(paths, mode="drop"),
        empty.at[place].set(parent, mode="drop"),
        jnp.minimum(1 + jnp.sum(is_new, dtype=jnp.int32), capacity.max_nodes),
        max_children=capacity.max_children,
        max_depth=capacity.max_depth,
    )
