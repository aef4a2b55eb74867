"""The compiled loop: equal to the host loop, greedy at temperature 0, rows on their own."""

import dataclasses
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import fake_model
from helpers.small import (
    BUDGETS,
    FUSED,
    LENGTH,
    LOOKUP,
    PROMPTS,
    TARGET,
    TRACED,
    VOCAB,
    decoder,
    greedy,
    host_drafters,
    keys,
    matches_of,
    provider,
)

import jaxspec as js
from jaxspec.decode import CompiledDecoder, Decoder, Ending, Source, texts_of
from jaxspec.draft import FusedDrafter, Lookup, ModelTree, NGramTree, NoDraft, Plain, model_path
from jaxspec.models import fit_ngram
from jaxspec.models.network import Block, CacheError, ForwardError, LanguageModel, TokensDifferError

TEMPERATURE = 0.25
HOST = list(host_drafters(1.0))


@pytest.mark.parametrize("name", HOST)
def test_the_text_is_that_of_the_host_loop_token_for_token_and_round_for_round(name: str) -> None:
    texts = decoder(name).run(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    target = provider(0.0, TEMPERATURE)
    for text, prompt, budget, key in zip(texts, PROMPTS, BUDGETS, keys(3), strict=True):
        host = Decoder(
            target=target, drafter=host_drafters(TEMPERATURE)[name], new_tokens=budget
        ).run(prompt, key)
        assert text.tokens == host.tokens
        assert text.rounds == len(host.rounds)
        assert text.drafted == sum(each.num_drafted for each in host.rounds)
        assert text.accepted == sum(each.num_accepted for each in host.rounds)


@pytest.mark.parametrize("name", FUSED)
def test_at_temperature_0_the_text_is_the_greedy_one_and_no_round_is_flagged(name: str) -> None:
    texts = decoder(name).run(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=0.0)
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
def test_a_row_is_bit_equal_whatever_stands_beside_it_and_where(name: str) -> None:
    options: dict[str, Any] = {"new_tokens": 12, "temperature": TEMPERATURE}
    first = decoder(name).run(PROMPTS, keys(3), **options)
    others = [[2, 2], PROMPTS[0], [3]]
    moved = keys(3, seed=9)[jnp.array([0, 0, 2])].at[1].set(keys(3)[0])
    again = decoder(name).run(others, moved, **options)
    assert dataclasses.asdict(again[1]) == dataclasses.asdict(first[0])


@pytest.mark.parametrize("name", ["plain", "path by token"])
def test_a_single_call_gives_the_text_of_the_batch(name: str) -> None:
    whole = decoder(name).run(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    for row in range(3):
        alone = decoder(name).run(
            [PROMPTS[row]], keys(3)[row], new_tokens=BUDGETS[row], temperature=TEMPERATURE
        )[0]
        assert alone.tokens == whole[row].tokens


def test_round_by_round_comes_to_the_same_text_as_at_once() -> None:
    path = decoder("path by token")
    state = path.start(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    lengths = [state.length.tolist()]
    while any(text.ending == Ending.NONE for text in texts_of(state)):
        state = path.advance(state, max_rounds=1)
        lengths.append(state.length.tolist())
        assert int(state.calls) == len(lengths) - 1
    whole = path.run(PROMPTS, keys(3), new_tokens=BUDGETS, temperature=TEMPERATURE)
    assert [text.tokens for text in texts_of(state)] == [text.tokens for text in whole]


def test_rows_have_their_own_temperature_budget_and_stop_tokens() -> None:
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
    for row in (0, 2):
        until = free[row].new_tokens.index(stops[row]) + 1
        assert texts[row].new_tokens == free[row].new_tokens[:until]
        assert texts[row].ending == Ending.STOP
    assert texts[1].tokens == free[1].tokens
    assert texts[1].ending == Ending.BUDGET


def test_a_text_ends_at_the_capacity_and_a_full_prompt_is_left_as_it_is() -> None:
    prompts = [[1] * LENGTH, [1, 2, 3] * 12, [1]]
    texts = decoder("path by token").run(prompts, keys(3), new_tokens=[5, 50, 3])
    assert [len(text.tokens) for text in texts] == [LENGTH, LENGTH, 4]
    assert [text.ending.name for text in texts] == ["CAPACITY", "CAPACITY", "BUDGET"]
    assert texts[0].rounds == 0


def test_filters_keep_the_text_among_the_most_probable_tokens() -> None:
    path = decoder("path by token")
    options: dict[str, Any] = {"new_tokens": BUDGETS, "temperature": 1.0}
    greedy_texts = path.run(PROMPTS, keys(3), top_k=1, **options)
    assert [text.tokens for text in greedy_texts] == [
        greedy(tuple(prompt), budget) for prompt, budget in zip(PROMPTS, BUDGETS, strict=True)
    ]
    narrow = path.run(PROMPTS, keys(3), top_p=1e-6, **options)
    assert [text.tokens for text in narrow] == [text.tokens for text in greedy_texts]
    free = path.run(PROMPTS, keys(3), **options)
    assert [text.tokens for text in free] != [text.tokens for text in greedy_texts]


def test_a_top_k_of_0_or_minus_1_keeps_all_tokens_and_a_tiny_top_p_the_most_probable() -> None:
    path = decoder("path by token")
    options: dict[str, Any] = {"new_tokens": BUDGETS, "temperature": 1.0}
    free = [text.tokens for text in path.run(PROMPTS, keys(3), **options)]
    kept = [text.tokens for text in path.run(PROMPTS, keys(3), top_k=[0, -1, VOCAB], **options)]
    assert kept == free
    narrow = path.run(PROMPTS, keys(3), top_p=1e-300, **options)
    assert [text.tokens for text in narrow] == [
        greedy(tuple(prompt), budget) for prompt, budget in zip(PROMPTS, BUDGETS, strict=True)
    ]


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


def test_a_round_costs_the_narrowest_width_for_what_is_proposed_and_a_plain_step_for_nothing() -> (
    None
):
    lookup = decoder("lookup")
    assert lookup.drafter.widths == (1, 3, 6)
    prompts = ([0, 1], [2, 3], [4, 4])
    state = lookup.start(prompts, keys(3), new_tokens=30, temperature=0.0)
    state = lookup.advance(state, max_rounds=0)
    widths = []
    while Ending.NONE in state.ending.tolist():
        texts, before = texts_of(state), state.target_cache[1].tolist()
        state = lookup.advance(state, max_rounds=1)
        costs = {
            after - was for after, was in zip(state.target_cache[1].tolist(), before, strict=True)
        }
        needed = 1
        for text in texts:
            if text.ending == Ending.NONE:
                copied = [*matches_of(text.tokens, LOOKUP), ()][0]
                needed = max(needed, 1 + min(len(copied), 30 - len(text.new_tokens) - 1))
        assert costs == {min(width for width in (1, 3, 6) if width >= needed)}
        widths += costs
    assert set(widths) == {1, 3, 6}


def test_a_bad_row_ends_its_text_and_leaves_the_others_alone() -> None:
    def forward(params: Any, cache: Any, block: Block) -> Any:
        logits, cache = TARGET.forward(params, cache, block)
        return jnp.where((block.positions == 5)[:, None], jnp.nan, logits), cache

    broken = CompiledDecoder(
        dataclasses.replace(TARGET, forward=forward), max_length=LENGTH, prefill_width=4
    )
    texts = broken.run([[1, 2, 3], [0]], keys(2), new_tokens=[20, 3], temperature=0.0)
    assert texts[0].tokens == greedy((1, 2, 3), 3)
    assert texts[0].ending == Ending.UNDECIDED
    assert texts[0].status == js.Status.NON_FINITE_ROW
    assert texts[1].tokens == greedy((0,), 3)
    assert texts[1].ending == Ending.BUDGET


def test_networks_that_cannot_do_it_are_refused_before_anything_runs() -> None:
    stuck = fake_model(VOCAB, name="stuck", rolls_back=False)
    with pytest.raises(CacheError, match="stuck: its cache cannot roll back"):
        CompiledDecoder(stuck)
    with pytest.raises(CacheError, match="stuck: its cache cannot roll back"):
        CompiledDecoder(TARGET, model_path(stuck, 2))
    flat = fake_model(VOCAB, name="flat", takes_trees=False)
    with pytest.raises(CacheError, match="flat takes no mask, so it verifies paths only"):
        CompiledDecoder(flat, Lookup(matches=2))
    with pytest.raises(CacheError, match="flat takes no mask"):
        ModelTree(flat, (2, 1), js.RULES["point_mass"])
    fixed = fake_model(VOCAB, name="fixed", has_keep=False)
    with pytest.raises(CacheError, match="fixed has a cache whose slots cannot move"):
        CompiledDecoder(fixed, Lookup(matches=2))
    with pytest.raises(CacheError, match="max_length is 40, but short was made for 30 positions"):
        CompiledDecoder(fake_model(VOCAB, name="short", max_context=30), max_length=40)
    names = [SimpleNamespace(pieces=tuple(pieces)) for pieces in ("abcde", "abxde")]
    ours, theirs = (fake_model(VOCAB, name=t.pieces[2], tokenizer=t) for t in names)
    with pytest.raises(TokensDifferError, match="token 2 is 'c' to target c, 'x' to draft x"):
        CompiledDecoder(ours, model_path(theirs, 2))


def test_a_network_of_stretches_alone_verifies_paths_and_without_bonus_ends_them_with_their_last() -> (
    None
):
    flat = fake_model(VOCAB, name="flat", takes_trees=False, has_keep=False)
    path = CompiledDecoder(
        flat, model_path(flat, 2), max_length=LENGTH, prefill_width=4, bonus=False
    )
    (text,) = path.run([[1, 2, 3]], keys(1), new_tokens=9, temperature=0.0)
    assert text.tokens == greedy((1, 2, 3), 9)
    # Without bonus a round of 2 accepted tokens emits 2, and the last has room for 1.
    assert (text.rounds, text.accepted) == (5, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "there are no prompts"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1], [1, 5]]}, "prompt 1: token 1 is 5, outside the vocabulary of 5"),
        ({"prompts": [[1], [0.5]]}, "prompt 1: wanted a sequence of token ids"),
        ({"prompts": [[1], [1] * 41]}, "prompt 1 has 41 tokens, max_length is 40"),
        ({"new_tokens": [1, 0]}, "row 1: new_tokens is 0: must be at least 1"),
        ({"new_tokens": 1.5}, "new_tokens is 1.5: wanted whole numbers"),
        ({"new_tokens": [1, 2, 3]}, "wanted a number, or 2 of them"),
        ({"temperature": [0.0, -1.0]}, "row 1: temperature is -1.0: must be finite and at least 0"),
        ({"temperature": float("nan")}, "row 0: temperature is nan"),
        ({"stop_tokens": 2}, "stop_tokens is 2: wanted a sequence of token ids"),
        ({"stop_tokens": [1.5]}, "row 0: stop_tokens are \\[1.5\\]: wanted token ids"),
        ({"stop_tokens": [True]}, "row 0: stop_tokens are \\[True\\]: wanted token ids"),
        ({"stop_tokens": [[1], ["2"]]}, "row 1: stop_tokens are \\['2'\\]: wanted token ids"),
        ({"prompts": [[1, [2]], [0]]}, "prompt 0: wanted a sequence of token ids"),
        ({"top_k": -2}, "row 0: top_k is -2: must be at least 1, or 0 or -1 to keep all tokens"),
        ({"temperature": [1.0, True]}, "row 1: temperature is True: wanted a number"),
        ({"new_tokens": [True, 2]}, "row 0: new_tokens is True: wanted a number"),
        ({"prompts": [[1], [True, 2]]}, "prompt 1: wanted a sequence of token ids"),
        ({"stop_tokens": [1, True]}, "row 0: stop_tokens are \\[1, True\\]: wanted token ids"),
        ({"temperature": 1e39}, "row 0: temperature is 1e\\+39: must be finite"),
        ({"top_p": [1.0, 1.5]}, "row 1: top_p is 1.5: must be above 0 and at most 1"),
        ({"stop_tokens": [5]}, "row 0: stop token 5 is outside the vocabulary of 5"),
        ({"stop_tokens": [[0]]}, "stop_tokens are given for 1 rows, the batch has 2"),
        ({"stop_tokens": [0, 1, 2, 3, 4]}, "row 0 has 5 stop tokens, there is room for 4"),
        ({"keys": jax.random.key(0)}, "keys must be 2 typed keys"),
        ({"top_k": [3, None]}, "row 1: top_k is None: wanted a number; 5 keeps all tokens"),
        ({"top_p": [None, 0.9]}, "row 0: top_p is None: wanted a number; 1.0 keeps all tokens"),
        ({"temperature": [1.0, None]}, "row 1: temperature is None: wanted a number$"),
        ({"temperature": ["0.5", 1.0]}, "row 0: temperature is '0.5': wanted a number"),
        (
            {"temperature": [1.0, [1.0, 2.0]]},
            r"row 1: temperature is \[1.0, 2.0\]: wanted a number",
        ),
        ({"new_tokens": [2, None]}, "row 1: new_tokens is None: wanted a number"),
        ({"new_tokens": None}, "new_tokens is None: wanted a number, or 2 of them"),
        ({"top_p": None}, "top_p is None: wanted a number, or 2 of them"),
        ({"prompts": 5}, "prompts is 5, of type int: must be a sequence of prompts"),
        ({"prompts": iter([[1], [2]])}, "prompts is of type list_iterator: must be a sequence"),
        (
            {"stop_tokens": np.array(3)},
            r"stop_tokens is array\(3\): wanted a sequence of token ids",
        ),
    ],
)
def test_bad_arguments_are_named_with_their_row_and_value(
    change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"prompts": [[1], [2]], "keys": keys(2), "new_tokens": 2} | change
    with pytest.raises(ValueError, match=message):
        decoder("plain").start(arguments.pop("prompts"), arguments.pop("keys"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 1.5}, "max_length is 1.5: must be a whole number, at least 1"),
        ({"max_length": float("nan")}, "max_length is nan"),
        ({"prefill_width": True}, "prefill_width is True"),
        ({"max_stop_tokens": 0}, "max_stop_tokens is 0"),
        ({"bonus": 2}, "bonus is 2: must be True or False"),
        ({"drafter": NGramTree(fit_ngram("abc", 1), (1,))}, "the drafter one of 3"),
    ],
)
def test_a_decoder_of_bad_sizes_or_of_other_tokens_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CompiledDecoder(TARGET, **arguments)


def own_drafter(**parts: Any) -> FusedDrafter:
    """A drafter of one's own, with parts that are of another kind."""
    return type("Own", (Plain,), parts)()


NO_DRAFTER = "must be a fused drafter, such as Plain() or model_path(model, depth)"
NO_NETWORK = ": must be a jaxspec.models.network.LanguageModel, such as models.load_huggingface"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompiledDecoder(provider(0.0, 1.0)), f"target is of type Provider{NO_NETWORK}"),
        (lambda: CompiledDecoder("llama"), f"target is 'llama', of type str{NO_NETWORK}"),
        (lambda: CompiledDecoder(TARGET.params), f"target is of type dict{NO_NETWORK}"),
        (lambda: CompiledDecoder(LanguageModel), "target is the class LanguageModel: must be"),
        (
            lambda: CompiledDecoder(TARGET, NoDraft()),
            "drafter is of type NoDraft, which has no capacity, widths, model, params, spare_slots: "
            + NO_DRAFTER,
        ),
        (lambda: CompiledDecoder(TARGET, TARGET), "drafter is of type LanguageModel, which has"),
        (lambda: CompiledDecoder(TARGET, None), "drafter is None, which has no rule, capacity"),
        (lambda: CompiledDecoder(TARGET, "lookup"), "drafter is 'lookup', of type str, which"),
        (
            lambda: CompiledDecoder(TARGET, Plain),
            f"drafter is the class Plain, not one made of it: {NO_DRAFTER}",
        ),
        (
            lambda: CompiledDecoder(TARGET, own_drafter(model="draft")),
            f"the drafter's model is 'draft', of type str{NO_NETWORK}",
        ),
        (
            lambda: CompiledDecoder(TARGET, own_drafter(rule="token")),
            "the drafter's rule is 'token', of type str: must be a jaxspec.Rule, RULES[\"token\"]",
        ),
        (
            lambda: CompiledDecoder(TARGET, own_drafter(capacity=(1, 1, 0))),
            "the drafter's capacity is of type tuple: must be a Capacity(max_nodes, max_children,",
        ),
        (
            lambda: CompiledDecoder(TARGET, own_drafter(widths=2)),
            "the drafter's widths is 2, of type int: must be a sequence of block widths, rising",
        ),
        (
            lambda: CompiledDecoder(TARGET, own_drafter(widths=(0, 1))),
            "the drafter's widths are (0, 1): one of them is 0: must be a whole number, at least 1",
        ),
        *(
            (
                lambda widths=widths: CompiledDecoder(TARGET, own_drafter(widths=widths)),
                f"the drafter's widths are {tuple(widths)}: must rise, and end with its capacity's",
            )
            for widths in ((), (2,), (1, 2), [1, 1], (2, 1))
        ),
        (
            lambda: CompiledDecoder(TARGET, draws=jax.random.key(0)),
            "must be a function of (key, number of nodes, root position), such as jaxspec.round_draws",
        ),
        (lambda: decoder("plain").lower("x"), "batch is 'x': must be a whole number, at least 1"),
        (lambda: decoder("plain").lower(0), "batch is 0: must be a whole number, at least 1"),
        (
            lambda: decoder("plain").advance(None),
            "state is None: must be a BatchState, such as CompiledDecoder.start and advance give",
        ),
        (lambda: texts_of([1, 2]), "state is of type list: must be a BatchState"),
    ],
)
def test_what_is_of_another_kind_is_refused_by_name_with_what_to_give_instead(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


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
    broken = CompiledDecoder(forward_giving(change), max_length=LENGTH, prefill_width=4)
    with pytest.raises(ForwardError, match=message):
        broken.run([[1, 2]], keys(1), new_tokens=3)
    drafting = model_path(forward_giving(change), 3)
    with pytest.raises(ForwardError, match="target: forward"):
        CompiledDecoder(TARGET, drafting, max_length=LENGTH, prefill_width=4).lower(1)


def test_a_state_of_another_decoder_or_one_given_away_is_refused_and_can_be_used_on() -> None:
    state = decoder("plain").start([[1, 2]], keys(1), new_tokens=5)
    for other in (
        CompiledDecoder(TARGET, max_length=2 * LENGTH),
        CompiledDecoder(TARGET, max_length=LENGTH, prefill_width=4, max_stop_tokens=5),
        CompiledDecoder(TARGET, max_length=LENGTH, prefill_width=4),
        decoder("path by token"),
    ):
        with pytest.raises(ValueError, match="the state was begun by another decoder: its"):
            other.advance(state)
    for rounds in (-1, True, 2.7, "3"):
        with pytest.raises(ValueError, match=f"max_rounds is {rounds!r}: must be a whole number"):
            decoder("plain").advance(state, rounds)
    after = decoder("plain").advance(state, 2**40)
    assert len(texts_of(after)[0].new_tokens) == 5
    for use in (decoder("plain").advance, texts_of):
        with pytest.raises(ValueError, match="given to advance: use the one that it returned"):
            use(state)


def test_a_budget_beyond_the_capacity_ends_at_the_capacity_however_large() -> None:
    for budget in (LENGTH, 2**63 - 1, np.uint64(2**64 - 1)):
        (text,) = decoder("plain").run([[1, 2]], keys(1), new_tokens=budget)
        assert len(text.tokens) == LENGTH
        assert text.ending == Ending.CAPACITY


def test_tokens_of_numpy_prompts_are_taken_as_they_are() -> None:
    text = decoder("plain").run([np.array([1, 2], np.int64)], keys(1), new_tokens=1)[0]
    assert text.tokens[:2] == (1, 2)
