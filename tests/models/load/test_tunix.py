"""Networks of google-tunix: trees, roll-back and kept slots against their own plain forward."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.networks import tree_block

import jaxspec as js
from jaxspec.decode import CachedNetwork, Decoder
from jaxspec.decode.target import node_contexts
from jaxspec.draft import FixedTree
from jaxspec.models import Block, CacheError, Provider, Softmax, from_tunix

tunix = pytest.importorskip("tunix", reason="needs google-tunix: the extra tunix")
# Of the library and of flax, which it uses in ways that flax is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore")

SLOTS = 20
VOCAB = 11
WINDOW = 6
SIZES = {
    "num_layers": 2,
    "embed_dim": 16,
    "hidden_dim": 24,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
}
ROPE = {"vocab_size": VOCAB, "rope_theta": 10000, "norm_eps": 1e-5}
TEXT = tuple(np.random.default_rng(1).integers(VOCAB, size=SLOTS).tolist())
PARENTS = [-1, 0, 0, 1, 1, 4]


def llama3(rngs: Any, **options: Any) -> Any:
    from tunix.models.llama3.model import Llama3, ModelConfig

    return Llama3(ModelConfig(**SIZES, **ROPE, **options), rngs=rngs)


def qwen2(rngs: Any, **options: Any) -> Any:
    from tunix.models.qwen2.model import ModelConfig, Qwen2

    return Qwen2(ModelConfig(**SIZES, **ROPE, **options), rngs=rngs)


def qwen3(rngs: Any) -> Any:
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    exact = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    return Qwen3(ModelConfig(**SIZES, **ROPE, **exact), rngs=rngs)


def gemma2(rngs: Any) -> Any:
    """Every other layer sees a window that is shorter than the texts here."""
    from tunix.models.gemma.model import AttentionType, Gemma, ModelConfig

    return Gemma(
        ModelConfig(
            **SIZES,
            num_embed=VOCAB,
            final_logit_softcap=30.0,
            attn_logits_soft_cap=50.0,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=(AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL),
            sliding_window_size=WINDOW,
        ),
        rngs=rngs,
    )


def gemma3(rngs: Any) -> Any:
    from tunix.models.gemma3.model import Gemma3, ModelConfig

    config = ModelConfig(
        **SIZES, num_embed=VOCAB, sliding_window_size=SLOTS, param_dtype=jnp.float32
    )
    return Gemma3(config, rngs=rngs)


class Network:
    """A tunix network of random weights, its own plain forward and ours."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        from flax import nnx

        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        graph, params = nnx.split(shapes)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), params
        )
        self.module = nnx.merge(graph, params)
        self.model = from_tunix(self.module)
        self.run = jax.jit(self.model.forward)
        self.score = jax.jit(
            lambda params, cache, tree, root: self.model.guarded(
                params, cache, tree_block(tree, root, SLOTS)
            )
        )
        self.keep = jax.jit(self.model.keep)

        @jax.jit
        def plain(tokens: jax.Array) -> jax.Array:
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                places = jnp.arange(SLOTS)[None]
                causal = jnp.tri(SLOTS, dtype=bool)[None]
                return nnx.merge(graph, params)(tokens[None], places, None, causal)[0][0]

        self.plain = plain

    def logits_after(self, context: tuple[int, ...]) -> np.ndarray:
        """Run tunix over the whole text, without a cache."""
        tokens = np.zeros(SLOTS, np.int32)
        tokens[: len(context)] = context
        return np.asarray(self.plain(tokens))[len(context) - 1]

    def fed(self, tokens: tuple[int, ...], at: int, cache: Any) -> tuple[np.ndarray, Any]:
        """Run five tokens of a text."""
        block = Block.of_text(np.asarray(tokens, np.int32), np.int32(at), SLOTS)
        logits, cache = self.run(self.model.params, cache, block)
        return np.asarray(logits), cache

    def filled(self) -> Any:
        """A cache that holds ten tokens of the text."""
        _, cache = self.fed(TEXT[:5], 0, self.model.init_cache(SLOTS))
        return self.fed(TEXT[5:10], 5, cache)[1]


network_of = functools.cache(Network)


@pytest.fixture(scope="module", params=[llama3, qwen2, qwen3, gemma2, gemma3])
def network(request: pytest.FixtureRequest) -> Network:
    return network_of(request.param)


def six_nodes(root: int) -> js.Tree:
    return js.make_tree([root, 1, 2, 3, 4, 5], PARENTS)


def assert_rows_of_paths(network: Network, cache: Any, text: tuple[int, ...]) -> Any:
    """Score a tree after a text that a cache holds but for its last token."""
    tree = six_nodes(text[-1])
    logits, after = network.score(network.model.params, cache, tree, np.int32(len(text) - 1))
    for node, context in enumerate(node_contexts(tree, text)):
        expected = network.logits_after(context)
        assert np.ptp(expected) > 0.1
        np.testing.assert_allclose(logits[node], expected, atol=1e-5)
    return after


def test_a_tree_has_the_rows_of_its_paths_and_what_is_kept_is_text(network: Network) -> None:
    after = assert_rows_of_paths(network, network.filled(), TEXT[:10])
    kept = network.keep(after, np.int32(9), np.array([0, 1, 4, -1], np.int32))
    for new, old in zip(jax.tree.leaves(kept), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[:, 9:12], old[:, [9, 10, 13]])
        np.testing.assert_array_equal(new[:, :9], old[:, :9])
    assert_rows_of_paths(network, kept, (*TEXT[:10], 1, 4, 7))


def test_a_block_overwrites_its_slots_and_no_others(network: Network) -> None:
    other = (7, 7, 8, 9, 10)
    longer = network.fed(other, 10, network.filled())[1]
    rows, again = network.fed(other, 4, longer)
    for place in range(5):
        expected = network.logits_after((*TEXT[:4], *other[: place + 1]))
        np.testing.assert_allclose(rows[place], expected, atol=1e-5)
    for new, old in zip(jax.tree.leaves(again), jax.tree.leaves(longer), strict=True):
        np.testing.assert_array_equal(new[:, :4], old[:, :4])
        np.testing.assert_array_equal(new[:, 9:], old[:, 9:])
        assert (new[:, 4:9] != old[:, 4:9]).any()


@pytest.fixture(scope="module")
def llama() -> Network:
    return network_of(llama3)


def test_each_sequence_of_a_batch_has_its_own_write_index(llama: Network) -> None:
    starts = np.array([0, 3, 10], np.int32)
    blocks = np.array([TEXT[:5], TEXT[3:8], TEXT[10:15]], np.int32)
    cache = llama.filled()

    def one(params: Any, tokens: jax.Array, at: jax.Array, cache: Any) -> Any:
        return llama.model.forward(params, cache, Block.of_text(tokens, at, SLOTS))

    batched = jax.jit(jax.vmap(one, in_axes=(None, 0, 0, None)))
    rows, caches = batched(llama.model.params, blocks, starts, cache)
    for each, at in enumerate(starts.tolist()):
        alone, after = llama.fed(tuple(blocks[each].tolist()), at, cache)
        np.testing.assert_allclose(rows[each], alone, atol=1e-6)
        for new, old in zip(jax.tree.leaves(caches), jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(new[each], old, atol=1e-6)


def test_the_host_loop_gives_the_text_of_plain_greedy_decoding(llama: Network) -> None:
    attention = CachedNetwork(llama.model, slots=SLOTS, chunk=4, transform=Softmax(0))
    rough = Provider("rough", VOCAB, ask=lambda c: llama.logits_after(c[-3:]), transform=Softmax())
    decoder = Decoder(attention, FixedTree(rough, (2, 1)), new_tokens=12)
    text = TEXT[:3]
    for _ in range(12):
        text = (*text, int(llama.logits_after(text).argmax()))
    state = decoder.run(TEXT[:3], jax.random.key(0))
    assert state.tokens == text
    assert len(state.rounds) < 12


def test_networks_that_ignore_masks_or_take_a_block_only_somewhere_are_rejected() -> None:
    class Qwen2:
        config = type("Config", (), {"use_flash_attention": True})

    class Gemma4:
        config = None

    with pytest.raises(CacheError, match="flash attention, which ignores the mask"):
        from_tunix(Qwen2())
    with pytest.raises(CacheError, match="Gemma4 is a Gemma4: only the caches of Gemma, Gemma3, "):
        from_tunix(Gemma4())
    with pytest.raises(CacheError, match="mine is a dict: only"):
        from_tunix({}, name="mine")


def test_a_sliding_window_limits_blocks_or_the_cache(network: Network) -> None:
    kind = network.model.name
    if kind == "Gemma3":
        with pytest.raises(CacheError, match=r"cache of 21 slots .* sliding window of 20"):
            network.model.init_cache(SLOTS + 1)
    elif kind == "Gemma":
        tree = js.make_tree([1] * 7, [-1, 0, 1, 2, 3, 4, 5])
        with pytest.raises(CacheError, match=r"block of 7 tokens .* sliding window of 6"):
            network.score(network.model.params, network.model.init_cache(SLOTS), tree, np.int32(0))
    else:
        assert network.model.init_cache(1000)["layer_1"]["k"].shape == (1, 1000, 2, 8)


def test_vocabulary_dtype_and_names_are_those_of_the_network(network: Network) -> None:
    assert network.model.vocab == VOCAB
    assert network.model.takes_trees
    half = from_tunix(network.module, name="half", dtype=jnp.bfloat16, max_context=8)
    assert half.name == "half"
    assert half.max_context == 8
    assert jax.tree.leaves(half.init_cache(3))[0].dtype == jnp.bfloat16
