"""Batches whose rows have more than 2^31 entries, as programs: nothing of that size is computed.

An index is int32 and counts rows or tokens, never entries: then no batch that fits into memory is too
large. The programs are traced and lowered for their shapes alone.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxspec as js

VOCAB, BATCH, NODES = 262144, 2048, 9
LIMIT = 2**31
INDEXED = ("gather", "dynamic_slice", "dynamic_update_slice", "scatter", "take")

assert BATCH * VOCAB * NODES > 2 * LIMIT and BATCH * NODES < LIMIT


def shapes_of(rule: js.Rule, *, is_logits: bool, is_flat: bool) -> tuple:
    """Make the shapes of a batch, its rows by sequence or in one slab."""
    children, depth = (1, NODES - 1) if rule.is_path else (2, 3)

    def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((BATCH, *shape), dtype)

    ints, floats = functools.partial(of, jnp.int32), functools.partial(of, jnp.float32)
    slab: Any = floats(NODES, VOCAB)
    first = None
    if is_flat:
        slab, first = jax.ShapeDtypeStruct((BATCH * NODES, VOCAB), jnp.float32), ints()

    def source() -> js.RowSource:
        if is_logits:
            return js.Logits(
                values=slab, first=first, temperature=floats(), top_k=ints(), top_p=floats()
            )
        return js.Probabilities(values=slab, first=first)

    tree = js.Tree(
        tokens=ints(NODES),
        parents=ints(NODES),
        children=ints(NODES, children),
        level_sizes=ints(depth + 1),
    )
    rows = None if rule.proposal is js.PointMass else source()
    proposal = rule.proposal(tree=tree, draft_rows=rows)
    return js.Draws(accept=floats(NODES), final=floats(2)), proposal, source(), of(jnp.bool_)


def axes_of(shapes: tuple, *, is_flat: bool) -> Any:
    """Map everything but a slab that all sequences share."""
    if not is_flat:
        return 0
    return tuple(
        jax.tree.map(lambda x: None if x.shape[0] == BATCH * NODES else 0, each) for each in shapes
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                program = getattr(inner, "jaxpr", inner)
                if hasattr(program, "eqns"):
                    yield from equations(program)


def too_long(verify: Callable[..., Any], shapes: tuple) -> tuple[list[str], int]:
    """Return what has an axis that int32 cannot count, and how large an array is indexed."""
    found, largest = [], 0
    for equation in equations(jax.make_jaxpr(verify)(*shapes).jaxpr):
        for each in (*equation.invars, *equation.outvars):
            if any(size >= LIMIT for size in each.aval.shape):
                found.append(f"{equation.primitive.name} {each.aval}")
        if equation.primitive.name in INDEXED:
            largest = max(largest, equation.invars[0].aval.size)
    return found, largest


@pytest.mark.parametrize("is_flat", [False, True], ids=["by sequence", "one slab"])
@pytest.mark.parametrize("is_logits", [False, True], ids=["probabilities", "logits"])
@pytest.mark.parametrize("rule", [js.RULES[name] for name in ("token", "point_mass", "traversal")])
def test_no_axis_is_longer_than_an_int32_can_count(
    rule: js.Rule, is_logits: bool, is_flat: bool
) -> None:
    shapes = shapes_of(rule, is_logits=is_logits, is_flat=is_flat)
    found, largest = too_long(
        jax.vmap(rule.verify, in_axes=axes_of(shapes, is_flat=is_flat)), shapes
    )
    assert found == []
    assert largest > LIMIT  # the slab of the whole batch is indexed, by row and token


def test_an_index_of_single_entries_would_be_found() -> None:
    rows = jax.ShapeDtypeStruct((BATCH * NODES, VOCAB), jnp.float32)
    found, _ = too_long(lambda rows: rows.reshape(-1)[5], (rows,))
    assert found


def test_such_a_batch_is_lowered_for_every_platform() -> None:
    rule = js.RULES["token"]
    shapes = shapes_of(rule, is_logits=True, is_flat=False)
    platforms = ("cpu", "cuda", "tpu")
    lowered = export.export(jax.jit(jax.vmap(rule.verify)), platforms=platforms)(*shapes)
    assert f"tensor<{BATCH * NODES}x{VOCAB}xf32>" in lowered.mlir_module()
    assert f"tensor<{BATCH * NODES * VOCAB}xf32>" not in lowered.mlir_module()
