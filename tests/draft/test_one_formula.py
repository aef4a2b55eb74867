"""One class in both loops: one key gives one text, whether the draft is a callable or a network."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.small import (
    DRAFT,
    DRAFTERS,
    LENGTH,
    MORE_DRAFTERS,
    PROMPTS,
    TARGET,
    decoder,
    host_drafters,
    keys,
    provider,
)

import jaxspec as js
from jaxspec.decode import CompiledDecoder, Decoder
from jaxspec.draft import (
    AdaptiveTree,
    AdaptiveTreePolicy,
    BestFirstTree,
    Drafter,
    FixedTree,
    normalized_entropy,
    top_k,
)
from jaxspec.draft.likely import entropies, likeliest
from jaxspec.models import Block, LanguageModel, Provider, Softmax

EVERY = {**DRAFTERS, **MORE_DRAFTERS}
BUDGETS, STOPS = (20, 60, 12), ([], [], [4])


@functools.cache
def loop_of(name: str, *, bonus: bool) -> CompiledDecoder:
    if bonus and name in DRAFTERS:
        return decoder(name)
    drafter = EVERY[name](DRAFT)
    return CompiledDecoder(TARGET, drafter, max_context=LENGTH, prefill_width=4, bonus=bonus)


def assert_alike(text: Any, host: Any) -> None:
    assert text.tokens == host.tokens
    assert text.ending == host.ending
    assert text.rounds == len(host.rounds)
    assert text.drafted == sum(each.num_drafted for each in host.rounds)
    assert text.accepted == sum(each.num_accepted for each in host.rounds)
    assert text.status == 0


@pytest.mark.parametrize("name", EVERY)
def test_both_loops_decode_one_text_with_a_callable_and_with_a_network(name: str) -> None:
    """Budgets, stop tokens and the end of the context cut drafts short here."""
    bonus = name not in ("path by block", "traversal", "irregular tree")
    for temperature, drafter, sequences in (
        (0.25, host_drafters(0.25)[name], (0, 1, 2)),
        (1.0, host_drafters(1.0)[name], (0, 2)),
        (1.0, EVERY[name](DRAFT), (0,)),
    ):
        texts = loop_of(name, bonus=bonus).run(
            PROMPTS, keys(3), new_tokens=BUDGETS, temperature=temperature, stop_tokens=STOPS
        )
        for n in sequences:
            target = provider(0.0, temperature)
            host = Decoder(target, drafter, bonus=bonus, max_context=LENGTH)
            options = {"new_tokens": BUDGETS[n], "stop_tokens": STOPS[n]}
            assert_alike(texts[n], host.run(PROMPTS[n], keys(3)[n], **options))  # type: ignore[arg-type]


def keyed_by_position(key: jax.Array, num_nodes: int, position: jax.Array) -> js.RoundDraws:
    """Node n of a round at root r reads the draws of position r + n, whichever round that is in."""
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    each = jax.vmap(lambda n: js.round_draws(key, 1, position + n))(nodes)
    verify = js.Draws(accept=each.verify.accept[:, 0], final=each.verify.final[0])
    return js.RoundDraws(draft=each.draft[:, 0], verify=verify)


def test_both_loops_take_the_same_draws_from_a_custom_function_and_from_no_other() -> None:
    drafter = EVERY["path by block"]
    loop = CompiledDecoder(
        TARGET, drafter(DRAFT), max_context=LENGTH, prefill_width=4, draws=keyed_by_position
    )
    text = loop.run(PROMPTS, keys(3), new_tokens=BUDGETS)[0]
    host, plain = (
        Decoder(provider(0.0, 1.0), drafter(DRAFT), max_context=LENGTH, draws=draws)
        for draws in (keyed_by_position, js.round_draws)
    )
    options = {"new_tokens": BUDGETS[0]}
    assert_alike(text, host.run(PROMPTS[0], keys(3)[0], **options))  # type: ignore[arg-type]
    assert plain.run(PROMPTS[0], keys(3)[0], **options).tokens != text.tokens  # type: ignore[arg-type]
    record = host.step(host.start(PROMPTS[0], keys(3)[0], **options))[1]  # type: ignore[arg-type]
    wanted = keyed_by_position(
        keys(3)[0], drafter(DRAFT).capacity.max_nodes, jnp.int32(record.position)
    )
    np.testing.assert_array_equal(record.draws.verify.accept, wanted.verify.accept)
    with pytest.raises(ValueError, match="draws is 3"):
        Decoder(provider(0.0, 1.0), draws=3)  # type: ignore[arg-type]


# --- rows at the edges of what the loops compute


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


def texts_of_both(logits: np.ndarray, make: Any, count: int) -> list[tuple[Any, ...]]:
    draft = Provider("draft", 9, lambda _: THREE_OF_NINE, transform=Softmax())
    target = Provider("target", len(logits), lambda _: logits, transform=Softmax())
    one = Decoder(target, make(draft)).run([0], jax.random.key(1), new_tokens=count)
    drafter: Drafter = make(constant("d", THREE_OF_NINE))
    loop = CompiledDecoder(constant("t", logits), drafter, max_context=32, prefill_width=4)
    other = loop.run([[0]], jax.random.key(1), new_tokens=count)[0]
    drafted = sum(each.num_drafted for each in one.rounds)
    return [(one.tokens, len(one.rounds), drafted), (other.tokens, other.rounds, other.drafted)]


def test_a_row_at_the_edge_of_two_widths_gives_one_text() -> None:
    make = functools.partial(AdaptiveTree, policy=POLICY)
    host, compiled = texts_of_both(THREE_OF_NINE, make, 8)
    assert host == compiled
    # log 3 / log 9 is one half: three candidates in each round that has room for them.
    assert host[2] in (3 * host[1], 3 * (host[1] - 1))


def test_tokens_that_a_draft_takes_for_impossible_are_candidates_in_neither_loop() -> None:
    uniform = np.zeros(9, np.float32)
    for make in (
        functools.partial(FixedTree, shape=(4, 1)),
        functools.partial(BestFirstTree, beam=5, depth=2, max_nodes=20),
    ):
        host, compiled = texts_of_both(uniform, make, 12)
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
        alone = policy.width(jnp.array([normalized_entropy(row) for row in rows])).tolist()
        together = jax.jit(lambda rows, p=policy, v=vocab: p.width(entropies(rows), v))(rows)
        assert alone == together.tolist() == exact, (vocab, steps)


def test_a_share_at_the_edge_of_two_depths_has_the_depth_of_exact_arithmetic() -> None:
    for proposed in range(1, 8):
        accepted = np.arange(proposed + 1)
        for edge in range(1, proposed + 1):
            share = {"deepen_at": edge / proposed, "shorten_at": 0.0}
            policy = AdaptiveTreePolicy(max_depth=99, first_depth=9, **share)
            wanted = np.where(accepted >= edge, 10, np.where(accepted == 0, 8, 9))
            np.testing.assert_array_equal(policy.next_depth(9, accepted, proposed), wanted)
            share = {"deepen_at": 2.0, "shorten_at": edge / proposed}
            policy = AdaptiveTreePolicy(max_depth=99, first_depth=9, **share)
            wanted = np.where(accepted <= edge, 8, 9)
            np.testing.assert_array_equal(policy.next_depth(9, accepted, proposed), wanted)


def test_candidates_are_chosen_alike_by_numpy_and_in_a_program_ties_and_zeros_too() -> None:
    generator = np.random.default_rng(0)
    choose = jax.jit(likeliest, static_argnums=1)
    for k in (1, 3, 7, 12):
        rows = generator.integers(0, 4, (40, 9)).astype(np.float32)
        rows[0] = 1
        rows[1, 1:] = 1e-45  # counts as 0
        rows += np.float32(1e-3) * (rows.sum(axis=1, keepdims=True) == 0)
        rows /= rows.sum(axis=1, keepdims=True)
        tokens, best = (np.asarray(each) for each in choose(rows, k))
        for row, chosen, probability in zip(rows, tokens, best, strict=True):
            assert top_k(row, k) == tuple(chosen[probability > 0].tolist())
