"""What drafters propose, held against plain Python that proposes the same."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import row_after
from helpers.small import DRAFT, LENGTH, VOCAB, matches_of, provider

import jaxspec as js
from jaxspec.draft import (
    AdaptiveModelTree,
    BestFirstTree,
    FusedDrafter,
    Lookup,
    ModelTree,
    NGramTree,
    View,
    model_path,
)
from jaxspec.models import fit_ngram

SLOTS = 24
REPEATING = ([1, 2, 3, 4, 1, 2, 3], [0], [2, 2, 2], [0, 1, 0, 1, 0], [3, 1, 4, 1, 0, 2, 3, 1, 4])


def view_of(texts: Sequence[Sequence[int]], nodes: int, depth: int | Sequence[int]) -> View:
    batch = len(texts)
    tokens = np.full((batch, SLOTS), 3, np.int32)  # what stands after a text is no padding
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return View(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray([len(text) for text in texts], jnp.int32),
        depth=jnp.broadcast_to(jnp.asarray(depth, jnp.int32), (batch,)),
        pairs=jnp.zeros((batch, nodes, 2)),
        temperature=jnp.ones(batch),
        top_k=jnp.full(batch, VOCAB, jnp.int32),
        top_p=jnp.ones(batch),
    )


def proposed(
    drafter: FusedDrafter, texts: Sequence[Sequence[int]], depth: int | Sequence[int]
) -> list[list[tuple[int, ...]]]:
    """The paths from the root to each node, row by row in node order; the trees are checked."""
    view = view_of(texts, drafter.capacity.max_nodes, depth)
    draft, _ = jax.jit(lambda params, view: drafter.propose(params, None, (), view))(
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


def test_what_stands_after_a_text_is_never_copied() -> None:
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
    drafter: FusedDrafter, texts: Sequence[Sequence[int]]
) -> list[list[tuple[int, ...]]]:
    """What a drafter with a network proposes after each text, its cache filled as the loop does."""
    from jaxspec.models.batched import BatchedNetwork

    assert drafter.model is not None
    blocks = BatchedNetwork(drafter.model, LENGTH, 1)

    @jax.jit
    def propose(params: Any, view: View) -> js.Tree:
        cache = blocks.prefill(params, blocks.empty_cache(), view.tokens, jnp.int32(0), 8)
        draft, _ = drafter.propose(params, blocks, cache, view)
        return jax.tree.map(lambda x: x[0], draft.proposal.tree)

    views = [view_of([text], drafter.capacity.max_nodes, drafter.first_depth) for text in texts]
    return [paths_of(propose(drafter.params, view)) for view in views]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lookup({}), "lengths are empty"),
        (lambda: Lookup({2: 0}), "a draft is 0: must be a whole number, at least 1"),
        (lambda: Lookup({2: 2.5}), "a draft is 2.5: must be a whole number"),
        (lambda: Lookup({True: 2}), "a match is True: must be a whole number"),
        (lambda: Lookup(matches=0), "matches is 0"),
        (lambda: Lookup(max_nodes=1), "max_nodes, the root counted, is 1"),
        (lambda: NGramTree(fit_ngram("ab", 0), (1,)), "an n-gram model of order 0"),
        (lambda: NGramTree(fit_ngram("ab", 1), (3,)), "more than the 2 tokens"),
        (lambda: NGramTree(fit_ngram("ab", 1), ()), "one width of at least 1"),
        (lambda: model_path(DRAFT, 0), "depth is 0: must be a whole number, at least 1"),
        (lambda: ModelTree(DRAFT, (6,), js.RULES["point_mass"]), "more than the 5 tokens"),
        (lambda: ModelTree(DRAFT, (2,), js.RULES["token"]), "rule 'token' is for paths"),
        (lambda: BestFirstTree(DRAFT, beam=6), "a beam of 1 to 5 tokens"),
        (lambda: BestFirstTree(DRAFT, depth=1.5), "depth is 1.5: must be a whole number"),
        (lambda: ModelTree(DRAFT, (1.5,), js.RULES["token"]), "is 1.5"),
        (lambda: AdaptiveModelTree(DRAFT, widths=(-3,)), "one of them is -3"),
        (lambda: BestFirstTree(DRAFT, max_nodes=80), "from 2 to 53"),
    ],
)
def test_drafters_that_are_none_are_refused_with_the_reason(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


NGRAM = fit_ngram("abcab", 2)
LIKELY = js.RULES["point_mass"]
NO_NETWORK = "is of type Provider: must be a jaxspec.models.network.LanguageModel, such as models"
NO_WIDTHS = ": must be a sequence of widths, one for each depth, such as (2, 1)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelTree(provider(0.0, 1.0), (2,), LIKELY), f"model {NO_NETWORK}"),
        (lambda: ModelTree("llama", (2,), LIKELY), "model is 'llama', of type str: must be"),
        (lambda: model_path(provider(0.0, 1.0), 2), f"model {NO_NETWORK}"),
        (lambda: BestFirstTree(provider(0.0, 1.0)), f"model {NO_NETWORK}"),
        (lambda: AdaptiveModelTree(provider(0.0, 1.0)), f"model {NO_NETWORK}"),
        (
            lambda: ModelTree(DRAFT, (2,), "point_mass"),
            'of type str: must be a jaxspec.Rule, RULES["point_mass"]',
        ),
        (
            lambda: ModelTree(DRAFT, (2,), "tokens"),
            "rule is 'tokens', of type str: must be a jaxspec.Rule, one of RULES: token, block,",
        ),
        (lambda: model_path(DRAFT, 2, "block"), 'RULES["block"]'),
        (lambda: ModelTree(DRAFT, (1,), None), "rule is None: must be a jaxspec.Rule"),
        (lambda: ModelTree(DRAFT, (1,), js.verify_path), "must be a jaxspec.Rule"),
        (lambda: ModelTree(DRAFT, (1,), js.Rule), "rule is the class Rule: must be"),
        (lambda: ModelTree(DRAFT, 2, LIKELY), f"widths is 2, of type int{NO_WIDTHS}"),
        (lambda: ModelTree(DRAFT, {2}, LIKELY), f"widths is of type set{NO_WIDTHS}"),
        (lambda: NGramTree(NGRAM, 2), f"widths is 2, of type int{NO_WIDTHS}"),
        (lambda: NGramTree(NGRAM, np.array([2, 1])), f"of type ndarray{NO_WIDTHS}"),
        (
            lambda: AdaptiveModelTree(DRAFT, widths=4),
            "widths is 4, of type int: must be a sequence of block widths, such as (1, 8)",
        ),
        (lambda: AdaptiveModelTree(DRAFT, 4), "policy is 4, of type int: must be an Ad"),
        (lambda: AdaptiveModelTree(DRAFT, None), "policy is None: must be an AdaptiveTreeP"),
        (lambda: model_path(DRAFT, None), "depth is None: must be a whole number"),
        (lambda: model_path(DRAFT, (1, 1)), "depth is (1, 1): must be a whole number"),
        (
            lambda: NGramTree(DRAFT, (1,)),
            "ngram is of type LanguageModel: must be a jaxspec.models.NGram, such as fit_ngram",
        ),
        (lambda: NGramTree(NGRAM.provider("ab"), (1,)), "ngram is of type Provider: must be"),
        (
            lambda: Lookup([3, 2]),
            "lengths is of type list: must be a mapping from the length of a match to the tokens",
        ),
        (lambda: Lookup(3), "lengths is 3, of type int: must be a mapping"),
        (lambda: Lookup(None), "lengths is None: must be a mapping"),
    ],
)
def test_arguments_of_another_kind_are_named_with_what_to_give_instead(make, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
