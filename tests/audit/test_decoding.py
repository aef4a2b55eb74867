"""The law of a decoded text is exactly the target's, for every drafter."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.small_texts import (
    BLOCK,
    DRAFTERS,
    PATH,
    PROMPT,
    TARGET,
    TARGETS,
    TREE,
    VOCAB,
    assert_lossless,
)

from jaxspec.audit import decoding_law, g_test
from jaxspec.decode import CallableTarget, Decoder
from jaxspec.draft import SampledPath
from jaxspec.models import Provider
from jaxspec.models.provider import Context

each_drafter = pytest.mark.parametrize("name", DRAFTERS)


@each_drafter
def test_every_decoder_has_exactly_the_targets_law(name: str) -> None:
    for target, new_tokens in TARGETS.values():
        for bonus in (True, False):
            decoder = Decoder(target, DRAFTERS[name], bonus=bonus)
            law = decoding_law(decoder, PROMPT, new_tokens=new_tokens)
            assert_lossless(law)
            assert {len(text) for text in law.texts} == {new_tokens}


@each_drafter
def test_the_law_is_the_targets_up_to_stop_tokens_and_the_end_of_the_context(name: str) -> None:
    decoder = Decoder(TARGET, DRAFTERS[name], max_context=4)
    law = decoding_law(decoder, (2, 0), new_tokens=9, stop_tokens=[1])
    assert_lossless(law)
    assert all(1 not in text[:-1] for text in law.texts)
    assert {len(text) for text in law.texts} == {1, 2}


@pytest.mark.parametrize("name", ["path by block", "fixed tree"])
def test_temperature_and_filters_are_part_of_the_law(name: str) -> None:
    law = decoding_law(Decoder(TARGET, DRAFTERS[name]), PROMPT, new_tokens=2, temperature=0.5)
    assert_lossless(law)
    (row,), _ = TARGET.rows([PROMPT])
    first = [sum(mass for text, mass in law.texts.items() if text[0] == x) for x in range(VOCAB)]
    assert first == pytest.approx(row**2 / (row**2).sum(), abs=1e-6)
    greatest = decoding_law(Decoder(TARGET, DRAFTERS[name]), PROMPT, new_tokens=2, top_k=1)
    assert_lossless(greatest)
    assert len(greatest.texts) == 1


def test_targets_asked_in_any_grouping_lead_to_one_law() -> None:
    targets = [CallableTarget(TARGET, group) for group in ("node", "all", "depth")]
    laws = [decoding_law(Decoder(target, TREE), PROMPT, new_tokens=2) for target in targets]
    assert_lossless(laws[0])
    assert laws[0].texts == laws[1].texts == laws[2].texts


def test_the_law_of_a_prompt_that_fills_the_context_is_the_empty_text() -> None:
    short = dataclasses.replace(TARGET, max_context=1)
    for decoder in (Decoder(TARGET, PATH, max_context=1), Decoder(short, PATH)):
        law = decoding_law(decoder, PROMPT)
        assert law.texts == law.target_texts == {(): 1.0}


def test_the_targets_own_law_is_the_product_of_its_rows_and_ends_at_stop_tokens() -> None:
    rows = {(0,): [0.5, 0.5], (0, 0): [0.25, 0.75], (0, 1): [0.0, 1.0]}
    decoder = Decoder(Provider("target", 2, rows.__getitem__))
    whole = {(0, 0): 0.125, (0, 1): 0.375, (1, 1): 0.5}
    assert decoding_law(decoder, (0,), new_tokens=2).target_texts == whole
    stopped = {(0, 0): 0.125, (0, 1): 0.375, (1,): 0.5}
    assert decoding_law(decoder, (0,), new_tokens=2, stop_tokens=[1]).target_texts == stopped


def test_a_vocabulary_of_more_than_one_tile_is_an_error() -> None:
    wide = Provider("wide", 513, lambda _: np.full(513, 1 / 513))
    with pytest.raises(ValueError, match="vocab is 513"):
        decoding_law(Decoder(wide), PROMPT, new_tokens=1)


def test_real_runs_on_random_keys_have_the_law_that_was_composed() -> None:
    # Block verification without the bonus: after a rejection the next round must not see the draws
    # that this one has looked at, which no law of independent rounds can show.
    decoder = Decoder(TARGET, BLOCK, bonus=False)
    law = decoding_law(decoder, PROMPT, new_tokens=2)
    keys = jax.random.split(jax.random.key(5), 2000)
    texts = [decoder.run(PROMPT, key, new_tokens=2).new_tokens for key in keys]
    every = sorted(law.texts)
    # The exact law as a sample of a billion, so that the 2000 are all the uncertainty.
    exact = np.array([round(1e9 * law.texts[text]) for text in every])
    found = g_test(np.array([texts.count(text) for text in every]), exact)
    assert set(texts) <= set(every)
    assert found.p_value > found.level
    assert found.detectable < 0.07


def test_a_draft_in_half_precision_leads_to_exactly_the_targets_law() -> None:
    def half(context: Context) -> np.ndarray:
        row = np.random.default_rng([2, *context]).dirichlet(np.ones(VOCAB)).astype(np.float16)
        row[row.argmax()] -= np.float16(row.sum(dtype=np.float64) - 0.9992)
        return row  # of a mass within the tolerance of its type

    decoder = Decoder(TARGET, SampledPath(Provider("half", VOCAB, half), 2), bonus=False)
    assert_lossless(decoding_law(decoder, PROMPT, new_tokens=2))


def test_progress_of_a_law_of_texts_goes_from_the_prompt_to_the_longest_text() -> None:
    calls: list[tuple[str, int, int]] = []
    decoder = Decoder(TARGET, PATH, bonus=False)
    decoding_law(decoder, PROMPT, new_tokens=2, progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 2)
    assert {call[2] for call in calls} == {2}
    assert any("evaluations" in call[0] for call in calls)
