"""A tree scored with one forward: the rows of its paths, the cache it leaves, the host loop."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import fake_model, row_after
from helpers.networks import CONFIG, tiny_llama, tree_block

import jaxspec as js
from jaxspec.decode import CachedNetwork, CallableTarget
from jaxspec.decode.target import node_contexts
from jaxspec.models import Block, LanguageModel, Provider, Softmax, Usage, audit_provider
from jaxspec.models.provider import Context
from jaxspec.trees import ancestor_mask

SLOTS = 32
NODES = 8
DEPTH = 4
CHUNK = 4
VOCAB = CONFIG.vocab
LLAMA = tiny_llama()
FAKE = fake_model(VOCAB)
TEXT = tuple(np.random.default_rng(5).integers(VOCAB, size=40).tolist())


@functools.partial(jax.jit, static_argnums=0)
def run(forward: Any, *arguments: Any) -> Any:
    return forward(*arguments)


def from_scratch(
    model: LanguageModel,
    tokens: tuple[int, ...],
    positions: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, Any]:
    """Run a network over all that its cache has room for, without more a whole text."""
    padded = jnp.asarray(np.pad(tokens, (0, SLOTS - len(tokens))), jnp.int32)
    block = Block.of_text(padded, 0, SLOTS)
    changed = {"positions": positions, "mask": mask}
    block = dataclasses.replace(block, **{k: v for k, v in changed.items() if v is not None})
    logits, cache = run(model.forward, model.params, model.init_cache(SLOTS), block)
    return np.asarray(logits), cache


def logits_from_scratch(model: LanguageModel, context: Context) -> np.ndarray:
    return from_scratch(model, context)[0][len(context) - 1]


SCRATCH = CallableTarget(
    Provider("scratch", VOCAB, functools.partial(logits_from_scratch, LLAMA), transform=Softmax()),
    "node",
)


def target_of(model: LanguageModel, **options: Any) -> CachedNetwork:
    return CachedNetwork(model, **{"slots": SLOTS, "chunk": CHUNK, **options})


def grown(tokens: list[int], parents: list[int], **options: Any) -> js.Tree:
    """A tree of the one capacity that all trees here have."""
    capacity = {"max_nodes": NODES, "max_children": NODES, "max_depth": DEPTH}
    return js.make_tree(tokens, parents, **capacity, **options)


def random_tree(seed: int, root: int) -> js.Tree:
    rng = np.random.default_rng(seed)
    parents, depths = [-1], [0]
    for node in range(1, int(rng.integers(1, NODES + 1))):
        parents.append(int(rng.choice([n for n in range(node) if depths[n] < DEPTH])))
        depths.append(depths[parents[-1]] + 1)
    tokens = [root, *rng.integers(VOCAB, size=len(parents) - 1).tolist()]
    return grown(tokens, parents, distinct_siblings=False)


# 0: root, 1 and 2 below it, 3 and 4 below 1, 5 below 4
PARENTS = [-1, 0, 0, 1, 1, 4]


def six_nodes(root: int, tokens: tuple[int, ...] = (3, 4, 5, 6, 7)) -> js.Tree:
    return grown([root, *tokens], PARENTS)


# --- rows


def test_a_tree_scored_at_once_has_the_rows_of_each_path_scored_alone() -> None:
    target = target_of(LLAMA)
    for seed, length in enumerate([1, 2, 4, 5, 9, 13, 25, 3]):
        context = TEXT[:length]
        tree = random_tree(seed, context[-1])
        expected = SCRATCH.rows(tree, context, bonus=True)
        scores = target.rows(tree, context, bonus=True)
        np.testing.assert_allclose(scores.rows, expected.rows, atol=1e-5)
        assert scores.usage.queries == expected.usage.queries
        assert scores.batches == 1
        without = target.rows(tree, context)
        asked = without.rows.any(axis=1)
        np.testing.assert_array_equal(without.rows[asked], scores.rows[asked])
        assert without.usage == Usage(SCRATCH.rows(tree, context).usage.queries, 1)


def test_rows_of_the_fake_are_exact_whatever_the_tree() -> None:
    target = target_of(FAKE)
    softmax = Softmax()
    for seed, length in enumerate([1, 3, 4, 5, 8, 20, 7, 7, 8]):
        context = TEXT[:length]
        tree = random_tree(seed + 50, context[-1])
        rows = target.rows(tree, context, bonus=True).rows
        for node, each in enumerate(node_contexts(tree, context)):
            np.testing.assert_array_equal(rows[node], softmax(row_after(each, VOCAB)))


ROOTS = (4, 9, 1)  # positions of the roots of a ragged batch


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


class Batch:
    """Trees after texts of several lengths. The caches hold a longer text, stale from the root on."""

    def __init__(self, model: LanguageModel) -> None:
        self.params = model.params
        self.caches = stacked([from_scratch(model, TEXT[:SLOTS])[1]] * len(ROOTS))
        self.trees = stacked([six_nodes(TEXT[at]) for at in ROOTS])
        self.roots = jnp.asarray(ROOTS, jnp.int32)

        def one(params: Any, cache: Any, tree: js.Tree, root: jax.Array) -> Any:
            return model.guarded(params, cache, tree_block(tree, root, SLOTS))

        self._score = jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0)))

    def score(self, **changed: Any) -> tuple[np.ndarray, Any]:
        """Score, with other `caches`, `trees` or `roots`."""
        given = {"caches": self.caches, "trees": self.trees, "roots": self.roots, **changed}
        logits, caches = self._score(self.params, *given.values())
        return np.asarray(logits), caches

    def with_tokens(self, tokens: jax.Array) -> js.Tree:
        return dataclasses.replace(self.trees, tokens=tokens)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch(LLAMA)


def test_a_ragged_batch_of_trees_has_the_rows_of_each_path(batch: Batch) -> None:
    logits, _ = batch.score()
    for each, at in enumerate(ROOTS):
        for node, context in enumerate(node_contexts(six_nodes(TEXT[at]), TEXT[: at + 1])):
            expected = logits_from_scratch(LLAMA, context)
            np.testing.assert_allclose(logits[each, node], expected, atol=1e-5)


def test_a_node_stands_at_the_position_of_its_depth_and_in_a_slot_of_its_own() -> None:
    _, after = Batch(FAKE).score()
    for each, at in enumerate(ROOTS):
        positions = after.positions[each, at : at + len(PARENTS)] - at
        assert positions.tolist() == [0, 1, 1, 2, 2, 3]
        tokens = after.tokens[each, at : at + len(PARENTS)]
        assert tokens.tolist() == [TEXT[at], 3, 4, 5, 6, 7]


def test_flat_positions_would_be_seen() -> None:
    at, tree = 6, six_nodes(TEXT[6])
    expected = [logits_from_scratch(LLAMA, each) for each in node_contexts(tree, TEXT[: at + 1])]
    mask = np.tri(SLOTS, dtype=bool)
    mask[at : at + NODES, at : at + NODES] = ancestor_mask(tree)
    tokens = (*TEXT[:at], *tree.tokens[: len(PARENTS)].tolist())
    flat = np.arange(SLOTS, dtype=np.int32)
    by_depth = flat.copy()
    by_depth[at : at + len(PARENTS)] = at + np.array([0, 1, 1, 2, 2, 3])
    errors = [
        np.abs(from_scratch(LLAMA, tokens, positions, mask)[0][at : at + 6] - expected).max(axis=1)
        for positions in (by_depth, flat)
    ]
    assert errors[0].max() < 1e-5
    assert (errors[1] > 1e-3).tolist() == [False, False, True, True, True, True]


def test_padding_and_stale_slots_change_nothing_bit_for_bit(batch: Batch) -> None:
    clean, _ = batch.score()
    tokens = np.array(batch.trees.tokens)
    tokens[:, len(PARENTS) :] = 9
    is_stale = (np.arange(SLOTS) >= np.array(ROOTS)[:, None])[:, None, :, None]
    dirty, _ = batch.score(
        trees=batch.with_tokens(jnp.asarray(tokens)),
        caches=jax.tree.map(lambda x: jnp.where(is_stale, 1e4, x), batch.caches),
    )
    real = len(PARENTS)
    np.testing.assert_array_equal(dirty[:, :real], clean[:, :real])
    assert (dirty[:, real:] != clean[:, real:]).any()


def test_a_node_sees_its_ancestors_and_no_other_node(batch: Batch) -> None:
    clean, _ = batch.score()
    below = {1: [1, 3, 4, 5], 2: [2], 3: [3], 4: [4, 5], 5: [5]}
    for node, changed in below.items():
        other, _ = batch.score(trees=batch.with_tokens(batch.trees.tokens.at[:, node].set(10)))
        is_same = np.all((other == clean)[:, : len(PARENTS)], axis=2)
        assert is_same.tolist() == [[n not in changed for n in range(len(PARENTS))]] * len(ROOTS)


# --- the cache of the accepted path


def test_an_accepted_path_is_moved_bit_for_bit_ragged_across_a_batch(batch: Batch) -> None:
    _, after = batch.score()
    paths = [[0, 1, 4, 5, -1], [0, -1, -1, -1, -1], [0, 2, -1, -1, -1]]
    kept = jax.jit(jax.vmap(LLAMA.keep))(after, batch.roots, jnp.asarray(paths, jnp.int32))
    for new, old in zip(jax.tree.leaves(kept), jax.tree.leaves(after), strict=True):
        for each, (at, path) in enumerate(zip(ROOTS, paths, strict=True)):
            for place, node in enumerate(path):
                if node >= 0:
                    np.testing.assert_array_equal(new[each, :, at + place], old[each, :, at + node])
            beyond = at + len(path)
            np.testing.assert_array_equal(new[each, :, :at], old[each, :, :at])
            np.testing.assert_array_equal(new[each, :, beyond:], old[each, :, beyond:])
    drafted = batch.trees.tokens.tolist()
    texts = [
        (*TEXT[:at], *(drafted[each][node] for node in path if node >= 0))
        for each, (at, path) in enumerate(zip(ROOTS, paths, strict=True))
    ]
    logits, _ = batch.score(
        caches=kept,
        trees=stacked([six_nodes(8) for _ in ROOTS]),
        roots=jnp.asarray([len(text) for text in texts], jnp.int32),
    )
    for each, text in enumerate(texts):
        for node, context in enumerate(node_contexts(six_nodes(8), (*text, 8))):
            expected = logits_from_scratch(LLAMA, context)
            np.testing.assert_allclose(logits[each, node], expected, atol=1e-5)


# --- a memo, not a state


def test_a_row_does_not_depend_on_what_was_asked_before() -> None:
    used = target_of(LLAMA)
    rng = np.random.default_rng(0)
    cases = []
    for seed in range(12):
        length = int(rng.integers(1, 24))
        start = TEXT[:length] if seed % 3 else (*TEXT[: length // 2], *TEXT[20 : 20 + length // 2])
        start = start or TEXT[:1]
        cases.append((start, random_tree(seed, start[-1])))
    seen = [used.rows(tree, context, bonus=True).rows for context, tree in cases]
    audit_provider(used.provider(), [context for context, _ in cases])
    for (context, tree), rows in reversed(list(zip(cases, seen, strict=True))):
        fresh = target_of(LLAMA)
        np.testing.assert_array_equal(fresh.rows(tree, context, bonus=True).rows, rows)
        np.testing.assert_array_equal(used.rows(tree, context, bonus=True).rows, rows)


def test_only_what_is_new_of_a_context_is_fed() -> None:
    calls = []
    for chunk in (1, CHUNK):
        target = target_of(FAKE, chunk=chunk)
        contexts = [(*TEXT[: length - 1], 3) for length in (13, 13, 14, 18, 17, 6, 14)]
        calls.append([target.rows(six_nodes(3), each).usage.calls for each in contexts])
    # The tree takes one, and a chunk each that lies before the last token and is not held.
    assert calls == [[13, 1, 2, 5, 1, 1, 9], [4, 1, 1, 2, 1, 1, 3]]


def test_a_text_growing_by_a_token_costs_a_forward_each() -> None:
    for chunk in (1, CHUNK):
        target = target_of(FAKE, chunk=chunk)
        provider = target.provider("by name")
        assert provider.name == "by name"
        for length in range(1, 14):
            rows, _ = provider.rows([TEXT[:length]])
            np.testing.assert_array_equal(rows[0], Softmax()(row_after(TEXT[:length], VOCAB)))
        assert target.forwards == 13
