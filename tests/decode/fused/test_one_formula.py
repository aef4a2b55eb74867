"""What both loops decide is computed by one function: one request gives one text."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.small import DRAFT, PROMPTS, TARGET, host_drafters, keys, provider

import jaxspec as js
from jaxspec.decode import CompiledDecoder, Decoder
from jaxspec.draft import (
    AdaptiveModelTree,
    AdaptiveTree,
    AdaptiveTreePolicy,
    Drafter,
    FixedTree,
    FusedDrafter,
    ModelTree,
    entropies,
    likeliest,
    model_path,
    normalised_entropy,
    top_k,
)
from jaxspec.models.network import Block, LanguageModel
from jaxspec.models.provider import Provider, Softmax

THREE_OF_NINE = np.array([0, 0, 0, *[-np.inf] * 6], np.float32)
POLICY = AdaptiveTreePolicy(min_width=1, max_width=4, max_depth=1, first_depth=1, max_nodes=8)


def constant(name: str, logits: np.ndarray) -> LanguageModel:
    """A network that gives one row after every text."""

    def forward(params: Any, cache: Any, block: Block) -> Any:
        return jnp.broadcast_to(params, (block.tokens.shape[0], len(logits))), cache

    return LanguageModel(
        name,
        len(logits),
        jnp.asarray(logits),
        forward,
        jnp.zeros,
        lambda c, *_: c,
        True,
    )


def texts_of_both(
    logits: np.ndarray, host: Drafter, drafter: FusedDrafter, count: int
) -> list[tuple[Any, ...]]:
    target = Provider("target", len(logits), lambda _: logits, transform=Softmax())
    one = Decoder(target, host, count).run([0], jax.random.key(1))
    loop = CompiledDecoder(constant("t", logits), drafter, max_length=32, prefill_width=4)
    other = loop.run([[0]], jax.random.key(1), new_tokens=count)[0]
    drafted = sum(each.num_drafted for each in one.rounds)
    return [(one.tokens, len(one.rounds), drafted), (other.tokens, other.rounds, other.drafted)]


def test_a_row_at_the_edge_of_two_widths_gives_one_text() -> None:
    draft = Provider("draft", 9, lambda _: THREE_OF_NINE, transform=Softmax())
    tree = AdaptiveModelTree(constant("d", THREE_OF_NINE), POLICY)
    host, compiled = texts_of_both(THREE_OF_NINE, AdaptiveTree(draft, POLICY), tree, 8)
    assert host == compiled
    # log 3 / log 9 is one half: three candidates in each round that has room for them.
    assert host[2] in (3 * host[1], 3 * (host[1] - 1))


def test_tokens_that_a_draft_takes_for_impossible_are_candidates_in_neither_loop() -> None:
    draft = Provider("draft", 9, lambda _: THREE_OF_NINE, transform=Softmax())
    uniform = np.zeros(9, np.float32)
    tree = ModelTree(constant("d", THREE_OF_NINE), (4, 1), js.RULES["point_mass"])
    host, compiled = texts_of_both(uniform, FixedTree(draft, (4, 1)), tree, 12)
    assert host == compiled


def test_a_uniform_row_has_the_width_of_exact_arithmetic_in_any_program() -> None:
    for vocab, steps in itertools.product((4, 8, 9, 16, 25, 27, 64, 81), (2, 3, 4)):
        policy = AdaptiveTreePolicy(min_width=1, max_width=steps)
        rows = np.zeros((vocab, vocab), np.float32)
        for kept in range(1, vocab + 1):
            rows[kept - 1, :kept] = np.float32(1 / kept)
        # floor(steps log m / log V) is the greatest s with V^s <= m^steps.
        exact = [
            1 + min(steps - 1, max(s for s in range(steps + 1) if vocab**s <= kept**steps))
            for kept in range(1, vocab + 1)
        ]
        alone = [policy.width(normalised_entropy(row)) for row in rows]
        together = jax.jit(lambda rows, p=policy, v=vocab: p.widths(entropies(rows), v))(rows)
        assert alone == together.tolist() == exact, (vocab, steps)


def test_a_share_at_the_edge_of_two_depths_has_the_depth_of_exact_arithmetic() -> None:
    for proposed in range(1, 8):
        for edge in range(1, proposed + 1):
            policy = AdaptiveTreePolicy(
                max_depth=99, first_depth=9, deepen_at=edge / proposed, shorten_at=0.0
            )
            for accepted in range(1, proposed + 1):
                wanted = 10 if accepted >= edge else 9
                assert policy.next_depth(9, accepted, proposed) == wanted
            policy = AdaptiveTreePolicy(
                max_depth=99, first_depth=9, deepen_at=math.inf, shorten_at=edge / proposed
            )
            assert [policy.next_depth(9, a, proposed) for a in range(proposed + 1)] == [
                8 if a <= edge else 9 for a in range(proposed + 1)
            ]


def test_candidates_are_chosen_alike_by_numpy_and_in_a_program_ties_and_zeros_too() -> None:
    generator = np.random.default_rng(0)
    choose = jax.jit(likeliest, static_argnums=1)
    for k in (1, 3, 7, 12):
        rows = generator.integers(0, 4, (40, 9)).astype(np.float32)
        rows[0] = 1
        rows[1, 1:] = 1e-45  # counts as 0
        rows += np.float32(1e-3) * (rows.sum(axis=1, keepdims=True) == 0)
        rows /= rows.sum(axis=1, keepdims=True)
        tokens, is_likely = (np.asarray(each) for each in choose(rows, k))
        for row, chosen, likely in zip(rows, tokens, is_likely, strict=True):
            assert top_k(row, k) == tuple(chosen[likely].tolist())


STOPS = [[0], [3, 1], [4]]


@functools.cache
def without_bonus(name: str) -> CompiledDecoder:
    drafter: FusedDrafter = {
        "path by block": lambda: model_path(DRAFT, 3, js.RULES["block"]),
        "top-k tree": lambda: ModelTree(DRAFT, (2, 2, 1), js.RULES["point_mass"]),
    }[name]()
    return CompiledDecoder(TARGET, drafter, max_length=40, prefill_width=4, bonus=False)


@pytest.mark.parametrize("name", ["path by block", "top-k tree"])
def test_without_a_bonus_and_with_stop_tokens_both_loops_decode_one_text(name: str) -> None:
    texts = without_bonus(name).run(
        PROMPTS, keys(3), new_tokens=[20, 60, 12], temperature=0.25, stop_tokens=[[], [], STOPS[2]]
    )
    for text, prompt, budget, stops, key in zip(
        texts, PROMPTS, (20, 60, 12), ([], [], STOPS[2]), keys(3), strict=True
    ):
        host = Decoder(
            provider(0.0, 0.25),
            host_drafters(0.25)[name],
            budget,
            bonus=False,
            stop_tokens=frozenset(stops),
            max_context=40,
        ).run(prompt, key)
        assert text.tokens == host.tokens
        assert text.ending.name.lower() == host.finished
        assert text.rounds == len(host.rounds)
        assert text.drafted == sum(each.num_drafted for each in host.rounds)
        assert text.accepted == sum(each.num_accepted for each in host.rounds)
