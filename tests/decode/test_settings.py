"""Every sampler setting of a request, in both loops."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.plain_sampling import processed
from helpers.small import (
    BUDGETS,
    DRAFT,
    DRAFTERS,
    LENGTH,
    PROMPTS,
    TARGET,
    keys,
    provider,
)
from helpers.small_texts import DRAFTERS as SMALL_DRAFTERS
from helpers.small_texts import PROMPT
from helpers.small_texts import TARGET as SMALL_TARGET
from helpers.small_texts import VOCAB as SMALL_VOCAB

from jaxspec.audit import decoding_law
from jaxspec.decode import CompiledDecoder, Decoder, load, save
from jaxspec.models.provider import Context

COLUMNS: dict[str, Any] = {
    "new_tokens": BUDGETS,
    "temperature": (0.5, 1.5, 1.0),
    "top_k": (None, 4, None),
    "min_p": (0.1, 0.0, 0.02),
    "logit_bias": ({1: 1.5, 3: -2.0}, {}, {4: -1e9}),
    "allowed_tokens": (None, [0, 2, 3, 4], None),
    "frequency_penalty": (0.3, 0.0, -0.1),
    "presence_penalty": (0.0, 0.5, 0.2),
}


@pytest.mark.parametrize("name", ["plain", "path by token", "traversal", "adaptive tree"])
def test_settings_of_tokens_give_one_text_in_both_loops(name: str) -> None:
    """The draft is sampled with them too: what it drafts and what is accepted are the same."""
    host = Decoder(provider(0.0, 1.0), DRAFTERS[name](provider(0.5, 1.0)), max_context=LENGTH)
    batch = CompiledDecoder(
        TARGET, DRAFTERS[name](DRAFT), max_context=LENGTH, prefill_width=4, token_settings=True
    )
    state = batch.start(PROMPTS, keys(3), **COLUMNS)
    for _ in range(3):  # counts go on from state to state
        state = batch.advance(state, 2)
    texts = batch.advance(state).texts()
    for n, text in enumerate(texts):
        options = {option: values[n] for option, values in COLUMNS.items()}
        one = host.run(PROMPTS[n], keys(3)[n], **options)
        assert (text.tokens, text.ending) == (one.tokens, one.ending)
        assert (text.rounds, text.drafted) == (
            len(one.rounds),
            sum(each.num_drafted for each in one.rounds),
        )
        assert text.accepted == sum(each.num_accepted for each in one.rounds)
    assert not {1} & set(texts[1].new_tokens)
    assert not {4} & set(texts[2].new_tokens)


SETTINGS: dict[str, dict[str, Any]] = {
    "temperature .5": {"temperature": 0.5},
    "temperature 2, top-p": {"temperature": 2.0, "top_p": 0.8},
    "top-k, min-p": {"top_k": 2, "min_p": 0.4},
    "bias, mask": {"logit_bias": {0: 1.0, 1: -0.5}, "allowed_tokens": [0, 2]},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": -0.4},
}
SETTINGS["all"] = {
    **{name: value for each in SETTINGS.values() for name, value in each.items()},
    "allowed_tokens": [0, 1],
}


def oracle(options: dict[str, Any], length: int) -> dict[Context, float]:
    """The target's law of texts, each row processed in float64."""
    given = dict(options)
    bias = np.zeros(SMALL_VOCAB)
    for token, nats in given.pop("logit_bias", {}).items():
        bias[token] = nats
    allowed = np.isin(np.arange(SMALL_VOCAB), given.pop("allowed_tokens", range(SMALL_VOCAB)))
    frequency, presence = given.pop("frequency_penalty", 0.0), given.pop("presence_penalty", 0.0)
    law: dict[Context, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Context, float] = {}
        for text, mass in law.items():
            (row,), _ = SMALL_TARGET.rows([(*PROMPT, *text)])
            with np.errstate(divide="ignore"):
                logits = np.log(row.astype(np.float64))
            settings = {"bias": bias, "allowed": allowed, "output": text}
            settings |= {"frequency": frequency, "presence": presence}
            for token, share in enumerate(processed(logits, **settings, **given)):
                if share > 0:
                    longer[(*text, token)] = mass * share
        law = longer
    return law


@pytest.mark.parametrize("name", ["none", "path by block", "fixed tree"])
@pytest.mark.parametrize("which", SETTINGS)
def test_speculative_and_plain_texts_have_the_law_of_the_processed_target(
    which: str, name: str
) -> None:
    options = SETTINGS[which]
    decoder = Decoder(SMALL_TARGET, SMALL_DRAFTERS[name])
    law = decoding_law(decoder, PROMPT, new_tokens=3, num_keys=0, **options)
    assert law.is_proved, law.failures
    wanted = oracle(options, 3)
    assert set(law.texts) <= set(wanted)
    for text, mass in wanted.items():
        assert law.texts.get(text, 0.0) == pytest.approx(mass, abs=2e-6)


def test_a_state_with_settings_is_saved_and_goes_on_to_the_same_text(tmp_path: Path) -> None:
    decoder = Decoder(provider(0.0, 1.0), DRAFTERS["path by token"](provider(0.5, 1.0)))
    options = {option: values[0] for option, values in COLUMNS.items()}
    state, _ = decoder.step(decoder.start(PROMPTS[0], keys(1)[0], **options))
    save(tmp_path / "state.json", state)
    loaded = load(tmp_path / "state.json")
    assert loaded == state
    assert decoder.resume(loaded).tokens == decoder.resume(state).tokens


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {1: 1.0}}, {"allowed_tokens": [0, 1]}, {"presence_penalty": 0.5}],
)
def test_a_decoder_without_room_for_settings_of_tokens_says_how_to_make_it(
    options: dict[str, Any],
) -> None:
    decoder = CompiledDecoder(TARGET, max_context=LENGTH)
    with pytest.raises(ValueError, match=r"sequence 0 has .*with token_settings=True"):
        decoder.start([[0]], keys(1)[0], **options)


def test_a_state_of_a_decoder_with_other_settings_is_rejected() -> None:
    state = CompiledDecoder(TARGET, max_context=LENGTH).start([[0]], keys(1)[0])
    other = CompiledDecoder(TARGET, max_context=LENGTH, token_settings=True)
    with pytest.raises(ValueError, match="begun by another decoder: its sampling"):
        other.advance(state)
