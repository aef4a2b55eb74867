"""JAX's modes: public functions give the same results under each of them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxspec as js
from jaxspec import layouts, slabs

VOCAB, WIDE = 5, 5000
GENERATOR = np.random.default_rng(0)
LOGITS = GENERATOR.normal(0, 2, (2, 4, VOCAB)).astype(np.float32)
WIDE_LOGITS = GENERATOR.normal(0, 2, (2, 3, WIDE)).astype(np.float32)
TREE = ([-1, 0, 1, 0], [-1, 0, 0, 1])


def rows_of(logits: jax.Array, *, is_filtered: bool = False) -> js.RowSource | jax.Array:
    if not is_filtered:
        return jax.nn.softmax(logits, axis=-1)
    return js.Logits(
        values=logits,
        temperature=jnp.float32(0.7),
        top_k=jnp.int32(3),
        top_p=jnp.float32(0.9),
        first=jnp.int32(0),
    )


def tree_of_arrays() -> js.Tree:
    return jax.tree.map(jnp.asarray, js.make_tree(*TREE))


def verdict_of(rule: js.Rule, key: jax.Array, logits: jax.Array, *, is_filtered: bool) -> Any:
    """Draft by the kind of a rule, from the first of two sets of logits, and verify by the second."""
    nodes = logits.shape[1]
    draws = js.round_draws(key, nodes, position=3)
    draft, target = (rows_of(x, is_filtered=is_filtered) for x in logits)
    law = js.dense_rows(draft, nodes)
    if rule.is_path:
        tokens = jax.vmap(js.draw_token)(draws.draft[1:], law[:-1])
        proposal = js.sampled_path(tokens, draft, jnp.int32(2))
    else:
        tree = tree_of_arrays()
        below = rule.proposal.draw(draws.draft[1:3], law[0])
        tokens = jnp.concatenate([tree.tokens[:1], below, tree.tokens[3:]])
        tree = dataclasses.replace(tree, tokens=tokens)
        is_fixed = rule.proposal is js.PointMass
        proposal = rule.proposal(tree=tree, draft_rows=None if is_fixed else draft)
    return rule.verify(draws.verify, proposal, target, jnp.asarray(True))


def error_of(key: jax.Array, logits: jax.Array) -> Any:
    draws = js.round_draws(key, 4).verify
    proposal = js.PointMass(tree=js.chain(jnp.array([1, 2, 3], jnp.int32)))
    return js.checked(js.verify_path)(draws, proposal, rows_of(logits[1]), jnp.asarray(True))[1]


def output_of(key: jax.Array, logits: jax.Array) -> Any:
    batch = layouts.FlatBatch(
        draft_token_ids=jnp.array([1, 2], jnp.int32),
        num_draft_tokens=jnp.array([1, 1], jnp.int32),
        draft_rows=jax.nn.softmax(logits[0], axis=-1),
        target_rows=js.Logits(values=logits[1], temperature=jnp.full(2, 0.7, jnp.float32)),
        has_bonus_rows=True,
        is_sampled=jnp.array([True, False]),
    )
    positions = jnp.array([3, 4], jnp.int32)
    draws = layouts.request_draws(jax.random.split(key, 2), positions, max_spec_len=2)
    output = layouts.verify_flat(batch, draws)
    return (
        output,
        layouts.emitted_log_probs(batch, output),
        layouts.accept_probs(batch, max_spec_len=2),
        layouts.synthetic_output(batch, draws, jnp.float32(0.7)),
    )


def adjusted_verdict(key: jax.Array, logits: jax.Array) -> Any:
    """Settings of tokens for the target, a reduced vocabulary for the draft, in a flat batch."""
    ids = np.arange(VOCAB)[::-1]
    draft = slabs.ReducedVocabulary.of(logits[0], ids, vocab=VOCAB)
    batch = layouts.FlatBatch(
        draft_token_ids=jnp.array([1, 2], jnp.int32),
        num_draft_tokens=jnp.array([1, 1], jnp.int32),
        draft_rows=js.Logits(values=draft, temperature=jnp.float32(1)),
        target_rows=js.Logits(values=logits[1], temperature=jnp.full(2, 0.7, jnp.float32)),
        has_bonus_rows=True,
    )
    strengths = {"repetition": 1.2, "frequency": 0.3, "presence": -0.2}
    penalties = slabs.Penalties(
        counts=jnp.asarray([[1, 0, 0, 2, 0]] * 2, jnp.int32),
        **{name: jnp.full(2, value, jnp.float32) for name, value in strengths.items()},
    )
    bits = slabs.token_bits(jnp.arange(VOCAB, dtype=jnp.int32) != 4)
    batch = batch.adjusted(
        2, allowed=jnp.tile(bits, (4, 1)), bias=logits[1, :2], penalties=penalties
    )
    positions = jnp.array([3, 4], jnp.int32)
    draws = layouts.request_draws(jax.random.split(key, 2), positions, max_spec_len=2)
    return layouts.verify_flat(batch, draws)


FILTERED = ("token", "without_replacement", "traversal")
"""Rules that are given filtered logits, the others probabilities: every reader of rows takes part."""

CALLS: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    **{
        name: lambda key, logits, rule=rule: verdict_of(
            rule, key, logits, is_filtered=rule.name in FILTERED
        )
        for name, rule in js.RULES.items()
    },
    "checked": error_of,
    "verify_flat": output_of,
    "adjusted": adjusted_verdict,
    "chain": lambda key, logits: js.chain(jnp.array([1, 2], jnp.int32), jnp.int32(1)),
}
"""The public functions that are traced, with those they call: draws, drafts, rows."""

EAGER = ("token", "block", "chain")
"""Run one operation at a time: each compiles as many programs as it has operations."""


def in_one_program(calls: list[str]) -> Callable[[jax.Array, jax.Array], dict[str, Any]]:
    def run(key: jax.Array, logits: jax.Array) -> dict[str, Any]:
        return {name: CALLS[name](key, logits) for name in calls}

    return run


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in found:
        for ours, theirs in zip(
            jax.tree.leaves(found[name]), jax.tree.leaves(wanted[name]), strict=True
        ):
            assert ours.dtype == theirs.dtype, name
            if jnp.issubdtype(theirs.dtype, jnp.floating):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.fixture(scope="module")
def wanted() -> dict[str, Any]:
    inputs = jax.random.key(5), jnp.asarray(LOGITS)
    return jax.device_get(jax.jit(in_one_program(list(CALLS)))(*inputs))


@contextlib.contextmanager
def without_transfers() -> Iterator[None]:
    with jax.transfer_guard("disallow"):
        yield


MODES = {
    "64-bit": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug NaNs": lambda: jax.debug_nans(True),
    "transfer guard": without_transfers,
}


@pytest.mark.parametrize("mode", MODES)
def test_every_traced_function_gives_the_same_in_a_mode(mode: str, wanted: dict[str, Any]) -> None:
    inputs = jax.random.key(5), jax.device_put(LOGITS)
    run = jax.jit(in_one_program(list(CALLS)))
    with MODES[mode]():
        found = run(*inputs)
    assert_same(jax.device_get(found), wanted)


def test_what_is_run_without_jit_gives_the_same(wanted: dict[str, Any]) -> None:
    with jax.disable_jit(), jax.debug_nans(True):
        found = in_one_program(list(EAGER))(jax.random.key(5), jnp.asarray(LOGITS))
    assert_same(found, wanted)


def test_every_traced_function_runs_in_a_sharded_batch_with_the_default_check(
    wanted: dict[str, Any],
) -> None:
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=auto)
    over = PartitionSpec("data")
    run = jax.vmap(in_one_program(list(CALLS)))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=over)
    keys, logits = jnp.stack([jax.random.key(5)] * 2), jnp.stack([jnp.asarray(LOGITS)] * 2)
    found = jax.device_get(jax.jit(sharded)(keys, logits))
    assert_same(jax.tree.map(lambda x: x[1], found), wanted)


def test_a_wide_vocabulary_is_verified_in_64_bit_mode_and_in_a_sharded_batch() -> None:
    """Rows of more than 4096 tokens are batched as offsets into one slab."""

    def run(key: jax.Array, logits: jax.Array) -> js.Verdict:
        return verdict_of(js.RULES["token"], key, logits, is_filtered=False)

    keys, batch = jax.random.split(jax.random.key(1), 2), jnp.stack([jnp.asarray(WIDE_LOGITS)] * 2)
    wanted = jax.jit(jax.vmap(run))(keys, batch)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = PartitionSpec("data")
    sharded = jax.jit(jax.shard_map(jax.vmap(run), mesh=mesh, in_specs=over, out_specs=over))
    assert_same({"sharded": sharded(keys, batch)}, {"sharded": wanted})
    with jax.enable_x64(True):
        found = jax.jit(jax.vmap(run))(keys, batch)
    assert_same({"64-bit": found}, {"64-bit": wanted})


def test_a_batch_over_a_mesh_of_explicit_axes_is_verified_with_its_axes_made_automatic() -> None:
    def run(key: jax.Array, logits: jax.Array) -> js.Verdict:
        return verdict_of(js.RULES["token"], key, logits, is_filtered=False)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    over = PartitionSpec("data")
    keys, logits = jax.random.split(jax.random.key(1), 2), jnp.stack([jnp.asarray(LOGITS)] * 2)
    wanted = jax.jit(jax.vmap(run))(keys, logits)
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, over)
        inputs = jax.device_put(keys, sharding), jax.device_put(logits, sharding)
        found = jax.jit(jax.sharding.auto_axes(jax.vmap(run), out_sharding=over))(*inputs)
    assert_same({"explicit": jax.device_get(found)}, {"explicit": wanted})


def test_every_public_function_is_run_in_the_modes_or_belongs_to_the_host() -> None:
    on_the_host = {"make_tree", "raise_if", "strict", "struct"}
    traced = {"chain", "checked", "dense_rows", "draw_token", "round_draws", "sampled_path"}
    verifiers = {rule.verify.__name__ for rule in js.RULES.values()}
    functions = {name for name in js.__all__ if callable(getattr(js, name)) and name[0].islower()}
    assert functions == on_the_host | traced | verifiers
