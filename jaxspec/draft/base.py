"""What a drafter is: traced functions that propose a round's candidates, for both decoding loops.

The compiled loop runs them inside its program, over its batch; the host loop runs the same functions
jitted, as a batch of one. What a drafter proposes for a sequence depends on that sequence alone.

In the shape descriptions B denotes the batch, N, C, D the capacity of a tree (nodes, children of a
node, depth), L the nodes of a level, S the slots of a text, V the target's vocabulary.
"""

import abc
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from jaxspec.checks import MOST_TOKENS, assert_between, assert_kind, struct
from jaxspec.draft.shape import MAX_NODES, Capacity
from jaxspec.models.network import LanguageModel
from jaxspec.models.provider import Provider
from jaxspec.proposals import PointMass, Proposal
from jaxspec.sampling import Sampling
from jaxspec.trees import chain
from jaxspec.verify import RULES, Rule
from jaxspec.verify.rules import assert_rule

if TYPE_CHECKING:
    from jaxspec.draft.drivers import HostDraft

Model: TypeAlias = Provider | LanguageModel
"""A draft model: a callable for the host loop, or a network for either loop."""

_NAMED = ("model", "rule")
_MODEL = "a jaxspec.models.Provider(name, vocab, ask) or a LanguageModel"


@struct
class View:
    """What a drafter may look at: what is past, and the draws of its candidates.

    Attributes:
      tokens: int32 [B, S], the texts; anything after them.
      length: int32 [B], tokens of each text; the last of them is the root of the round.
      depth: int32 [B], most levels to draft. Deeper candidates are cut off.
      pairs: float32 [B, N, 2], for each node the pair of uniforms to draw its candidate with.
      sampling: how the target's rows are sampled, and so are those of sampled candidates.
      stop_tokens: int32 [B, K], then -1; None for none. Candidates below a stop token are cut off.
      params: the drafter's `params`.
    """

    tokens: jax.Array  # [B, S]
    length: jax.Array  # [B]
    depth: jax.Array  # [B]
    pairs: jax.Array  # [B, N, 2]
    sampling: Sampling
    stop_tokens: jax.Array | None = None  # [B, K]
    params: Any = ()

    def is_stop(self, tokens: jax.Array) -> jax.Array:
        """Return which tokens, int32 [B, ...], are stop tokens of their sequences."""
        if self.stop_tokens is None:
            return jnp.zeros(tokens.shape, bool)
        flat = tokens.reshape(tokens.shape[0], -1)
        found = jnp.any(flat[:, :, None] == self.stop_tokens[:, None], axis=2) & (flat >= 0)
        return found.reshape(tokens.shape)

    @property
    def root(self) -> jax.Array:
        """Slot and position of each round's root, int32 [B]."""
        return self.length - 1

    @property
    def root_token(self) -> jax.Array:
        """The last committed token of each text, int32 [B]."""
        return jnp.take_along_axis(self.tokens, self.root[:, None], axis=1)[:, 0]


@struct
class Proposed:
    """What was proposed in a round.

    Attributes:
      proposal: the candidates of each sequence, every field with a leading B.
      is_in: bool [B, N], nodes that count; the others are cut off with what is below them. None: all.
      slots: int32 [B, N], slot of each node in the draft network's cache, counted from the root's
        slot; -1 where it has none. None if no slot has to be moved: no cache, or a path.
    """

    proposal: Proposal
    is_in: jax.Array | None = None  # [B, N]
    slots: jax.Array | None = None  # [B, N]


class Drafter(abc.ABC):
    """Proposes candidates. A drafter without a model implements `capacity` and `propose`.

    What a draft may depend on: the text stays lossless if and only if a draw is never judged by the
    token that it gave.

    - Which candidates are drafted, and how long or of which shape a draft is, may depend on the
      context and on earlier rounds.
    - For sampled candidates (`WithReplacement`, `WithoutReplacement`) it may also depend on tokens
      drafted earlier in this round: ancestors and elder siblings. So may the decision to stop after a
      drafted token, made by looking at it: drafting nothing below a stop token, or below one that the
      draft was unsure of, is exact, since the token itself stays in the draft.
    - A drawn token must never be dropped, replaced, sorted or merged by looking at its own value.
      Dropping a last token because its probability is low, or redrawing until a token is acceptable,
      changes the law: with p = (.5, .5) and q = (.9, .1), dropping what has q < .3 makes the
      probability of the first token .55.
    - Point masses took no draw: their candidates may be chosen, dropped and sorted by anything but
      the draws that verify them, which a drafter does not see.

    `audit.decoding_law` shows a violation.

    Attributes:
      kinds: the kinds of proposal that it can make.
      rule: how its proposals are verified.
      model: the model it drafts with, if any.
    """

    kinds: ClassVar[tuple[type[Proposal], ...]] = (PointMass,)
    rule: Rule = RULES["point_mass"]
    model: Model | None = None

    @property
    @abc.abstractmethod
    def capacity(self) -> Capacity:
        """Sizes of its trees."""

    @abc.abstractmethod
    def propose(self, view: View) -> Proposed:
        """Propose candidates for each sequence; traced."""

    def __post_init__(self) -> None:
        """Raise ValueError unless rule and model fit the candidates."""
        assert_rule("rule", self.rule)
        if self.rule.proposal not in self.kinds:
            raise ValueError(
                f"rule {self.rule.name!r} does not verify the candidates of this drafter"
            )
        if self.rule.is_path and not self.capacity.is_path:
            raise ValueError(f"rule {self.rule.name!r} is for paths: each node must have one child")
        if isinstance(self.model, LanguageModel) and not self.capacity.is_path:
            self.model.assert_takes_trees()

    @property
    def first_depth(self) -> int:
        """Depth to request in the first round."""
        return self.capacity.max_depth

    def next_depth(self, depth: jax.Array, accepted: jax.Array, proposed: jax.Array) -> jax.Array:
        """Return the depth to request after a round; all int32 [...], traced.

        Args:
          depth: the depth that was requested for it.
          accepted: tokens of its accepted path.
          proposed: the depth that it proposed, which budgets may have capped.

        A custom one that returns no integers is a ValueError; negative depths count as 0.
        """
        del accepted, proposed
        return depth

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes to compile the target's forward for, rising to N; the smallest fit is run."""
        return with_ends((), self.capacity.max_nodes)

    @property
    def spare_slots(self) -> int:
        """Most cache slots that the draft network writes from the root of a round on."""
        return 0

    @property
    def params(self) -> Any:
        """Arrays given to the compiled program: parameters of a network, or tables."""
        return self.model.params if isinstance(self.model, LanguageModel) else ()

    def validate(self, vocab: int) -> None:
        """Raise ValueError unless this drafter can draft for a target with `vocab` tokens."""
        assert_between("the target's vocabulary", vocab, 1)
        name = type(self).__name__
        assert_rule(f"the rule of {name}", self.rule)
        wanted = "a Capacity(max_nodes, max_children, max_depth)"
        assert_kind(f"the capacity of {name}", self.capacity, Capacity, wanted)
        for field, least in zip(Capacity._fields, (1, 1, 0), strict=True):
            assert_between(f"{field} of {name}", getattr(self.capacity, field), least, MAX_NODES)
        assert_between(f"first_depth of {name}", self.first_depth, 0, MAX_NODES)
        assert_between(f"spare_slots of {name}", self.spare_slots, 0, MOST_TOKENS)
        sizes = list(self.block_sizes)
        if sizes != sorted(set(sizes)) or sizes[-1:] != [self.capacity.max_nodes] or sizes[0] < 1:
            raise ValueError(
                f"block_sizes of {name} are {sizes}: must rise from 1 or more, and end with "
                f"max_nodes, {self.capacity.max_nodes}"
            )
        if self.model is not None:
            assert_kind(f"the model of {name}", self.model, Model, _MODEL)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-serializable description; two drafters of one description draft alike."""
        words = re.sub(r"(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()
        draft = {} if self.model is None else {"draft": self.model.name}
        plain = {name: _plain(each) for name, each in _fields(self).items()}
        return {"drafter": words, **plain, **draft, "rule": self.rule.name}

    def draft(
        self,
        context: Sequence[int],
        *,
        depth: int | None = None,
        pairs: jax.Array | None = None,
        stop_tokens: Collection[int] = (),
    ) -> "HostDraft":
        """Draft after one context, outside of a decoding loop.

        Args:
          context: token ids, at least one; the last is the root.
          depth: most levels; default `first_depth`.
          pairs: float32 [N, 2] in [0, 1), for each node the pair of uniforms to draw its candidate
            with; needed where candidates are sampled (`jaxspec.round_draws` makes them).
          stop_tokens: tokens below which nothing is drafted.

        Returns:
          The candidates, and what was asked of the model.

        Raises:
          ValueError: an argument is invalid, or the model is not a `Provider`.
          RowError: the model's answer is invalid.

        >>> from jaxspec.draft import FixedTree
        >>> toy = Provider("toy", vocab=3, ask=lambda context: [0.25, 0.75, 0.0])
        >>> found = FixedTree(toy, (2, 1)).draft([2])
        >>> found.proposal.tree.tokens.tolist(), found.usage
        ([2, 1, 0, 1, 1], Usage(queries=3, calls=3))
        """
        from jaxspec.draft.drivers import propose_on_host

        if pairs is None:
            if self.rule.proposal is not PointMass:
                raise ValueError(
                    "pairs are needed to sample: draws of jaxspec.round_draws(...).draft"
                )
            pairs = jnp.zeros((self.capacity.max_nodes, 2), jnp.float32)
        depth = self.first_depth if depth is None else depth
        return propose_on_host(self, context, depth, pairs, stop_tokens=stop_tokens)


@struct
class Asked:
    """Nodes that a model is asked about: a block of a network, or one call of a callable.

    Attributes:
      tokens: int32 [B, L].
      depths: int32 [B, L].
      seen: bool [B, L, M], which slots each node sees, counted from the root's slot: its ancestors,
        whose slots are smaller, and itself.
      offset: int32 [] or [B], slot of the first of these nodes; the others follow it.
    """

    tokens: jax.Array  # [B, L]
    depths: jax.Array  # [B, L]
    seen: jax.Array  # [B, L, M]
    offset: jax.Array | int  # [] or [B]


class ModelDrafter(Drafter):
    """A drafter that asks a model level by level: step functions that both drivers run.

    The state of `start` is grown from the row of the root (level 0), then from the rows of the nodes
    that `ask` names (levels 1, 2, ... while `is_read` marks any, `capacity.max_depth` levels in all).

    Attributes:
      model: a callable, or a network.
      is_unrolled: whether `level` is a Python int and each level has its own sizes. Otherwise it is
        an int32 array, and all levels but the root's have the same sizes.
    """

    is_unrolled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError unless rule and model fit the candidates."""
        assert_kind("model", self.model, Model, _MODEL)
        super().__post_init__()

    @abc.abstractmethod
    def start(self, view: View, vocab: int) -> Any:
        """Return the state before level 0: a pytree of arrays with a leading B."""

    @abc.abstractmethod
    def grow(self, level: Any, state: Any, rows: jax.Array, view: View) -> Any:
        """Return the state with the candidates below a level.

        Args:
          level: depth of the nodes whose rows are given.
          state: as `start` and earlier levels left it.
          rows: float32 [B, L, V], probabilities after each node: at the target's settings where
            candidates are sampled. Rows that are not read may hold anything.
          view: what is past.
        """

    @abc.abstractmethod
    def ask(self, level: Any, state: Any, view: View) -> Asked:
        """Return the nodes of a level, at least 1, whose rows `grow` takes."""

    @abc.abstractmethod
    def is_read(self, level: Any, state: Any, view: View) -> jax.Array:
        """Return which of their rows are used, bool [B, L]: a callable is asked for no others."""

    @abc.abstractmethod
    def finish(self, state: Any, view: View) -> Proposed:
        """Return what is proposed."""

    def propose(self, view: View) -> Proposed:
        """Raise TypeError: the drivers run the step functions instead."""
        raise TypeError(
            f"{type(self).__name__} asks a model: use propose_compiled or propose_on_host"
        )


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
    """Plain autoregressive decoding: each round emits one token of the target's row."""

    @property
    def capacity(self) -> Capacity:
        """The root alone."""
        return Capacity(max_nodes=1, max_children=1, max_depth=0)

    def propose(self, view: View) -> Proposed:
        """Propose nothing."""
        empty = jnp.zeros((view.length.shape[0], 0), jnp.int32)
        return Proposed(proposal=PointMass(tree=jax.vmap(chain)(empty)))


def with_ends(sizes: Collection[int], nodes: int) -> tuple[int, ...]:
    """Return the block sizes below N, with the root alone and N."""
    return tuple(sorted({size for size in sizes if 1 <= size < nodes} | {1, nodes}))


def every_node(view: View, capacity: Capacity) -> jax.Array:
    """Return the slots of trees whose nodes are in the cache in their own order, int32 [B, N]."""
    nodes = jnp.arange(capacity.max_nodes, dtype=jnp.int32)
    return jnp.tile(nodes, (view.length.shape[0], 1))


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, except models and rules, which are described by name."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {each.name: getattr(value, each.name) for each in fields if each.name not in _NAMED}


def _plain(value: Any) -> Any:
    """Return a field of a drafter in JSON's types."""
    if isinstance(value, Mapping):
        return [[int(key), int(each)] for key, each in sorted(value.items())]
    if dataclasses.is_dataclass(value):
        return {name: _plain(each) for name, each in _fields(value).items()}
    return list(value) if isinstance(value, tuple) else value
