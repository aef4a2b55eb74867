"""Matrices in panels: the same network, stored for a few tokens at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import Block
from jaxspec.models.llama import LlamaConfig, in_panels, init_llama, llama, rope_frequencies
from jaxspec.models.panels import Panels, cut, dense, whole_of
from training.save import save_huggingface

CONFIG = LlamaConfig(
    vocab=13,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=8,
    hidden=40,  # no multiple of a panel: these matrices stay whole
    rope_frequencies=rope_frequencies(8),
    has_biases=True,
)
SLOTS = 12


@pytest.fixture(scope="module")
def pair():
    model = llama(CONFIG, init_llama(jax.random.key(0), CONFIG))
    layers = tuple(
        dataclasses.replace(
            layer,
            query_bias=jnp.linspace(-1, 1, 32),
            key_bias=jnp.linspace(1, -1, 16),
            value_bias=jnp.linspace(0, 2, 16),
        )
        for layer in model.params.layers
    )
    model = dataclasses.replace(model, params=dataclasses.replace(model.params, layers=layers))
    return model, in_panels(model)


def logits(model, length, batch):
    """Score a block after three tokens."""
    rng = np.random.default_rng(length)
    tokens = rng.integers(0, CONFIG.vocab, (batch, 3 + length)).astype(np.int32)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def of_row(params, tokens):
        cache = model.init_cache(SLOTS)
        for at, block in ((0, tokens[:3]), (3, tokens[3:])):
            rows, cache = model.forward(params, cache, Block.of_text(block, at, SLOTS))
        return rows

    return np.asarray(of_row(model.params, tokens))


@pytest.mark.parametrize(("length", "batch"), [(1, 1), (5, 1), (9, 1), (5, 3)])
def test_a_network_in_panels_gives_the_logits_of_the_network(pair, length, batch):
    plain, panels = (logits(model, length, batch) for model in pair)
    assert np.ptp(plain) > 1
    np.testing.assert_allclose(panels, plain, atol=1e-5)


def test_matrices_of_fitting_width_are_cut_and_others_stay(pair):
    for layer in pair[1].params.layers:
        cut_ones = {name for name, part in vars(layer).items() if isinstance(part, Panels)}
        assert cut_ones == {"query", "key", "value", "output", "down"}
    assert pair[1].params.embedding is pair[0].params.embedding


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cut_matrix_is_restored_and_multiplies_alike(dtype):
    weights = jax.random.normal(jax.random.key(1), (48, 5), dtype)
    panels = cut(weights)
    assert isinstance(panels, Panels)
    assert panels.shape == weights.shape
    np.testing.assert_array_equal(whole_of(panels), weights)
    x = jnp.eye(5, dtype=dtype)[:3]
    np.testing.assert_array_equal(dense(panels, x), weights.T[:3])
    np.testing.assert_array_equal(dense(weights, x), weights.T[:3])


def test_a_network_in_panels_is_saved_as_the_network(tmp_path):
    pytest.importorskip("safetensors")
    config = dataclasses.replace(CONFIG, has_biases=False)
    model = llama(config, init_llama(jax.random.key(2), config))
    for name, params in (("plain", model.params), ("panels", in_panels(model).params)):
        save_huggingface(tmp_path / name, config, params, dtype=np.float32)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "panels")]
    assert weights[0] == weights[1]


def test_a_network_in_panels_stays_as_it_is(pair):
    again = in_panels(pair[1])
    leaves = (jax.tree.leaves(each.params) for each in (again, pair[1]))
    for ours, theirs in zip(*leaves, strict=True):
        assert ours is theirs


def test_only_networks_made_by_llama_are_cut(pair):
    other = dataclasses.replace(pair[0], params={"embedding": jnp.ones((13, 16))}, name="other")
    with pytest.raises(ValueError, match="other was not made by `llama`"):
        in_panels(other)
