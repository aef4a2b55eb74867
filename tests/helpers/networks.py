"""One tiny network for all tests, and the block of a tree."""

import functools

import jax

from jaxspec.models import Block, LanguageModel, LlamaConfig, init_llama, llama, rope_frequencies
from jaxspec.trees import Tree, ancestor_mask, node_depths

CONFIG = LlamaConfig(
    vocab=11,
    width=16,
    layers=2,
    heads=2,
    kv_heads=1,
    head_width=8,
    hidden=24,
    rope_frequencies=rope_frequencies(8),
)


@functools.cache
def tiny_llama(seed: int = 3) -> LanguageModel:
    """A network of two layers and 11 tokens; those of two seeds share one forward."""
    return llama(CONFIG, init_llama(jax.random.key(seed), CONFIG), name=f"tiny {seed}")


def tree_block(tree: Tree, root: jax.Array | int, slots: int) -> Block:
    """The block of a whole tree whose root has slot and position `root`."""
    depths = node_depths(tree)
    return Block.of_tree(tree.tokens, depths, ancestor_mask(tree), root, slots)
