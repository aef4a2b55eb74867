"""The user's plain `vmap`, made fast: a batch is a batch of offsets into one slab of rows.

A slab of rows that is mapped over would be copied, row by row, for each sequence. So a verifier
under `vmap` sees the slabs of the whole batch, laid end to end, and the index of its own first row.
On CPU the sequences then run one after the other, each touching only the rows it visits; on other
platforms they run side by side.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jaxspec.draws import Draws
from jaxspec.logits import Logits
from jaxspec.loops import varying_alike, while_loop
from jaxspec.proposals import Proposal, Rows, as_source, with_draft_rows
from jaxspec.rows import Probabilities
from jaxspec.trees import NONE
from jaxspec.verify.kernel import Room, draft_of, trusts
from jaxspec.verify.verdict import Verdict

SMALL_VOCABULARY = 4096
"""Below this many tokens a batch runs side by side on every platform: rows are cheap."""

Walk = Callable[..., tuple[Verdict, jax.Array]]


def run(
    walk: Walk,
    draws: Draws,
    proposal: Proposal,
    target_rows: Rows,
    bonus: jax.Array | bool,
) -> Verdict:
    """Run a walk such that it is fast alone and under `vmap`."""
    target = as_source(target_rows)
    bonus = jnp.asarray(bonus)
    draws, proposal, target, bonus = varying_alike((draws, proposal, target, bonus))
    room = varying_alike((_room(target, draft_of(proposal)), draws.final))[0]
    if target.values.shape[1] < SMALL_VOCABULARY:
        return _settle(walk, draws, proposal, target, bonus, room, spans=False)
    target, target_slab = _take_slab(target)
    slabs = {"target": target_slab}
    if proposal.draft_rows is not None:
        draft, slabs["draft"] = _take_slab(as_source(proposal.draft_rows))
        proposal = with_draft_rows(proposal, draft)
    return _walk_slabs(walk)(slabs, (draws, proposal, target, bonus, room))


def _settle(walk: Walk, *arguments: Any, spans: bool) -> Verdict:
    """Walk with rows of probabilities taken on trust, then with exact masses if that was doubtful."""
    draws, proposal, target, *_ = arguments
    if not (trusts(target) or trusts(draft_of(proposal))):
        return walk(*arguments, is_exact=jnp.ones((), bool), spans=spans)[0]

    def attempt(state: tuple[jax.Array, jax.Array, Verdict]) -> Any:
        _, is_exact, _ = state
        verdict, is_doubtful = walk(*arguments, is_exact=is_exact, spans=spans)
        return is_doubtful & ~is_exact, jnp.ones((), bool), verdict

    tree = proposal.tree
    nothing = jnp.full(tree.max_depth + 1, NONE, jnp.int32)
    none = jnp.int32(0)
    empty = Verdict(
        tokens=nothing,
        num_tokens=none,
        num_accepted=none,
        path=nothing,
        stop_node=none,
        status=none,
    )
    start = (jnp.ones((), bool), jnp.zeros((), bool), empty)
    start = varying_alike((start, draws.final))[0]
    return while_loop(lambda state: state[0], attempt, start)[2]


def _room(target: Probabilities | Logits, draft: Probabilities | Logits | None) -> Room:
    """Count the rows of each slab from a sequence's first on; none where that lies outside."""

    def rows_from_first(source: Probabilities | Logits | None) -> jax.Array:
        if source is None or source.first is None:
            # The rows of leaves are not read, so there may be one less than nodes.
            return jnp.int32(0 if source is None else source.values.shape[0])
        slab = jnp.int32(source.values.shape[0])
        is_inside = (source.first >= 0) & (source.first < slab)
        return jnp.where(is_inside, slab - source.first, 0).astype(jnp.int32)

    return Room(target=rows_from_first(target), draft=rows_from_first(draft))


def _take_slab(source: Probabilities | Logits) -> tuple[Probabilities | Logits, jax.Array]:
    """Split a row source into what is small and its slab."""
    first = jnp.int32(0) if source.first is None else source.first
    return replace(source, values=jnp.zeros((), source.values.dtype), first=first), source.values


@functools.cache
def _walk_slabs(walk: Walk) -> Callable[[dict[str, jax.Array], Any], Verdict]:
    """Make the walk over slabs and offsets, with its own rule for `vmap`."""

    # Jitted so that it is traced once for each shape, however often the rule below asks for it.
    @functools.partial(jax.jit, static_argnames="spans")
    def body(slabs: dict[str, jax.Array], small: Any, *, spans: bool) -> Verdict:
        draws, proposal, target, bonus, room = small
        if "draft" in slabs:
            draft = replace(proposal.draft_rows, values=slabs["draft"])
            proposal = with_draft_rows(proposal, draft)
        target = replace(target, values=slabs["target"])
        return _settle(walk, draws, proposal, target, bonus, room, spans=spans)

    @custom_vmap
    def one(slabs: dict[str, jax.Array], small: Any) -> Verdict:
        return lax.platform_dependent(
            slabs,
            small,
            cpu=functools.partial(body, spans=True),
            default=functools.partial(body, spans=False),
        )

    @one.def_vmap
    def many(
        axis_size: int, is_batched: tuple[Any, Any], slabs: dict[str, jax.Array], small: Any
    ) -> tuple[Verdict, Any]:
        slabs_batched, small_batched = is_batched
        small = jax.tree.map(
            lambda x, is_mapped: (
                x if is_mapped else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
            ),
            small,
            small_batched,
        )
        draws, proposal, target, bonus, room = small
        flat = dict(slabs)
        offsets = {}
        for name, slab in slabs.items():
            offsets[name] = jnp.zeros(axis_size, jnp.int32)
            if slabs_batched[name]:
                flat[name] = slab.reshape(-1, slab.shape[-1])
                offsets[name] = jnp.arange(axis_size, dtype=jnp.int32) * slab.shape[1]
        target = replace(target, first=target.first + offsets["target"])
        if "draft" in slabs:
            draft = proposal.draft_rows
            draft = replace(draft, first=draft.first + offsets["draft"])
            proposal = with_draft_rows(proposal, draft)
        small = (draws, proposal, target, bonus, room)

        def in_turn(flat: dict[str, jax.Array], small: Any) -> Verdict:
            return lax.map(lambda one_small: one(flat, one_small), small)

        def side_by_side(flat: dict[str, jax.Array], small: Any) -> Verdict:
            return jax.vmap(functools.partial(body, spans=False), in_axes=(None, 0))(flat, small)

        verdict = lax.platform_dependent(flat, small, cpu=in_turn, default=side_by_side)
        return verdict, jax.tree.map(lambda _: True, verdict)

    return one
