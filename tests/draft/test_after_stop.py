"""Nothing is drafted or scored below a stop token, in either loop."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import row_after
from helpers.small import (
    DRAFT,
    DRAFTERS,
    FUSED,
    LENGTH,
    PROMPTS,
    TARGET,
    VOCAB,
    decoder,
    greedy,
    host_drafters,
    keys,
    provider,
)

import jaxspec as js
from jaxspec.decode import (
    CallableTarget,
    CompiledDecoder,
    Decoder,
    Ending,
)
from jaxspec.draft import Drafter, SampledPath
from jaxspec.draft.cut import cut_below, node_rows
from jaxspec.models import Block, Provider
from jaxspec.models.provider import Context

STOP = 2


class PastTheEndError(Exception):
    """A grammar that has ended was asked what comes next."""


def grammar(name: str, seed: int, prompt: int) -> Provider:
    """A model that knows no way on after a stop token."""

    def row(context: Context) -> np.ndarray:
        if STOP in context[prompt:]:
            raise PastTheEndError(context)
        return np.random.default_rng([seed, *context]).dirichlet(np.ones(3))

    return Provider(name, 3, row)


TREES: dict[str, Callable[[Provider], Drafter]] = {
    name: DRAFTERS[name] for name in ("path by token", "top-k tree", "traversal", "adaptive tree")
}


@pytest.mark.parametrize("bonus", [True, False], ids=["bonus", "no bonus"])
@pytest.mark.parametrize("name", TREES)
def test_no_model_is_asked_what_comes_after_a_stop_token(name: str, bonus: bool) -> None:
    endings = set()
    for seed, group in enumerate(("node", "all", "depth") * 2):
        asked = CallableTarget(grammar("target", 1, 2), group)  # type: ignore[arg-type]
        host = Decoder(asked, TREES[name](grammar("draft", 2, 2)), bonus=bonus)
        # One in the prompt stops nothing.
        key = jax.random.key(seed)
        state = host.start((0, STOP), key, new_tokens=12, stop_tokens=[STOP])
        for after, record in host.rounds(state):
            tree = record.proposal.tree
            above = np.asarray(tree.tokens)[np.asarray(tree.parents)[1 : int(tree.num_nodes)]]
            below_root = np.asarray(tree.parents)[1 : int(tree.num_nodes)] > 0
            assert STOP not in above[below_root]
            assert after.rounds[-1].num_drafted == int(tree.num_nodes) - 1
            assert after.rounds[-1].status == 0
            state = after
        assert STOP not in state.new_tokens[:-1]
        endings.add(state.ending)
    assert Ending.STOP in endings


def test_a_stop_token_cuts_what_is_below_it_and_its_siblings_stay() -> None:
    tree = js.make_tree([-1, 2, 0, 1, 1, 2, 0], [-1, 0, 0, 1, 2, 2, 3], max_nodes=8)
    stops = jnp.array([2, -1], jnp.int32)
    left, nodes = jax.jit(cut_below)(tree, stops, jnp.int32(9), jnp.int32(9))
    assert left.tokens.tolist() == [-1, 2, 0, 1, 2, -1, -1, -1]
    assert left.parents.tolist() == [-1, 0, 0, 2, 2, -1, -1, -1]
    assert nodes.tolist() == [0, 1, 2, 4, 5, -1, -1, -1]
    assert left.level_sizes.tolist() == [1, 2, 2, 0]
    rows = jnp.arange(8.0)[:, None] * jnp.ones((1, 3))
    assert node_rows(rows, nodes)[:5, 0].tolist() == [0, 1, 2, 4, 5]
    narrow, _ = jax.jit(cut_below)(tree, stops, jnp.int32(1), jnp.int32(2))
    assert narrow.tokens.tolist() == [-1, 2, *[-1] * 6]


class Watched:
    """A decoder whose rule notes the trees that it verifies."""

    def __init__(self, name: str) -> None:
        self.trees: list[tuple[np.ndarray, np.ndarray]] = []
        drafter = FUSED[name]()
        rule = drafter.rule

        def verify(draws: Any, proposal: Any, rows: Any, bonus: Any) -> js.Verdict:
            jax.debug.callback(self._note, proposal.tree.tokens, proposal.tree.parents)
            if proposal.draft_rows is not None and not rule.is_path:
                jax.debug.callback(self._note_rows, proposal.draft_rows.values)
            return rule.verify(draws, proposal, rows, bonus)

        watched = dataclasses.replace(rule, verify=verify)
        other = dataclasses.replace(drafter, rule=watched)  # type: ignore[type-var]
        self.decoder = CompiledDecoder(TARGET, other, max_context=LENGTH, prefill_width=4)

    def _note(self, tokens: Any, parents: Any) -> None:
        self.trees.append((np.asarray(tokens), np.asarray(parents)))

    def _note_rows(self, rows: Any) -> None:
        self.rows = np.asarray(rows)


@functools.cache
def watched(name: str) -> Watched:
    return Watched(name)


STOPS = (0, 3)


@pytest.mark.parametrize(
    "name", ["path by token", "top-k tree", "traversal", "best-first tree", "lookup tree"]
)
def test_the_compiled_loop_verifies_no_tree_with_nodes_below_a_stop_token(name: str) -> None:
    one = watched(name)
    one.trees.clear()
    for seed in range(4):
        one.decoder.run(
            [[1, 2, 1, 2, 1]], keys(1, seed), new_tokens=25, temperature=1.0, stop_tokens=STOPS
        )
    jax.effects_barrier()
    number_of_stops = 0
    for tokens, parents in one.trees:
        is_stop = np.isin(tokens, STOPS) & (np.arange(len(tokens)) > 0)
        number_of_stops += is_stop.sum()
        assert not is_stop[parents[parents > 0]].any()
    assert number_of_stops > 0 or name == "lookup tree"


def test_the_rows_of_a_cut_tree_are_those_that_its_tokens_were_drawn_from() -> None:
    one, moved = watched("traversal"), 0
    for seed in range(3):
        state = one.decoder.start(
            [[2, 2]], keys(1, seed), new_tokens=25, temperature=1.0, stop_tokens=STOPS
        )
        while state.ending.tolist() == [Ending.NONE]:
            text = tuple(state.tokens[0, : int(state.length[0])].tolist())
            one.trees.clear()
            state = one.decoder.advance(state, max_rounds=1)
            jax.effects_barrier()
            ((tokens, parents),) = one.trees
            paths = {0: text}
            for node in range(1, int((parents >= 0).sum()) + 1):
                paths[node] = (*paths[int(parents[node])], int(tokens[node]))
            for node in set(parents[parents >= 0].tolist()):
                row = np.asarray(jax.nn.softmax(row_after(paths[node], VOCAB, noise=0.5)))
                np.testing.assert_allclose(one.rows[node], row, atol=1e-6)
                moved += node == 1 and int(tokens[2]) in STOPS
            moved += int(tokens[1]) in STOPS and 2 in parents
    assert moved > 0


@pytest.mark.parametrize("name", FUSED)
def test_at_temperature_0_the_text_is_the_greedy_one_up_to_its_first_stop_token(name: str) -> None:
    for stop in (1, 4):
        texts = decoder(name).run(
            PROMPTS, keys(3), new_tokens=20, temperature=0.0, stop_tokens=[stop]
        )
        for text, prompt in zip(texts, PROMPTS, strict=True):
            whole = greedy(tuple(prompt), 20)[len(prompt) :]
            until = whole.index(stop) + 1 if stop in whole else len(whole)
            assert text.new_tokens == whole[:until]
            assert text.status == 0


@pytest.mark.parametrize("name", ["path by token", "path by block", "top-k tree", "adaptive tree"])
def test_with_stop_tokens_the_compiled_text_is_that_of_the_host_loop(name: str) -> None:
    stopped = 0
    for seed in range(3):
        texts = decoder(name).run(
            PROMPTS, keys(3, seed), new_tokens=20, temperature=0.25, stop_tokens=[1]
        )
        for text, prompt, key in zip(texts, PROMPTS, keys(3, seed), strict=True):
            one = Decoder(provider(0.0, 0.25), host_drafters(0.25)[name])
            host = one.run(prompt, key, new_tokens=20, stop_tokens=[1])
            assert text.tokens == host.tokens
            assert text.drafted == sum(each.num_drafted for each in host.rounds)
            stopped += host.ending == Ending.STOP
    assert stopped > 0


def test_what_the_network_says_after_a_stop_token_does_not_matter() -> None:
    def forward(params: Any, cache: Any, block: Block) -> Any:
        logits, cache = TARGET.forward(params, cache, block)
        is_after_stop = (block.tokens == 1) & (block.positions > 3)
        return jnp.where(is_after_stop[:, None], jnp.nan, logits), cache

    ended = dataclasses.replace(TARGET, forward=forward)
    path = CompiledDecoder(ended, SampledPath(DRAFT, 3), max_context=LENGTH, prefill_width=4)
    for seed in range(4):
        options: dict[str, Any] = {"new_tokens": 20, "temperature": 0.25, "stop_tokens": [1]}
        (text,) = path.run([[0, 2]], keys(1, seed), **options)
        (other,) = decoder("path by token").run([[0, 2]], keys(1, seed), **options)
        assert (text.tokens, text.status) == (other.tokens, 0)
