"""The Llama network's cache: blocks, roll-back, trees, moved slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import Block
from jaxspec.models.llama import (
    LlamaConfig,
    init_llama,
    llama,
    rope_frequencies,
    wanted_shapes,
)
from jaxspec.trees import ancestor_mask, make_tree, node_depths

CONFIG = LlamaConfig(
    vocab=13,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=6,
    hidden=24,
    rope_frequencies=rope_frequencies(6, base=50.0),
    has_biases=True,
    is_tied=False,
)
SLOTS, WIDTH = 24, 8
TEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], np.int32)


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)

    def draw(leaf):
        if leaf.ndim == 1:
            return jnp.asarray(rng.normal(1, 0.3, leaf.shape), jnp.float32)
        return jnp.asarray(rng.normal(0, 2 / leaf.shape[1] ** 0.5, leaf.shape), jnp.float32)

    model = llama(CONFIG, jax.tree.map(draw, shapes(jnp.float32)))
    return dataclasses.replace(model, forward=jax.jit(model.forward))


def shapes(dtype):
    draw = functools.partial(init_llama, config=CONFIG, dtype=dtype)
    return jax.eval_shape(draw, jax.random.key(0))


def places(at, length):
    return at + np.arange(length, dtype=np.int32)


def text_block(tokens, at):
    return Block.of_text(jnp.asarray(tokens, jnp.int32), at, SLOTS)


def run(model, cache, block):
    logits, cache = model.forward(model.params, cache, block)
    return np.asarray(logits), cache


def decode(model, text, width, cache=None):
    """Return the logits after each token of a text, fed `width` at a time from slot 0."""
    cache = model.init_cache(SLOTS) if cache is None else cache
    rows = []
    for at in range(0, len(text), width):
        logits, cache = run(model, cache, text_block(text[at : at + width], at))
        rows.append(logits)
    return np.concatenate(rows), cache


def arrays(cache):
    return [np.asarray(array) for array in jax.tree.leaves(cache)]


@pytest.fixture(scope="module")
def one_by_one(model):
    return decode(model, TEXT, 1)


def test_a_text_in_blocks_has_the_logits_and_the_cache_of_one_token_at_a_time(model, one_by_one):
    expected, kept = one_by_one
    assert np.std(expected) > 0.5
    found, cache = decode(model, TEXT, WIDTH)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    for mine, other in zip(arrays(cache), arrays(kept), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


def test_padding_after_the_text_changes_nothing_and_is_overwritten(model, one_by_one):
    expected, _ = one_by_one
    padded = np.concatenate([TEXT[:5], [0, 0, 0]])
    first, cache = run(model, model.init_cache(SLOTS), text_block(padded, 0))
    second, _ = run(model, cache, text_block(TEXT[5:13], 5))
    np.testing.assert_allclose(np.concatenate([first[:5], second]), expected[:13], atol=1e-4)


def test_a_block_at_a_smaller_slot_overwrites_bit_for_bit(model):
    other = np.concatenate([TEXT[:4], [12, 11, 10, 0]])
    results = []
    for start in (TEXT[:8], other):
        _, cache = run(model, model.init_cache(SLOTS), text_block(start, 0))
        results.append(run(model, cache, text_block(TEXT[8:16], 4)))
    (mine, my_cache), (yours, your_cache) = results
    np.testing.assert_array_equal(mine, yours)
    for one, two in zip(arrays(my_cache), arrays(your_cache), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_block_leaves_every_other_slot_as_it_was(model):
    noise = jax.tree.map(lambda a: np.full_like(a, 7.0), model.init_cache(SLOTS))
    _, cache = run(model, noise, text_block(TEXT[:8], 10))
    for array in arrays(cache):
        assert (array[:, :10] == 7.0).all()
        assert (array[:, 18:] == 7.0).all()
        assert (array[:, 10:18] != 7.0).all()


def test_a_token_with_an_empty_mask_has_finite_logits(model):
    block = text_block(TEXT[:8], 0)
    block = dataclasses.replace(block, mask=block.mask.at[5].set(False))
    logits, _ = run(model, model.init_cache(SLOTS), block)
    assert np.isfinite(logits).all()


AT = 6
"""The slot of the tree's root: TEXT[:7] is committed, and its last token is the root."""
TREE = make_tree([-1, 5, 7, 2, 5, 5, 9], [-1, 0, 0, 1, 1, 2, 3], max_nodes=WIDTH)
#   root - 5 - 2 - 9
#        |   ` 5
#        ` 7 - 5


def tree_block(positions=None):
    tokens = np.maximum(TREE.tokens, 0)
    tokens[0] = TEXT[AT]
    depths = node_depths(TREE)
    block = Block.of_tree(jnp.asarray(tokens), depths, ancestor_mask(TREE), AT, SLOTS)
    return block if positions is None else dataclasses.replace(block, positions=positions)


def path_to(node):
    path = [node]
    while path[0]:
        path.insert(0, int(TREE.parents[path[0]]))
    return path


def tokens_of(path):
    return [TEXT[AT], *(int(TREE.tokens[node]) for node in path[1:])]


@pytest.fixture(scope="module")
def committed(model):
    return run(model, model.init_cache(SLOTS), text_block(TEXT[:8], 0))[1]


@pytest.fixture(scope="module")
def after_tree(model, committed):
    return run(model, committed, tree_block())


def test_each_node_of_a_tree_has_the_logits_of_its_own_path(model, committed, after_tree):
    logits, _ = after_tree
    for node in range(7):
        path = path_to(node)
        alone = np.resize(tokens_of(path), WIDTH)  # the rest is padding
        expected, _ = run(model, committed, text_block(alone, AT))
        np.testing.assert_allclose(logits[path], expected[: len(path)], atol=1e-4)


def test_flat_positions_or_a_causal_mask_would_be_noticed(model, committed, after_tree):
    logits, _ = after_tree
    flat, _ = run(model, committed, tree_block(places(AT, WIDTH)))
    causal = text_block(TEXT[:WIDTH], AT).mask
    wrong, _ = run(model, committed, dataclasses.replace(tree_block(), mask=causal))
    for other in (flat, wrong):
        assert np.abs(other - logits)[:7].max() > 0.1


def test_text_continues_from_kept_nodes_as_if_they_had_been_written_alone(model, after_tree):
    _, cache = after_tree
    path = path_to(6)
    kept = jax.jit(model.keep)(cache, np.int32(AT), np.array([*path, -1], np.int32))
    end = AT + len(path)
    found, _ = run(model, kept, text_block(TEXT[8:16], end))
    text = [*TEXT[:AT], *tokens_of(path), *TEXT[8:16]]
    expected, _ = decode(model, text[:16], WIDTH)
    np.testing.assert_allclose(found[: 16 - end], expected[end:], atol=1e-4)


def test_kept_slots_are_moved_exactly_ragged_and_nothing_behind_the_front_is_touched():
    rng = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda a: rng.normal(size=(4, *a.shape)).astype(jnp.bfloat16),
        llama(CONFIG, shapes(jnp.bfloat16)).init_cache(SLOTS),
    )
    at = [0, 3, SLOTS - 8, 10]
    paths = [[0, 2, 5, 7], [0, 1, 2, 3], [0, 3, -1, -1], [0, -1, -1, -1]]
    keep = jax.jit(jax.vmap(llama(CONFIG, shapes(jnp.bfloat16)).keep))
    kept = keep(batch, np.array(at, np.int32), np.array(paths, np.int32))
    for new, old in zip(arrays(kept), arrays(batch), strict=True):
        for row, (start, path) in enumerate(zip(at, paths, strict=True)):
            for i, node in enumerate(path):
                if node >= 0:
                    np.testing.assert_array_equal(new[row, :, start + i], old[row, :, start + node])
            np.testing.assert_array_equal(new[row, :, :start], old[row, :, :start])
            np.testing.assert_array_equal(new[row, :, start + 4 :], old[row, :, start + 4 :])


def test_a_batch_of_ragged_blocks_is_each_sequence_alone(model):
    starts = [0, 4, 9]
    rng = np.random.default_rng(0)
    noise = jax.tree.map(
        lambda a: rng.normal(size=(3, *a.shape)).astype(np.float32), model.init_cache(SLOTS)
    )
    blocks = [text_block(np.resize(TEXT[at:], WIDTH), at) for at in starts]
    together = jax.jit(jax.vmap(model.forward, in_axes=(None, 0, 0)))
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *blocks)
    logits, caches = together(model.params, noise, stacked)
    for row, block in enumerate(blocks):
        alone, cache = run(model, jax.tree.map(lambda a, row=row: a[row], noise), block)
        np.testing.assert_allclose(logits[row], alone, atol=1e-4)
        for mine, other in zip(arrays(caches), arrays(cache), strict=True):
            np.testing.assert_allclose(mine[row], other, atol=1e-4)


def products(jaxpr):
    """Yield the dtypes that every product of a program, however deep in it, multiplies."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield {variable.aval.dtype.name for variable in equation.invars}
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from products(inner.jaxpr)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_network_multiplies_and_caches_in_the_dtype_of_its_weights(dtype):
    model = llama(CONFIG, shapes(dtype))
    cache = jax.eval_shape(lambda: model.init_cache(SLOTS))
    program, (logits, after) = jax.make_jaxpr(model.forward, return_shape=True)(
        model.params, cache, text_block(TEXT[:8], 0)
    )
    found = list(products(program.jaxpr))
    assert len(found) == CONFIG.layers * 9 + 1
    assert all(names == {jnp.dtype(dtype).name} for names in found)
    assert {array.dtype for array in jax.tree.leaves((cache, after))} == {jnp.dtype(dtype)}
    assert logits.dtype == jnp.float32


def test_drawn_weights_are_those_that_a_checkpoint_must_have():
    whole, of_layer = wanted_shapes(CONFIG)
    drawn = shapes(jnp.float32)
    assert {name: getattr(drawn, name).shape for name in whole} == whole
    assert len(drawn.layers) == CONFIG.layers
    for layer in drawn.layers:
        assert {name: getattr(layer, name).shape for name in of_layer} == of_layer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "4 heads are not a multiple of 3 kv heads"),
        ({"head_width": 8}, "heads of width 8 need half as many rope_frequencies, not 3"),
        ({"layers": 0}, "layers is 0"),
        ({"width": 16.0}, "width is 16.0"),
        ({"max_context": -5}, "max_context is -5"),
        ({"is_tied": "false"}, "is_tied is 'false'"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon is nan, must be finite"),
        ({"norm_epsilon": -1.0}, r"norm_epsilon is -1\.0, must be finite and above 0"),
        ({"rope_frequencies": (1.0, 1j, 0.1)}, r"rope_frequencies\[1\] is 1j, must be finite"),
        ({"rope_frequencies": (1.0, 0.1, 1e300)}, r"rope_frequencies\[2\] is 1e\+300"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 14}, r"params\.embedding has shape \(13, 16\), its config asks for \(14, 16\)"),
        ({"hidden": 23}, r"params\.layers\[0\]\.gate has shape \(24, 16\), .* \(23, 16\)"),
        ({"layers": 3}, "params have 2 layers, config has 3"),
        ({"is_tied": True}, r"params\.head has shape \(13, 16\), its config asks for None"),
        ({"has_biases": False}, r"layers\[0\]\.query_bias has shape \(24,\), .* asks for None"),
    ],
)
def test_weights_of_another_network_are_named_with_both_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        llama(dataclasses.replace(CONFIG, **change), shapes(jnp.float32))


def test_a_missing_weight_is_an_error():
    params = dataclasses.replace(shapes(jnp.float32), head=None)
    with pytest.raises(ValueError, match=r"params\.head has shape None, .* asks for \(13, 16\)"):
        llama(CONFIG, params)
