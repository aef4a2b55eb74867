"""The user's plain `vmap`, made fast: a batch is a batch of offsets into one slab of rows.

A slab of rows that is mapped over would be copied, row by row, for each sequence. So a verifier
under `vmap` sees the slabs of the whole batch, laid end to end, and the index of its own first row.
On CPU the sequences then run one after the other, each reading only the rows it visits; on other
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

from jaxspec.loops import varying_alike, while_loop
from jaxspec.rows import RowSource, vocab_of
from jaxspec.slabs.base import end_to_end
from jaxspec.verify.arguments import Arguments
from jaxspec.verify.reader import RowReader, Slabs
from jaxspec.verify.verdict import Verdict, no_verdict

SMALL_VOCABULARY = 4096
"""Below this many tokens a batch runs side by side on every platform: rows are cheap."""

Walk = Callable[[RowReader], tuple[Verdict, jax.Array]]
"""Decides a round; also returns whether unit masses must not be assumed."""


def run(walk: Walk, given: Arguments) -> Verdict:
    """Run a walk such that it is fast alone and under `vmap`."""
    given = varying_alike(given)
    target_slab, target = given.target.split()
    draft_slab, draft = given.draft.split() if given.draft is not None else (None, None)
    slabs, given = (target_slab, draft_slab), replace(given, target=target, draft=draft)
    if vocab_of(target, target_slab) < SMALL_VOCABULARY:
        return _settle(walk, slabs, given, spans=False)
    start = jnp.int32(0)
    return _walk_slabs(walk)(slabs, _moved(given, start, start))


def _moved(given: Arguments, target_by: jax.Array, draft_by: jax.Array) -> Arguments:
    """Move the first rows of a sequence, which may be None for 0, by offsets in the slabs."""

    def moved(source: RowSource, by: jax.Array) -> RowSource:
        return replace(source, first=by if source.first is None else source.first + by)

    draft = None if given.draft is None else moved(given.draft, draft_by)
    return replace(given, target=moved(given.target, target_by), draft=draft)


def _settle(walk: Walk, slabs: Slabs, given: Arguments, *, spans: bool) -> Verdict:
    """Walk with unit masses assumed where the source allows it; again without if that is doubtful."""

    def attempt(is_exact: jax.Array) -> tuple[Verdict, jax.Array]:
        return walk(RowReader(slabs, given, is_exact=is_exact, spans=spans))

    pairs = zip(slabs, (given.target, given.draft), strict=True)
    if not any(
        source is not None and slab is not None and source.assumes_unit_mass(slab.dtype)
        for slab, source in pairs
    ):
        return attempt(jnp.ones((), bool))[0]

    def step(state: tuple[jax.Array, jax.Array, Verdict]) -> Any:
        _, is_exact, _ = state
        verdict, is_doubtful = attempt(is_exact)
        return is_doubtful & ~is_exact, jnp.ones((), bool), verdict

    start = (jnp.ones((), bool), jnp.zeros((), bool), no_verdict(given.tree))
    start = varying_alike((start, given.draws.final))[0]
    return while_loop(lambda state: state[0], step, start)[2]


@functools.cache
def _walk_slabs(walk: Walk) -> Callable[[Slabs, Arguments], Verdict]:
    """Make the walk over slabs and offsets, with its own rule for `vmap`."""

    # Jitted so that it is traced once for each shape, however often the rule below calls it.
    @functools.partial(jax.jit, static_argnames="spans")
    def body(slabs: Slabs, given: Arguments, *, spans: bool) -> Verdict:
        return _settle(walk, slabs, given, spans=spans)

    @custom_vmap
    def one(slabs: Slabs, given: Arguments) -> Verdict:
        return lax.platform_dependent(
            slabs,
            given,
            cpu=functools.partial(body, spans=True),
            default=functools.partial(body, spans=False),
        )

    @one.def_vmap
    def many(
        axis_size: int, is_mapped: tuple[Slabs, Arguments], slabs: Slabs, given: Arguments
    ) -> tuple[Verdict, Any]:
        slabs_mapped, given_mapped = is_mapped
        given = jax.tree.map(
            lambda x, is_mapped: (
                x if is_mapped else jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
            ),
            given,
            given_mapped,
        )

        (target_slab, target_by), (draft_slab, draft_by) = (
            (slab, jnp.int32(0)) if slab is None else end_to_end(slab, axis_size, is_mapped)
            for slab, is_mapped in zip(slabs, slabs_mapped, strict=True)
        )
        flat = (target_slab, draft_slab)
        given = _moved(given, target_by, draft_by)

        def in_turn(flat: Slabs, given: Arguments) -> Verdict:
            return lax.map(lambda sequence: one(flat, sequence), given)

        def side_by_side(flat: Slabs, given: Arguments) -> Verdict:
            return jax.vmap(functools.partial(body, spans=False), in_axes=(None, 0))(flat, given)

        verdict = lax.platform_dependent(flat, given, cpu=in_turn, default=side_by_side)
        return verdict, jax.tree.map(lambda _: True, verdict)

    return one
