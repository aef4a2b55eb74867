"""The compiled loop: equal to the host loop, greedy at temperature 0, sequences independent."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from helpers.fake_model import fake_model
from helpers.small import (
    BUDGETS,
    DRAFTERS,
    FUSED,
    LENGTH,
    LOOKUP,
    PROMPTS,
    TARGET,
    TRACED,
    VOCAB,
    decoder,
    greedy,
    keys,
    matches_of,
    provider,
)

import jaxspec as js
from jaxspec.decode import CompiledDecoder, Decoder, Ending, Source
from jaxspec.draft import FixedTree, Lookup, SampledPath
from jaxspec.models import Block, CacheError, ForwardError, LanguageModel, TokensDifferError

TEMPERATURE = 0.25


@pytest.mark.parametrize("name", ["plain", "path by token", "traversal", "adaptive tree"])
def test_temperature_and_filters_of_a_request_give_one_text_in_both_loops(name: str) -> None:
    """The host applies them to rows of probabilities, the compiled loop to logits."""
    host = Decoder(provider(0.0, 1.0), DRAFTERS[name](provider(0.5, 1.0)), max_context=LENGTH)
    columns: dict[str, Any] = {
        "new_tokens": BUDGETS,
        "temperature": (0.5, 1.5, 0.0),
        "top_k": (None, 3, None),
        "top_p": (0.8, 0.95, 1.0),
        "stop_tokens": ([], [4], []),
    }
    texts = decoder(name).run(PROMPTS, keys(3), **columns)
    for n, text in enumerate(texts):
        options = {option: values[n] for option, values in columns.items()}
        one = host.run(PROMPTS[n], keys(3)[n], **options)
        assert (text.tokens, text.ending) == (one.tokens, one.ending)
        assert text.rounds == len(one.rounds)
        assert text.drafted == sum(each.num_drafted for each in one.rounds)
        assert text.accepted == sum(each.num_accepted for each in one.rounds)
    assert texts[2].tokens == greedy(tuple(PROMPTS[2]), BUDGETS[2])


@pytest.mark.parametrize("name", FUSED)
def test_at_temperature_0_top_k_1_and_tiny_top_p_the_text_is_the_greedy_one(name: str) -> None:
    texts = decoder(name).run(
        PROMPTS,
        keys(3),
        new_tokens=BUDGETS,
        temperature=[0.0, 1.0, 1.0],
        top_k=[0, 1, -1],
        top_p=[1, 1, 1e-300],
    )
    for text, prompt, budget in zip(texts, PROMPTS, BUDGETS, strict=True):
        assert text.tokens == greedy(tuple(prompt), budget)
        assert (text.status, text.ending) == (0, Ending.BUDGET)


@pytest.mark.parametrize("name", [name for name in FUSED if name != "plain"])
def test_a_drafter_saves_target_calls_and_its_marks_add_up(name: str) -> None:
    texts = decoder(name).run(PROMPTS, keys(3, seed=3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    assert sum(text.accepted for text in texts) > 0
    for text, budget in zip(texts, BUDGETS, strict=True):
        assert len(text.new_tokens) == budget
        assert text.accepted == text.sources.count(Source.DRAFT)
        assert text.rounds == max(text.rounds_at)
        assert text.rounds - text.sources.count(Source.TARGET) in (0, 1)
        assert list(text.rounds_at) == sorted(text.rounds_at)
        assert text.tokens_per_call == budget / text.rounds


@pytest.mark.parametrize("name", ["path by token", "adaptive tree", "lookup tree"])
def test_a_sequence_is_bit_equal_whatever_the_rest_of_the_batch_and_its_place(name: str) -> None:
    options: dict[str, Any] = {"new_tokens": 12, "temperature": TEMPERATURE}
    first = decoder(name).run(PROMPTS, keys(3), **options)
    others = [[2, 2], PROMPTS[0], [3]]
    moved = keys(3, seed=9)[jnp.array([0, 0, 2])].at[1].set(keys(3)[0])
    again = decoder(name).run(others, moved, **options)
    assert dataclasses.asdict(again[1]) == dataclasses.asdict(first[0])


def test_a_single_sequence_has_the_text_that_it_has_in_a_batch() -> None:
    path = decoder("path by token")
    whole = path.run(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    for prompt, key, budget, text in zip(PROMPTS, keys(3), BUDGETS, whole, strict=True):
        (alone,) = path.run([prompt], key, new_tokens=budget, temperature=TEMPERATURE)
        assert alone.tokens == text.tokens


def test_advancing_round_by_round_gives_the_same_text_as_at_once() -> None:
    path = decoder("path by token")
    state = path.start(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    lengths = [state.length.tolist()]
    while any(text.ending == Ending.NONE for text in state.texts()):
        state = path.advance(state, max_rounds=1)
        lengths.append(state.length.tolist())
        assert int(state.calls) == len(lengths) - 1
    whole = path.run(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    assert [text.tokens for text in state.texts()] == [text.tokens for text in whole]


def test_sequences_have_separate_temperatures_budgets_and_stop_tokens() -> None:
    path = decoder("path by token")
    free = path.run(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=[0.0, TEMPERATURE, 0.0])
    stops = [text.new_tokens[5] for text in free]
    texts = path.run(
        PROMPTS,
        keys(3),
        new_tokens=BUDGETS,
        temperature=[0.0, TEMPERATURE, 0.0],
        stop_tokens=[[stops[0]], [], [stops[2], stops[2]]],
    )
    for n in (0, 2):
        until = free[n].new_tokens.index(stops[n]) + 1
        assert texts[n].new_tokens == free[n].new_tokens[:until]
        assert texts[n].ending == Ending.STOP
    assert texts[1].tokens == free[1].tokens
    assert texts[1].ending == Ending.BUDGET


def test_a_text_ends_at_the_capacity_and_a_full_prompt_is_left_as_it_is() -> None:
    prompts = [[1] * LENGTH, [1, 2, 3] * 12, [1]]
    texts = decoder("path by token").run(prompts, keys(3), new_tokens=[5, 2**70, 3])
    assert [len(text.tokens) for text in texts] == [LENGTH, LENGTH, 4]
    assert [text.ending.name for text in texts] == ["CAPACITY", "CAPACITY", "BUDGET"]
    assert texts[0].rounds == 0


def test_one_compilation_serves_all_lengths_temperatures_filters_and_acceptances() -> None:
    path = decoder("path by token")
    path.run(PROMPTS, keys(3), new_tokens=3)
    once = TRACED["path by token"]
    for seed, prompts in enumerate((PROMPTS, [[1] * 30, [2], [3, 3]], [[0], [0], [0]])):
        path.run(
            prompts,
            keys(3, seed),
            new_tokens=[2 + seed, 7, 9],
            temperature=[0.0, 0.5, float(seed)],
            top_k=2 + seed,
            top_p=0.5 + 0.1 * seed,
            stop_tokens=jnp.array([seed]),
        )
    assert TRACED["path by token"] == once


def test_a_round_runs_the_smallest_block_that_holds_what_is_proposed() -> None:
    lookup = decoder("lookup")
    assert lookup.drafter.block_sizes == (1, 3, 6)
    prompts = ([0, 1], [2, 3], [4, 4])
    state = lookup.start(prompts, keys(3), new_tokens=30, temperature=0.0)
    state = lookup.advance(state, max_rounds=0)
    sizes = []
    while Ending.NONE in state.ending.tolist():
        texts, before = state.texts(), state.target_cache[1].tolist()
        state = lookup.advance(state, max_rounds=1)
        costs = {
            after - was for after, was in zip(state.target_cache[1].tolist(), before, strict=True)
        }
        needed = 1
        for text in texts:
            if text.ending == Ending.NONE:
                copied = [*matches_of(text.tokens, LOOKUP), ()][0]
                needed = max(needed, 1 + min(len(copied), 30 - len(text.new_tokens) - 1))
        assert costs == {min(size for size in (1, 3, 6) if size >= needed)}
        sizes += costs
    assert set(sizes) == {1, 3, 6}


def test_a_bad_row_ends_its_text_and_leaves_the_others_alone() -> None:
    def forward(params: Any, cache: Any, block: Block) -> Any:
        logits, cache = TARGET.forward(params, cache, block)
        return jnp.where((block.positions == 5)[:, None], jnp.nan, logits), cache

    broken = CompiledDecoder(
        dataclasses.replace(TARGET, forward=forward), max_context=LENGTH, prefill_width=4
    )
    texts = broken.run([[1, 2, 3], [0]], keys(2), new_tokens=[20, 3], temperature=0.0)
    assert texts[0].tokens == greedy((1, 2, 3), 3)
    assert texts[0].ending == Ending.UNDECIDED
    assert texts[0].status == js.Status.NON_FINITE_ROW
    assert texts[1].tokens == greedy((0,), 3)
    assert texts[1].ending == Ending.BUDGET


def test_networks_that_cannot_roll_back_or_take_trees_are_errors_before_anything_runs() -> None:
    stuck = fake_model(VOCAB, name="stuck", rolls_back=False)
    with pytest.raises(CacheError, match="stuck: its cache cannot roll back"):
        CompiledDecoder(stuck)
    with pytest.raises(CacheError, match="stuck: its cache cannot roll back"):
        CompiledDecoder(TARGET, SampledPath(stuck, 2))
    flat = fake_model(VOCAB, name="flat", takes_trees=False)
    with pytest.raises(CacheError, match="flat takes no mask, so it verifies paths only"):
        CompiledDecoder(flat, Lookup(matches=2))
    with pytest.raises(CacheError, match="flat takes no mask"):
        CompiledDecoder(TARGET, FixedTree(flat, (2, 1)))
    fixed = fake_model(VOCAB, name="fixed", has_keep=False)
    with pytest.raises(CacheError, match="fixed has a cache whose slots cannot move"):
        CompiledDecoder(fixed, Lookup(matches=2))
    names = [SimpleNamespace(pieces=tuple(pieces)) for pieces in ("abcde", "abxde")]
    ours, theirs = (fake_model(VOCAB, name=t.pieces[2], tokenizer=t) for t in names)
    with pytest.raises(TokensDifferError, match="token 2 is 'c' to target c, 'x' to draft x"):
        CompiledDecoder(ours, SampledPath(theirs, 2))


def test_a_network_without_masks_decodes_paths_that_end_with_their_last_without_a_bonus() -> None:
    flat = fake_model(VOCAB, name="flat", takes_trees=False, has_keep=False)
    path = CompiledDecoder(
        flat, SampledPath(flat, 2), max_context=LENGTH, prefill_width=4, bonus=False
    )
    (text,) = path.run([[1, 2, 3]], keys(1), new_tokens=9, temperature=0.0)
    assert text.tokens == greedy((1, 2, 3), 9)
    # Without bonus a round of 2 accepted tokens emits 2, and the last has room for 1.
    assert (text.rounds, text.accepted) == (5, 9)


def forward_giving(change: Callable[[Any, Any], tuple[Any, Any]]) -> LanguageModel:
    def forward(*arguments: Any) -> Any:
        return change(*TARGET.forward(*arguments))

    return dataclasses.replace(TARGET, forward=forward)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda logits, cache: (logits[-1:], cache), "a block of 4 tokens: must be floats"),
        (lambda logits, cache: (logits[:, :3], cache), r"logits float32 \[4, 3\]"),
        (lambda logits, cache: (jnp.pad(logits, ((0, 0), (0, 2))), cache), r"float32 \[4, 7\]"),
        (lambda logits, cache: (logits > 0, cache), r"logits bool \[4, 5\]"),
        (
            lambda logits, cache: (logits, (cache, cache)),
            "must keep its structure, shapes and types",
        ),
    ],
)
def test_a_network_that_gives_no_row_for_each_token_or_another_cache_decodes_nothing(
    change: Callable[[Any, Any], tuple[Any, Any]], message: str
) -> None:
    broken = CompiledDecoder(forward_giving(change), max_context=LENGTH, prefill_width=4)
    with pytest.raises(ForwardError, match=message):
        broken.run([[1, 2]], keys(1), new_tokens=3)
    drafting = SampledPath(forward_giving(change), 3)
    with pytest.raises(ForwardError, match="target: forward"):
        CompiledDecoder(TARGET, drafting, max_context=LENGTH, prefill_width=4).lower(1)


def test_a_state_of_another_decoder_or_a_donated_one_is_an_error_and_the_state_stays_usable() -> (
    None
):
    state = decoder("plain").start([[1, 2]], keys(1), new_tokens=5)
    for other in (
        CompiledDecoder(TARGET, max_context=2 * LENGTH),
        CompiledDecoder(TARGET, max_context=LENGTH, prefill_width=4, max_stop_tokens=5),
        CompiledDecoder(TARGET, max_context=LENGTH, prefill_width=4),
        decoder("path by token"),
    ):
        with pytest.raises(ValueError, match="the state was begun by another decoder: its"):
            other.advance(state)
    for rounds in (-1, True, 2.7, "3"):
        with pytest.raises(ValueError, match=f"max_rounds is {rounds!r}: must be"):
            decoder("plain").advance(state, rounds)
    after = decoder("plain").advance(state, 2**40)
    assert len(after.texts()[0].new_tokens) == 5
    for use in (decoder("plain").advance, lambda state: state.texts()):
        with pytest.raises(ValueError, match="donated to advance: use the state that it returned"):
            use(state)
