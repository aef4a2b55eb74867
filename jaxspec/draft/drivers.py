"""The two drivers of a drafter: in the compiled loop by a network's cache, on the host by a callable.

Both run the drafter's own step functions; they differ only in where rows come from. A callable is
asked about each distinct context once, a level in one call if it is batched, and only for rows that
are read.

In the shape descriptions B denotes the batch, N the nodes of a tree, V the target's vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.checks import MOST_TOKENS, assert_between, assert_kind, described
from jaxspec.draft.base import Asked, Drafter, ModelDrafter, Proposed, View
from jaxspec.draft.cut import cut_below, node_rows
from jaxspec.models.batched import BatchedNetwork, per_sequence
from jaxspec.models.network import Cache
from jaxspec.models.provider import Context, Provider, Usage, check_context
from jaxspec.proposals import PointMass, Proposal
from jaxspec.rows import Probabilities, as_source, dense_rows, row_of, window
from jaxspec.sampling import Sampling
from jaxspec.transfers import moves_data
from jaxspec.values import token_ids

_SHORTEST = 64
"""Texts on the host are padded to this length, or to a greater power of two."""


def propose_compiled(
    drafter: Drafter, params: Any, network: BatchedNetwork | None, cache: Cache, view: View
) -> tuple[Proposed, Cache]:
    """Propose candidates for a batch, inside a compiled program.

    Args:
      drafter: who proposes.
      params: its `params`.
      network: its network over the batch, with logits over the target's vocabulary; None without one.
      cache: of the network, holding each text but its last two tokens at least; () without one.
      view: what is past.

    Returns:
      (what is proposed, cut to what may be drafted; the cache).
    """
    view = dataclasses.replace(view, params=params)
    if not isinstance(drafter, ModelDrafter):
        return _within(drafter, drafter.propose(view), view), cache
    assert network is not None

    is_drawn = drafter.rule.proposal is not PointMass
    is_counted = is_drawn and view.sampling.penalties is not None

    def rows_of(logits: jax.Array, above: jax.Array | None = None) -> jax.Array:
        if not is_drawn:
            return jax.nn.softmax(logits, axis=-1)
        return per_sequence(_sampling_rows)(logits, view.sampling, above)

    def step(level: Any, state: Any, cache: Cache, placed: Any) -> tuple[Any, Cache, Any]:
        asked = drafter.ask(level, state, view)
        block = (asked.tokens, asked.depths, asked.seen, view.root, asked.offset)
        logits, cache = network.nodes(params, cache, *block)
        above = None
        if is_counted:
            placed, above = _tokens_seen(placed, asked)
        return drafter.grow(level, state, rows_of(logits, above), view), cache, placed

    logits, cache = _root_logits(network, params, cache, view)
    state = drafter.start(view, logits.shape[-1])
    placed = jnp.full((view.length.shape[0], drafter.spare_slots), -1, jnp.int32)
    if drafter.is_unrolled:
        state = drafter.grow(0, state, rows_of(logits[:, None]), view)
        for level in range(1, drafter.capacity.max_depth):
            state, cache, placed = step(level, state, cache, placed)
    else:
        state = drafter.grow(jnp.int32(0), state, rows_of(logits[:, None]), view)
        _, state, cache, _ = lax.while_loop(
            lambda carry: jnp.any(drafter.is_read(carry[0], carry[1], view)),
            lambda carry: (carry[0] + 1, *step(*carry)),
            (jnp.int32(1), state, cache, placed),
        )
    return _within(drafter, drafter.finish(state, view), view), cache


def _root_logits(
    network: BatchedNetwork, params: Any, cache: Cache, view: View
) -> tuple[jax.Array, Cache]:
    """Feed the last two tokens of each text and return the logits after the last, [B, V].

    After a fully accepted path two tokens are new to the draft's cache, else one; feeding two each
    time needs no branch. A text of one token is fed from slot 0, with anything after it.
    """
    first = jnp.maximum(view.length - 2, 0)
    last = per_sequence(lambda tokens, at: lax.dynamic_slice(tokens, (at,), (2,)))(
        view.tokens, first
    )
    logits, cache = network.text(params, cache, last, first)
    place = (view.root - first)[:, None, None]
    return jnp.take_along_axis(logits, place, axis=1)[:, 0], cache


def _sampling_rows(logits: jax.Array, sampling: Sampling, above: jax.Array | None) -> jax.Array:
    """Turn the logits [L, V] of a sequence into the probabilities that candidates are drawn from.

    They are computed as the target's rows are, at the same settings.
    """
    source = sampling.logits(logits, above)
    return per_sequence(lambda row: row_of(source, row))(jnp.arange(logits.shape[0]))


def _tokens_seen(placed: jax.Array, asked: Asked) -> tuple[jax.Array, jax.Array]:
    """Return the tokens by slot with those of a block, and what its nodes see, [B, L, M - 1].

    Slots are counted from the root's, whose own token is part of the text.
    """
    offset = jnp.broadcast_to(jnp.asarray(asked.offset, jnp.int32), placed.shape[:1])
    put = per_sequence(lambda slots, new, at: lax.dynamic_update_slice(slots, new, (at,)))
    placed = put(placed, asked.tokens, offset)
    seen = asked.seen[:, :, 1:]
    tokens = placed[:, None, 1 : 1 + seen.shape[2]]
    return placed, jnp.where(seen, tokens, -1)


def _assert_proposed(drafter: Drafter, proposed: Any) -> None:
    """Raise ValueError unless a custom drafter proposed what it must."""
    name = f"what {type(drafter).__name__} proposed"
    assert_kind(name, proposed, Proposed, "a jaxspec.draft.Proposed(proposal=...)")
    wanted = "a PointMass, a WithReplacement or another Proposal"
    assert_kind(f"{name}: proposal", proposed.proposal, Proposal, wanted)


def _within(
    drafter: Drafter, proposed: Proposed, view: View, max_nodes: jax.Array | int = MOST_TOKENS
) -> Proposed:
    """Cut every tree to what may be drafted: within depth and size, and nothing below a stop token."""
    _assert_proposed(drafter, proposed)
    stops = view.stop_tokens
    stops = jnp.full((view.length.shape[0], 1), -1, jnp.int32) if stops is None else stops

    def one(proposal: Proposal, depth: Any, root: Any, stops: jax.Array, *is_in: jax.Array) -> Any:
        tree, nodes = cut_below(proposal.tree, stops, depth, jnp.int32(max_nodes), *is_in)
        is_root = jnp.arange(tree.max_nodes) == 0
        tree = dataclasses.replace(tree, tokens=jnp.where(is_root, root, tree.tokens))
        rows = proposal.draft_rows
        if rows is not None and not drafter.capacity.is_path:  # a path is only shortened
            rows = node_rows(rows, nodes)
        return dataclasses.replace(proposal, tree=tree, draft_rows=rows), nodes

    is_in = () if proposed.is_in is None else (proposed.is_in,)
    parts = (proposed.proposal, view.depth, view.root_token, stops, *is_in)
    proposal, nodes = per_sequence(one)(*parts)
    slots = proposed.slots
    if slots is not None:
        at = jnp.take_along_axis(slots, jnp.maximum(nodes, 0), axis=1)
        slots = jnp.where(nodes >= 0, at, -1)
    return Proposed(proposal=proposal, slots=slots)


def depth_after(
    drafter: Drafter, depth: jax.Array, accepted: jax.Array, proposed: jax.Array
) -> jax.Array:
    """Return the depth that a drafter requests after a round, int32 [...], at least 0.

    Raises:
      ValueError: `next_depth` of a custom drafter returned something else than integers of the shape
        of `depth`.
    """
    found = jnp.asarray(drafter.next_depth(depth, accepted, proposed))
    if found.shape != depth.shape or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(
            f"next_depth of {type(drafter).__name__} returned {found.dtype.name}{list(found.shape)}: "
            f"must be int32{list(depth.shape)}"
        )
    return jnp.maximum(found.astype(jnp.int32), 0)


@dataclasses.dataclass(frozen=True, eq=False)
class HostDraft:
    """What was proposed in a round of the host loop.

    Attributes:
      proposal: the candidates of one sequence, padded to the drafter's capacity.
      depth: depth of the tree; 0 if nothing was proposed.
      usage: what was asked of the draft model.
      batches: hypothetical batches of it: one for each level that was asked about.
      pairs: float32 [N, 2], for each node the pair that its candidate was drawn with; None where no
        candidate was drawn. Nodes are numbered anew where others are cut off.
    """

    proposal: Proposal
    depth: int
    usage: Usage = Usage()
    batches: int = 0
    pairs: jax.Array | None = None  # [N, 2]


@moves_data
def propose_on_host(
    drafter: Drafter,
    context: Sequence[int] | np.ndarray,
    depth: int,
    pairs: jax.Array,
    *,
    vocab: int | None = None,
    stop_tokens: Collection[int] = (),
    max_nodes: int = MOST_TOKENS,
    provider: Provider | None = None,
    apply: Callable[[np.ndarray, Sequence[Context]], np.ndarray] | None = None,
) -> HostDraft:
    """Propose candidates after one context.

    Args:
      drafter: who proposes.
      context: prompt and committed tokens; the last is the root.
      depth: most levels.
      pairs: float32 [N, 2], for each node the pair of uniforms to draw its candidate with.
      vocab: V; default that of the model, or no limit without a model.
      stop_tokens: tokens that end a text: nothing is drafted below one, and no model is asked about
        a context with a drafted one.
      max_nodes: most nodes, the root counted.
      provider: the draft model as a callable; default the drafter's `model`, which must be one.
      apply: applies the request's settings to rows [n, V] that candidates are drawn from, given the
        contexts before them; None for none.

    Raises:
      ValueError: an argument is invalid, or a custom drafter proposed a token outside the vocabulary.
      RowError: the model's answer is invalid.
    """
    assert_between("depth", depth, 0)
    assert_between("max_nodes", max_nodes, 1)
    stops = sorted(token_ids("stop_tokens", stop_tokens, MOST_TOKENS))
    shape = (drafter.capacity.max_nodes, 2)
    if (getattr(pairs, "shape", None), getattr(pairs, "dtype", None)) != (shape, np.float32):
        raise ValueError(
            f"pairs is {described(pairs)}: must be a float32 array {list(shape)}, a pair of uniforms "
            "for each node"
        )
    tokens = check_context(type(drafter).__name__, MOST_TOKENS, context)
    depth = min(int(depth), drafter.capacity.max_depth)
    view = _view(drafter, tokens, depth, pairs, stops)
    usage, levels, state = Usage(), 0, None
    if isinstance(drafter, ModelDrafter):
        model = drafter.model if provider is None else provider
        wanted = "a Provider to draft on the host; wrap a network, as CachedNetwork(...).provider()"
        assert_kind(f"the model of {type(drafter).__name__}", model, Provider, wanted)
        assert isinstance(model, Provider)
        vocab = model.vocab if vocab is None else vocab
        if depth > 0:  # else the text may hold tokens that the draft lacks
            tokens = model.check_context(tokens)
            state, usage, levels = _ask(drafter, model, vocab, tokens, view, apply)
    static = (drafter, vocab, drafter.capacity)
    most = np.int32(min(max_nodes, MOST_TOKENS))
    proposal, drawn_with = _finish(static, state, view, most)
    sizes, found = np.asarray(proposal.tree.level_sizes), np.asarray(proposal.tree.tokens)
    found = found[1 : int(sizes.sum())]
    bad = np.flatnonzero((found < 0) | (found >= (MOST_TOKENS if vocab is None else vocab)))
    if bad.size:
        raise ValueError(
            f"{type(drafter).__name__} proposed token {found[bad[0]]} at node {1 + bad[0]}: outside "
            f"the target's vocabulary of {vocab}"
        )
    reached = int(np.flatnonzero(sizes)[-1])
    return HostDraft(
        proposal=proposal, depth=reached, usage=usage, batches=levels, pairs=drawn_with
    )


def _ask(
    drafter: ModelDrafter,
    model: Provider,
    vocab: int,
    context: Context,
    view: View,
    apply: Callable[[np.ndarray, Sequence[Context]], np.ndarray] | None,
) -> tuple[Any, Usage, int]:
    """Ask a callable level by level: a context is what a network's node would attend to.

    Returns:
      (the drafter's state, what was asked, levels asked about).
    """
    static = (drafter, vocab, drafter.capacity)
    usage, level, state = Usage(), 0, None
    slots: dict[int, int] = {}  # the token in each slot after the root's
    wanted: list[Context] = [context]  # empty for rows that are not read
    while any(wanted):
        distinct = list(dict.fromkeys(filter(None, wanted)))
        answers, used = model.rows(distinct)
        answers = _over(answers, vocab, drafter)
        if apply is not None and drafter.rule.proposal is not PointMass:
            answers = apply(answers, distinct)
        found = dict(zip(distinct, answers, strict=True))
        rows = np.stack([found.get(each, np.zeros(vocab, np.float32)) for each in wanted])[None]
        if drafter.is_unrolled:
            state, is_read, asked = _step(static, level, state, rows, view)
        else:
            state, is_read, asked = _step_of_any_level(static, np.int32(level), state, rows, view)
        usage, level, wanted = usage + used, level + 1, []
        if asked is not None:
            tokens, seen, is_read = (np.asarray(x)[0] for x in (asked.tokens, asked.seen, is_read))
            start = int(np.asarray(asked.offset).reshape(-1)[0])
            slots |= {start + place: int(token) for place, token in enumerate(tokens)}
            for attends, is_used in zip(seen, is_read, strict=True):
                path = (slots[slot] for slot in np.flatnonzero(attends).tolist() if slot > 0)
                wanted.append((*context, *path) if is_used else ())
    return state, usage, level


def _over(rows: np.ndarray, vocab: int, drafter: Drafter) -> np.ndarray:
    """Return a model's rows over the target's vocabulary.

    Tokens that the model does not have get probability 0. Those that the target does not have are left
    out and the row is divided by what is left: softmax of the common logits, or all zeros. Rows that
    are drawn from are divided by their mass, which in half precision is off 1 by 1e-3.
    """
    if rows.shape[1] <= vocab:
        rows = np.pad(rows, ((0, 0), (0, vocab - rows.shape[1])))
        if drafter.rule.proposal is PointMass:
            return rows
    common = rows[:, :vocab]
    mass = common.sum(axis=1, dtype=np.float64, keepdims=True)
    return (common / np.where(mass > 0, mass, 1.0)).astype(np.float32)


def _view(
    drafter: Drafter, context: Context, depth: int, pairs: Any, stop_tokens: list[int]
) -> View:
    """Show one text, padded so that texts of many lengths share a program."""
    size = max(_SHORTEST, 1 << (len(context) - 1).bit_length())
    stops = max(4, 1 << max(len(stop_tokens) - 1, 0).bit_length())
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(context)] = context
    neutral: dict[str, Any] = {
        "temperature": np.ones(1, np.float32),
        "top_k": np.zeros(1, np.int32),
        "top_p": np.ones(1, np.float32),
        "min_p": np.zeros(1, np.float32),
    }
    fields: dict[str, Any] = {
        "tokens": tokens,
        "length": np.array([len(context)], np.int32),
        "depth": np.array([depth], np.int32),
        "pairs": np.asarray(pairs)[None],
        "sampling": Sampling(**neutral),
        "stop_tokens": np.array([stop_tokens + [-1] * (stops - len(stop_tokens))], np.int32),
    }
    params = () if isinstance(drafter, ModelDrafter) else drafter.params
    return View(**fields, params=params)


_Static = tuple[Any, Any, Any]
"""What decides the programs of a drafter: itself but for its model, the vocabulary, its sizes."""


def _advance(static: _Static, level: Any, state: Any, rows: jax.Array, view: View) -> Any:
    """Grow one level; return the state, which rows are read next and of what; None after the last."""
    drafter, vocab, capacity = static
    if state is None:
        state = drafter.start(view, vocab)
    state = drafter.grow(level, state, rows, view)
    if drafter.is_unrolled and level + 1 == capacity.max_depth:
        return state, None, None
    return state, drafter.is_read(level + 1, state, view), drafter.ask(level + 1, state, view)


_step = jax.jit(_advance, static_argnums=(0, 1))
_step_of_any_level = jax.jit(_advance, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _finish(
    static: _Static, state: Any, view: View, max_nodes: jax.Array
) -> tuple[Proposal, jax.Array | None]:
    """Return the proposal of a batch of one, its draft rows as an array [N - 1, V], and its pairs."""
    drafter, vocab, capacity = static
    if not isinstance(drafter, ModelDrafter):
        proposed = drafter.propose(view)
    else:
        proposed = drafter.finish(drafter.start(view, vocab) if state is None else state, view)
    _assert_proposed(drafter, proposed)
    nodes = jnp.arange(proposed.proposal.tree.max_nodes, dtype=jnp.int32)
    proposed = _within(drafter, dataclasses.replace(proposed, slots=nodes[None]), view, max_nodes)
    proposal, before = jax.tree.map(lambda x: x[0], (proposed.proposal, proposed.slots))
    if proposal.draft_rows is None:
        return proposal, None
    source, most = as_source("draft_rows", proposal.draft_rows), capacity.max_nodes - 1
    count = min(most, source.values.shape[0])  # a leaf's row is never read
    is_stored = isinstance(source, Probabilities)
    rows = window(source, count) if is_stored else dense_rows(source, count)
    rows = jnp.pad(rows, ((0, most - count), (0, 0)))
    pairs = view.pairs[0][jnp.where(before >= 0, before, nodes)]
    return dataclasses.replace(proposal, draft_rows=rows), pairs
