"""What drafters propose in a compiled program, compared with plain Python."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.fake_model import row_after
from helpers.small import DRAFT, LENGTH, VOCAB, matches_of

import jaxspec as js
from jaxspec.draft import BestFirstTree, Drafter, Lookup, NGramTree, Shape, View
from jaxspec.draft.drivers import propose_compiled
from jaxspec.models import fit_ngram
from jaxspec.models.batched import BatchedNetwork
from jaxspec.sampling import Sampling

SLOTS = 24
REPEATING = ([1, 2, 3, 4, 1, 2, 3], [0], [2, 2, 2], [0, 1, 0, 1, 0], [3, 1, 4, 1, 0, 2, 3, 1, 4])


def view_of(texts: Sequence[Sequence[int]], nodes: int, depth: int | Sequence[int]) -> View:
    batch = len(texts)
    tokens = np.full((batch, SLOTS), 3, np.int32)  # what follows a text is not padding
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return View(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray([len(text) for text in texts], jnp.int32),
        depth=jnp.broadcast_to(jnp.asarray(depth, jnp.int32), (batch,)),
        pairs=jnp.zeros((batch, nodes, 2)),
        sampling=Sampling(
            temperature=jnp.ones(batch),
            top_k=jnp.full(batch, VOCAB, jnp.int32),
            top_p=jnp.ones(batch),
            min_p=jnp.zeros(batch),
        ),
    )


def proposed(
    drafter: Drafter, texts: Sequence[Sequence[int]], depth: int | Sequence[int]
) -> list[list[tuple[int, ...]]]:
    """The paths from the root to each node, row by row in node order; the trees are checked."""
    view = view_of(texts, drafter.capacity.max_nodes, depth)
    draft, _ = jax.jit(lambda params, view: propose_compiled(drafter, params, None, (), view))(
        drafter.params, view
    )
    return [
        paths_of(jax.tree.map(lambda x, r=row: x[r], draft.proposal.tree))
        for row in range(len(texts))
    ]


def paths_of(tree: js.Tree) -> list[tuple[int, ...]]:
    count = int(tree.num_nodes)
    checked = js.make_tree(
        np.asarray(tree.tokens)[:count],
        np.asarray(tree.parents)[:count],
        max_nodes=tree.max_nodes,
        max_children=tree.max_children,
        max_depth=tree.max_depth,
    )
    jax.tree.map(np.testing.assert_array_equal, tree, checked)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(
        np.asarray(tree.tokens)[1:count].tolist(),
        np.asarray(tree.parents)[1:count].tolist(),
        strict=True,
    ):
        paths.append((*paths[parent], token))
    return paths[1:]


LENGTHS = {3: 5, 2: 4, 1: 2}


def test_lookup_copies_what_followed_the_longest_and_then_latest_match() -> None:
    texts = [*REPEATING, [1, 2, 0, 1, 2]]
    for depth in (5, 3, 0):
        for text, paths in zip(texts, proposed(Lookup(LENGTHS), texts, depth), strict=True):
            best = [*matches_of(text, LENGTHS), ()][0][:depth]
            assert paths == [best[:end] for end in range(1, len(best) + 1)], text


def test_a_lookup_tree_is_the_merged_matches_level_by_level() -> None:
    drafter = Lookup(LENGTHS, matches=3)
    for depth in (5, 2):
        for text, paths in zip(REPEATING, proposed(drafter, REPEATING, depth), strict=True):
            copies = [copied[:depth] for copied in matches_of(text, LENGTHS)[:3]]
            wanted = {copied[:end] for copied in copies for end in range(1, len(copied) + 1)}
            assert set(paths) == wanted
            assert [len(path) for path in paths] == sorted(len(path) for path in paths)
            assert len(paths) == len(wanted)


def test_a_lookup_tree_over_its_budget_leaves_off_the_deepest_nodes() -> None:
    whole = proposed(Lookup(LENGTHS, matches=3), REPEATING, 5)
    cut = proposed(Lookup(LENGTHS, matches=3, max_nodes=5), REPEATING, 5)
    for paths, fewer in zip(whole, cut, strict=True):
        assert fewer == [path for path in paths if len(path) <= 4][:4]


def test_what_follows_a_text_is_never_copied() -> None:
    text = [0, 1, 2, 0, 1]
    (path,) = proposed(Lookup({2: 9}), [text], 9)
    assert path[-1] == (2, 0, 1, 2, 0, 1, 2, 0, 1)


TEXT = "abcabdabcabeabcab"


def test_an_ngram_tree_takes_the_most_probable_tokens_of_the_models_own_rows() -> None:
    model = fit_ngram(TEXT, 3)
    drafter = NGramTree(model, (2, 1, 2))
    texts = [[0], [0, 1], [4, 4, 0, 1], [2, 0, 1], [1, 1]]
    for depth in (3, 1):
        for text, paths in zip(texts, proposed(drafter, texts, depth), strict=True):
            level: list[tuple[int, ...]] = [()]
            wanted = []
            for width in (2, 1, 2)[:depth]:
                level = [
                    (*path, int(token))
                    for path in level
                    for token in np.argsort(-np.asarray(model.row([*text, *path])), kind="stable")[
                        :width
                    ]
                ]
                wanted += level
            assert paths == wanted, text


def test_an_ngram_tree_of_irregular_shape_takes_the_ranks_of_its_choices() -> None:
    model = fit_ngram(TEXT, 3)
    choices = [(0,), (1,), (2,), (0, 1), (1, 0), (0, 0)]
    (paths,) = proposed(NGramTree(model, Shape.of_choices(choices)), [[0, 1]], 2)
    for choice, path in zip(sorted(choices, key=lambda c: (len(c), c)), paths, strict=True):
        for place, rank in enumerate(choice):
            row = np.asarray(model.row([0, 1, *path[:place]]))
            assert path[place] == np.argsort(-row, kind="stable")[rank]


@functools.cache
def log_row(context: tuple[int, ...]) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(row_after(context, VOCAB, noise=0.5)), np.float64)


def test_a_best_first_tree_has_the_most_probable_paths_of_the_draft() -> None:
    nodes, depth = 9, 3
    drafter = BestFirstTree(DRAFT, max_nodes=nodes, beam=VOCAB, depth=depth)
    texts = ([1, 2, 3], [0, 4], [2, 2, 1, 0])
    for text, paths in zip(texts, paths_in_the_loop(drafter, texts), strict=True):
        scores = {
            path: sum(log_row((*text, *path[:place]))[token] for place, token in enumerate(path))
            for length in range(1, depth + 1)
            for path in itertools.product(range(VOCAB), repeat=length)
        }
        best = sorted(scores, key=lambda path: -scores[path])[: nodes - 1]
        assert set(paths) == set(best), text


def paths_in_the_loop(
    drafter: Drafter, texts: Sequence[Sequence[int]]
) -> list[list[tuple[int, ...]]]:
    """What a drafter with a network proposes after each text, its cache filled as the loop does."""
    blocks = BatchedNetwork(DRAFT, LENGTH, 1)

    @jax.jit
    def propose(params: Any, view: View) -> js.Tree:
        cache = blocks.prefill(params, blocks.empty_cache(), view.tokens, jnp.int32(0), 8)
        draft, _ = propose_compiled(drafter, params, blocks, cache, view)
        return jax.tree.map(lambda x: x[0], draft.proposal.tree)

    views = [view_of([text], drafter.capacity.max_nodes, drafter.first_depth) for text in texts]
    return [paths_of(propose(drafter.params, view)) for view in views]
