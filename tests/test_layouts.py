"""Layouts of engines: converted both ways nothing is lost, and verdicts are the same."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import linked_sampler

import jaxspec as js
from jaxspec import layouts

SEEDS = range(8)
LONGEST, VOCAB = 3, 5


def rows(rng: np.random.Generator, num: int) -> np.ndarray:
    return rng.dirichlet(np.ones(VOCAB), num).astype(np.float32)


def random_paths(seed: int, *, is_sampled: bool, num: int = 4) -> list[layouts.arrays.Path]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, LONGEST + 1, num)
    return [
        (
            rng.integers(0, VOCAB, size).astype(np.int32),
            rows(rng, size) if is_sampled else None,
            rows(rng, size + 1),
        )
        for size in sizes
    ]


def random_parents(rng: np.random.Generator, num: int) -> np.ndarray:
    parents = [rng.integers(0, node) for node in range(1, num)]
    return np.array([-1, *sorted(parents)], np.int32)


def random_tree(seed: int, num: int = 7) -> js.Tree:
    """Return a tree whose nodes are numbered level by level, with distinct siblings."""
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, num)
    order = {node: rng.permutation(VOCAB + 3) for node in range(num)}
    ranks = [int(np.sum(parents[:node] == parents[node])) for node in range(num)]
    tokens = [order[int(parents[node])][ranks[node]] for node in range(1, num)]
    return js.make_tree([-1, *tokens], parents)


def assert_equal(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


def draws_of(seed: int, num: int, nodes: int) -> js.Draws:
    keys = jax.random.split(jax.random.key(seed), num)
    return jax.vmap(lambda key: js.round_draws(key, nodes).verify)(keys)


def direct(path: layouts.arrays.Path, draws: js.Draws, bonus: bool) -> list[int]:
    """Verify one path as it is."""
    tokens, draft, target = path
    tree = js.chain(jnp.asarray(tokens))
    proposal = js.PointMass(tree=tree)
    if draft is not None:
        proposal = js.WithReplacement(tree=tree, draft_rows=jnp.asarray(draft))
    draws = dataclasses.replace(draws, accept=draws.accept[: len(tokens) + 1])
    verdict = js.verify_path(draws, proposal, jnp.asarray(target), bonus)
    return verdict.tokens[: int(verdict.num_tokens)].tolist()


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_paths_laid_end_to_end_are_cut_into_the_same_paths(seed: int, is_sampled: bool) -> None:
    paths = random_paths(seed, is_sampled=is_sampled)
    batch = layouts.flat_from_paths(paths)
    assert_equal(layouts.paths_from_flat(batch), paths)
    padded = dataclasses.replace(
        batch, draft_token_ids=np.append(batch.draft_token_ids, [9, 9]).astype(np.int32)
    )
    assert_equal(layouts.flat_from_paths(layouts.paths_from_flat(padded)), batch)


def test_places_in_a_flat_batch_are_those_that_vllm_documents() -> None:
    paths = [
        (np.zeros(n, np.int32), None, np.full((n + 1, 2), 0.5, np.float32)) for n in (3, 0, 2, 0, 1)
    ]
    batch = layouts.flat_from_paths(paths)
    assert batch.cu_num_draft_tokens.tolist() == [3, 3, 5, 5, 6]
    assert (batch.first_rows + batch.num_draft_tokens).tolist() == [3, 4, 7, 8, 10]  # bonus rows
    assert batch.target_rows.shape == (11, 2)
    without = layouts.flat_from_paths(paths, has_bonus_rows=False)
    assert without.target_rows.shape == (6, 2)
    assert without.first_rows.tolist() == without.first_tokens.tolist() == [0, 3, 3, 5, 5]


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_sequence_of_a_flat_batch_is_verified_as_its_path_is(is_sampled: bool) -> None:
    def run(batch: layouts.FlatBatch, draws: js.Draws) -> js.Verdict:
        def one(sequence: jax.Array, draws: js.Draws) -> js.Verdict:
            proposal, target = layouts.path_at(batch, sequence, LONGEST)
            return js.verify_path(draws, proposal, target, batch.has_bonus_rows)

        return jax.vmap(one)(jnp.arange(4, dtype=jnp.int32), draws)

    run = jax.jit(run)
    for seed in SEEDS:
        paths = random_paths(seed, is_sampled=is_sampled)
        draws = draws_of(seed, 4, LONGEST + 1)
        wanted = [
            direct(path, jax.tree.map(lambda x, b=b: x[b], draws), True)
            for b, path in enumerate(paths)
        ]
        batch = jax.tree.map(jnp.asarray, layouts.flat_from_paths(paths))
        output = np.asarray(layouts.flat_output(batch, run(batch, draws)))
        assert [[x for x in row if x >= 0] for row in output.tolist()] == wanted
        # Bonus tokens that are drawn already are taken where all candidates are accepted.
        ids = np.array([[tokens[-1]] for tokens in wanted], np.int32)
        batch = jax.tree.map(jnp.asarray, layouts.flat_from_paths(paths, has_bonus_rows=False))
        output = np.asarray(layouts.flat_output(batch, run(batch, draws), ids))
        assert [[x for x in row if x >= 0] for row in output.tolist()] == wanted
        assert output.shape == (4, LONGEST + 1)


def test_rows_of_a_flat_batch_may_be_logits() -> None:
    paths = random_paths(0, is_sampled=True)
    batch = layouts.flat_from_paths(paths)
    logits = js.Logits(values=jnp.log(batch.target_rows), temperature=jnp.float32(1))
    _, target = layouts.path_at(dataclasses.replace(batch, target_rows=logits), 2, LONGEST)
    np.testing.assert_allclose(js.dense_rows(target, len(paths[2][2])), paths[2][2], rtol=1e-5)


@pytest.mark.parametrize("library", [np, jnp])
def test_both_forms_of_output_emit_the_same(library: Any) -> None:
    paths = [(np.zeros(n, np.int32), None, np.full((n + 1, 9), 1 / 9)) for n in (3, 0, 2)]
    batch = jax.tree.map(library.asarray, layouts.flat_from_paths(paths))
    emitted = [[1, 2, 8, -1], [7, -1, -1, -1], [3, 4, 5, -1]]
    vllm = library.asarray(emitted)
    tpu = library.asarray([1, 2, 8, 3, 4, -1, 7, 5])
    for output in (vllm, tpu):
        found = layouts.emitted_from_flat(batch, output, LONGEST)
        assert isinstance(found, np.ndarray if library is np else jax.Array)
        assert found.tolist() == emitted
    jitted = jax.jit(layouts.emitted_from_flat, static_argnums=2)
    assert jitted(batch, tpu, LONGEST).tolist() == emitted


@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_of_assisted_decoding_is_verified_as_its_path_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    q, p = rows(rng, LONGEST), rows(rng, LONGEST + 1)
    q[0, 1] = 0
    path = (np.array([0, 2, 4], np.int32), q / q.sum(axis=1, keepdims=True), p)
    ids, draft, target = layouts.assisted_from_path(path, prompt=(7, 8))
    assert ids.tolist() == [[7, 8, 0, 2, 4]]
    assert draft.shape == (1, LONGEST, VOCAB)
    assert draft[0, 0, 1] == -np.inf
    proposal, found = layouts.path_from_assisted(ids, draft, target)
    assert proposal.tree.tokens.tolist() == [-1, 0, 2, 4]
    np.testing.assert_allclose(js.dense_rows(proposal.draft_rows, LONGEST), path[1], rtol=1e-5)
    np.testing.assert_allclose(js.dense_rows(found, LONGEST + 1), path[2], rtol=1e-5)
    draws = js.round_draws(jax.random.key(seed), LONGEST + 1).verify
    tokens, matches = layouts.assisted_output(js.verify_path(draws, proposal, found, True))
    assert tokens.tolist() == [direct(path, draws, True)]
    assert tokens.shape == (1, matches + 1)


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_linked_tree_is_read_as_the_same_tree(seed: int, library: Any) -> None:
    tree = random_tree(seed)
    tokens, parents = (library.asarray(x) for x in (tree.tokens, tree.parents))
    linked = layouts.linked_from_tree(tokens, parents, first=14)
    found, nodes = layouts.tree_from_linked(linked)
    assert_equal(found, tree)
    assert nodes.tolist() == list(range(7))
    assert linked.retrive_index.tolist() == list(range(14, 21))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linked_tree_in_any_order_is_numbered_level_by_level(seed: int) -> None:
    tree, rng = random_tree(seed), np.random.default_rng(seed)
    linked = layouts.linked_from_tree(np.asarray(tree.tokens), np.asarray(tree.parents))
    place = np.array([0, *(1 + rng.permutation(6))])  # where each node is moved

    def moved(links: np.ndarray) -> np.ndarray:
        found = np.empty(7, np.int32)
        found[place] = np.where(links >= 0, place[links], -1)
        return found

    tokens = np.empty(7, np.int32)
    tokens[place] = linked.candidates
    shuffled = layouts.LinkedTree(
        candidates=tokens,
        retrive_index=linked.retrive_index,
        retrive_next_token=moved(linked.retrive_next_token),
        retrive_next_sibling=moved(linked.retrive_next_sibling),
    )
    found, nodes = layouts.tree_from_linked(shuffled)
    assert_equal(found, tree)
    assert nodes.tolist() == place.tolist()


def test_the_trees_of_sglangs_own_test_are_read() -> None:
    linked = layouts.LinkedTree(
        candidates=np.arange(7, 13),
        retrive_index=np.arange(6, 12),
        retrive_next_token=np.array([4, 2, 3, -1, 5, -1]),
        retrive_next_sibling=np.array([-1, -1, -1, -1, 1, -1]),
    )
    tree, nodes = layouts.tree_from_linked(linked)
    assert nodes.tolist() == [0, 4, 1, 5, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2, 4]
    assert tree.tokens.tolist() == [7, 11, 8, 12, 9, 10]


def play_linked(
    linked: layouts.LinkedTree, coins: np.ndarray, final: float, target: np.ndarray
) -> tuple[list, list, int]:
    names = [field.name for field in dataclasses.fields(linked)]
    predicts, index, num = linked_sampler()(
        **{name: np.asarray(getattr(linked, name))[None] for name in names},
        uniform_samples=coins[None],
        uniform_samples_for_final_sampling=np.array([final]),
        draft_probs=None,
        target_probs=target[None],
        num_speculative_tokens=7,
    )
    return predicts.tolist(), index[0, : num[0] + 1].tolist(), int(num[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_coins_and_draws_decide_alike(seed: int) -> None:
    tree, rng = random_tree(seed), np.random.default_rng(seed)
    linked = layouts.linked_from_tree(np.asarray(tree.tokens), np.asarray(tree.parents))
    verify, output = jax.jit(js.verify_tree), jax.jit(layouts.linked_output)
    depths = set()
    for trial in range(60):
        target = rng.dirichlet(np.full(VOCAB + 3, 0.5), 7).astype(np.float32)
        coins, final = rng.random(7, np.float32), rng.random(dtype=np.float32)
        draws = layouts.draws_from_coins(tree, jnp.asarray(coins), jnp.asarray(final), target)
        if trial % 2:  # from draws to coins
            draws = js.round_draws(jax.random.key(1000 * seed + trial), 7).verify
            coins, final = layouts.coins_from_draws(tree, draws, jnp.asarray(target))
        verdict = verify(draws, js.PointMass(tree=tree), jnp.asarray(target), True)
        predicts, index, num = play_linked(linked, np.asarray(coins), float(final), target)
        found = jax.device_get(output(verdict, linked, jnp.arange(7)))
        assert found[0].tolist() == predicts
        assert found[1][: num + 1].tolist() == index
        assert int(found[2]) == num
        emitted, slots = layouts.emitted_from_linked(*found)
        assert emitted.tolist() == verdict.tokens.tolist()
        assert slots.tolist() == verdict.path[1:].tolist()
        later = dataclasses.replace(linked, retrive_index=linked.retrive_index + 14)
        moved = np.asarray(output(verdict, later, jnp.arange(7))[1])
        assert moved.tolist() == np.where(found[1] >= 0, found[1] + 14, -1).tolist()
        depths.add(num)
    assert len(depths) > 1


def test_a_layout_that_does_not_fit_is_rejected_by_place_and_value() -> None:
    good = (np.zeros(2, np.int32), np.ones((2, 4)) / 4, np.ones((3, 4)) / 4)
    batch = layouts.flat_from_paths([good, good])
    ids, draft, target = layouts.assisted_from_path(good)
    linked = layouts.linked_from_tree(np.array([-1, 5, 7, 2]), np.array([-1, 0, 0, 1]))
    tree, verdict = js.chain(jnp.array([1])), None
    draws = js.round_draws(jax.random.key(0), 2).verify
    wide = jnp.full((2, 600), 1 / 600)
    verdict = js.verify_path(
        js.Draws(accept=jnp.zeros(2), final=draws.final), js.PointMass(tree=tree), wide
    )

    def with_(**changes: Any) -> Any:
        return dataclasses.replace(batch, **changes)

    cases = {
        "paths is empty": lambda: layouts.flat_from_paths([]),
        "sequence 1: draft rows must be given": lambda: layouts.flat_from_paths(
            [good, (good[0], None, good[2])]
        ),
        "sequence 0: target rows have shape (2, 4): must be (3, 4)": (
            lambda: layouts.flat_from_paths([(*good[:2], good[2][1:])])
        ),
        "num_draft_tokens[1] is -2": lambda: layouts.paths_from_flat(
            with_(num_draft_tokens=np.array([2, -2]))
        ),
        "target_rows has 5 entries: the counts need 6": lambda: layouts.paths_from_flat(
            with_(target_rows=batch.target_rows[1:])
        ),
        "no bonus rows": lambda: layouts.paths_from_flat(
            layouts.flat_from_paths([good], has_bonus_rows=False)
        ),
        "output_token_ids has shape (2, 2): must be (2, 3) or (6,)": (
            lambda: layouts.emitted_from_flat(batch, np.zeros((2, 2), int), 2)
        ),
        "draft rows are None": lambda: layouts.assisted_from_path((good[0], None, good[2])),
        "new_logits has shape (1, 2, 4): must be (1, 3, 4)": (
            lambda: layouts.path_from_assisted(ids, draft, target[:, 1:])
        ),
        "candidate_input_ids has shape (1, 1): must be (1, 2)": (
            lambda: layouts.path_from_assisted(ids[:, 1:], draft, target)
        ),
        "the verdict has no final token: num_tokens 1, num_accepted 1": (
            lambda: layouts.assisted_output(verdict)
        ),
        "retrive_next_sibling[2] is 1, which was reached before": (
            lambda: layouts.tree_from_linked(
                dataclasses.replace(linked, retrive_next_sibling=np.array([-1, 2, 1, -1]))
            )
        ),
        "retrive_next_token[0] is 4, which is no candidate": lambda: layouts.tree_from_linked(
            dataclasses.replace(linked, retrive_next_token=np.array([4, 3, -1, -1]))
        ),
        "target_rows has 600 tokens": lambda: layouts.draws_from_coins(
            tree, jnp.zeros(2), jnp.float32(0), wide
        ),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("mode", ["64-bit", "debug NaNs", "transfer guard", "shard_map"])
def test_traced_layouts_run_in_the_modes_of_jax(mode: str) -> None:
    modes = {
        "64-bit": lambda: jax.enable_x64(True),
        "debug NaNs": lambda: jax.debug_nans(True),
        "transfer guard": lambda: jax.transfer_guard("disallow"),
        "shard_map": contextlib.nullcontext,
    }
    batch = jax.tree.map(jnp.asarray, layouts.flat_from_paths(random_paths(2, is_sampled=True)))
    tree = jax.tree.map(jnp.asarray, random_tree(0))
    target = jnp.asarray(rows(np.random.default_rng(0), 7)[:, [0, 1, 2, 3, 4] * 2]) / 2

    def run(draws: js.Draws, coins: jax.Array, sequences: jax.Array) -> Any:
        def one(sequence: jax.Array, draws: js.Draws) -> js.Verdict:
            proposal, source = layouts.path_at(batch, sequence, LONGEST)
            return js.verify_path(draws, proposal, source, batch.has_bonus_rows)

        verdicts = jax.vmap(one)(sequences, draws)
        tree_draws = layouts.draws_from_coins(tree, coins, coins[0], target)
        linked = layouts.linked_from_tree(tree.tokens, tree.parents)
        verdict = js.verify_tree(tree_draws, js.PointMass(tree=tree), target, True)
        return (
            layouts.flat_output(batch, verdicts),
            layouts.coins_from_draws(tree, tree_draws, target),
            layouts.linked_output(verdict, linked, jnp.arange(7, dtype=jnp.int32)),
        )

    inputs = (
        draws_of(1, 4, LONGEST + 1),
        jnp.linspace(0, 0.9, 7, dtype=jnp.float32),
        jnp.arange(4, dtype=jnp.int32),
    )
    wanted = jax.device_get(jax.jit(run)(*inputs))
    if mode == "shard_map":
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        nowhere = jax.sharding.PartitionSpec()
        run = jax.shard_map(run, mesh=mesh, in_specs=nowhere, out_specs=nowhere)
    with modes[mode]():
        found = jax.jit(run)(*inputs)
    for ours, theirs in zip(
        jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(wanted), strict=True
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
