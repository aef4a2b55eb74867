"""Limited contexts and other vocabularies: drafts while it can, then the text goes on plainly."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import fake_model, row_after
from helpers.small import DRAFT, LENGTH, PROMPTS, TARGET, VOCAB, greedy, keys, provider
from helpers.small import DRAFTERS as SMALL

from jaxspec.decode import (
    CachedNetwork,
    CompiledDecoder,
    DecodedText,
    Decoder,
    Ending,
    Source,
    metrics_of,
)
from jaxspec.draft import AdaptiveTree, FixedTree, NoDraft, SampledPath
from jaxspec.models import Block, LanguageModel, Provider, Softmax
from jaxspec.models.provider import Context

MOST = 12
SHORT = fake_model(VOCAB, name="short", noise=0.5, max_context=MOST)


class TooLongError(Exception):
    """A model was asked about more tokens than it has positions for."""


def limited(inner: Provider, most: int) -> Provider:
    """A model that fails beyond its context."""

    def ask(context: Context) -> Any:
        if len(context) > most:
            raise TooLongError(len(context))
        return inner.ask(context)

    return dataclasses.replace(inner, ask=ask, max_context=most)


DRAFTERS = {
    name: SMALL[name] for name in ("path by token", "path by block", "top-k tree", "adaptive tree")
}
each_drafter = pytest.mark.parametrize("name", DRAFTERS)


def assert_both_loops_decode_alike(
    name: str, draft: LanguageModel, host_draft: dict[bool, Provider], target: LanguageModel
) -> list[DecodedText]:
    """The compiled text is that of the host loop, and greedy at temperature 0."""
    loop = CompiledDecoder(target, DRAFTERS[name](draft), max_context=LENGTH, prefill_width=4)
    texts = loop.run(PROMPTS, keys(3), new_tokens=25, temperature=0.25)
    is_sampled = name.startswith("path")
    for text, prompt, key in zip(texts, PROMPTS, keys(3), strict=True):
        drafter = DRAFTERS[name](host_draft[is_sampled])
        one = Decoder(provider(0.0, 0.25), drafter).run(prompt, key, new_tokens=25)
        assert text.tokens == one.tokens
        assert text.rounds == len(one.rounds)
        assert text.drafted == sum(each.num_drafted for each in one.rounds)
    return list(texts)


@each_drafter
def test_a_draft_of_shorter_context_drafts_while_it_can(name: str) -> None:
    drafts = {s: limited(provider(0.5, 0.25 if s else 1.0), MOST) for s in (True, False)}
    texts = assert_both_loops_decode_alike(name, SHORT, drafts, TARGET)
    assert all(text.status == 0 for text in texts)
    assert sum(text.accepted for text in texts) > 0
    for text in texts:
        # Where the draft's context is full each round emits one token of the target.
        late = text.tokens[MOST + 2 :]
        assert len({text.rounds_at[-1 - place] for place in range(len(late) - 1)}) == len(late) - 1


def test_sequences_of_a_batch_draft_each_as_long_as_it_can() -> None:
    loop = CompiledDecoder(TARGET, SampledPath(SHORT, 3), max_context=LENGTH, prefill_width=4)
    prompts = ([1, 2], [1] * 20, [0, 1, 2] * 4)
    together = loop.run(prompts, keys(3), new_tokens=9, temperature=0.25)
    assert [text.drafted > 0 for text in together] == [True, False, True]
    assert all(text.status == 0 for text in together)
    for text, prompt, key in zip(together, prompts, keys(3), strict=True):
        assert loop.run([prompt], key, new_tokens=9, temperature=0.25)[0].tokens == text.tokens


def test_a_host_draft_of_limited_context_is_never_asked_beyond_it_at_any_length() -> None:
    for most in (1, 2, 3, 7):
        draft = limited(provider(0.5, 1.0), most)
        for drafter in (SampledPath(draft, 3), FixedTree(draft, (2, 1)), AdaptiveTree(draft)):
            decoder = Decoder(provider(0.0, 0.0), drafter)
            state = decoder.run((1, 2), jax.random.key(0), new_tokens=9)
            assert state.tokens == greedy((1, 2), 9)
            assert (metrics_of(state.rounds).drafted > 0) == (most > 1)


@pytest.mark.parametrize("bonus", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        NoDraft,
        lambda: FixedTree(provider(0.5, 1.0), (2, 1)),
        lambda: SampledPath(provider(0.5, 1.0), 4),
    ],
)
def test_the_text_fills_a_network_s_cache_and_ends_there(make: Any, bonus: bool) -> None:
    network = fake_model(VOCAB, name="target", max_context=24)
    attention = CachedNetwork(network, slots=24, chunk=4, transform=Softmax(0.0))
    for length in (3, 20, 21, 22, 23):
        prompt = (1, 2, 0) * 7 + (4, 4, 1)
        decoder = Decoder(attention, make(), bonus=bonus)
        state = decoder.run(prompt[:length], jax.random.key(0))
        assert (state.ending, len(state.tokens)) == (Ending.CAPACITY, 24)
        assert state.tokens == greedy(prompt[:length], 24 - length)
    with pytest.raises(ValueError, match="prompt has 25 tokens, max_context is 24"):
        decoder.start((1,) * 25, jax.random.key(0))


def test_a_target_of_limited_context_ends_the_text_whoever_scores() -> None:
    target = limited(provider(0.0, 0.0), 9)
    for drafter in (NoDraft(), FixedTree(provider(0.5, 1.0), (2, 1))):
        state = Decoder(target, drafter, max_context=30).run((1, 2), jax.random.key(0))
        assert (state.ending, len(state.tokens)) == (Ending.CAPACITY, 9)


# --- other vocabularies


def widened(model: LanguageModel, vocab: int) -> LanguageModel:
    """A network whose rows are padded to more tokens, some of them likely."""

    def forward(params: Any, cache: Any, block: Block) -> Any:
        # A table that is read beyond its end: NaN from then on.
        block = dataclasses.replace(block, tokens=jnp.minimum(block.tokens, VOCAB))
        logits, cache = model.forward(params, cache, block)
        more = jnp.full((block.tokens.shape[0], vocab - model.vocab), 3.0)
        return jnp.concatenate([logits, more], axis=1), cache

    return dataclasses.replace(model, vocab=vocab, forward=forward)


def padded(logits: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([logits, np.full(count, 3.0, np.float32)])


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "path by block"])
def test_a_draft_padded_to_more_tokens_than_the_target_drafts_the_common_ones(name: str) -> None:
    @functools.cache
    def wide(temperature: float) -> Provider:
        row = lambda context: padded(row_after(context, VOCAB, noise=0.5), 2)  # noqa: E731
        return Provider("wide", VOCAB + 2, row, transform=Softmax(temperature))

    drafts = {True: wide(0.25), False: wide(1.0)}
    texts = assert_both_loops_decode_alike(name, widened(DRAFT, VOCAB + 2), drafts, TARGET)
    assert sum(text.accepted for text in texts) > 0
    plain = CompiledDecoder(TARGET, DRAFTERS[name](DRAFT), max_context=LENGTH, prefill_width=4).run(
        PROMPTS, keys(3), new_tokens=25, temperature=0.25
    )
    assert [text.tokens for text in plain] == [text.tokens for text in texts]


@pytest.mark.parametrize("name", ["path by token", "top-k tree"])
def test_a_draft_of_fewer_tokens_drafts_until_the_text_holds_one_that_it_lacks(name: str) -> None:
    """Tokens 5 and 6 of this target follow texts of some lengths: the draft cannot read them."""

    def likely(length: Any, xp: Any) -> Any:
        return xp.where(length % 9 == 0, 9.0, -9.0)

    def forward(params: Any, cache: Any, block: Block) -> Any:
        block = dataclasses.replace(block, tokens=jnp.minimum(block.tokens, VOCAB - 1))
        logits, cache = TARGET.forward(params, cache, block)
        likely_more = likely(block.positions + 1, jnp)[:, None]
        more = jnp.broadcast_to(likely_more, (block.tokens.shape[0], 2))
        return jnp.concatenate([logits, more.astype(jnp.float32)], axis=1), cache

    target = dataclasses.replace(TARGET, vocab=VOCAB + 2, forward=forward)

    def row(context: Context) -> np.ndarray:
        logits = row_after([min(token, VOCAB - 1) for token in context], VOCAB)
        return np.concatenate([logits, np.full(2, likely(len(context), np), np.float32)])

    loop = CompiledDecoder(target, DRAFTERS[name](DRAFT), max_context=LENGTH, prefill_width=4)
    texts = loop.run(PROMPTS, keys(3), new_tokens=25, temperature=0.25)
    draft = provider(0.5, 0.25 if name.startswith("path") else 1.0)
    wide = Provider("wide", VOCAB + 2, row, transform=Softmax(0.25))
    for text, prompt, key in zip(texts, PROMPTS, keys(3), strict=True):
        one = Decoder(wide, DRAFTERS[name](draft)).run(prompt, key, new_tokens=25)
        assert text.tokens == one.tokens
        assert max(text.tokens) >= VOCAB
        assert text.rounds == len(one.rounds)
        assert text.status == 0
        strange = next(n for n, token in enumerate(text.tokens) if token >= VOCAB)
        assert Source.DRAFT not in text.sources[strange + 1 :]
    assert sum(text.accepted for text in texts) > 0
