"""Saving a network: all is checked before a file is touched, and a failure leaves what stood there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import LlamaConfig, init_llama, load_huggingface, rope_frequencies
from jaxspec.models import save as saving
from jaxspec.models.save import save_huggingface

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

CONFIG = LlamaConfig(
    vocab=5,
    width=8,
    layers=1,
    heads=2,
    kv_heads=1,
    head_width=4,
    hidden=16,
    rope_frequencies=rope_frequencies(4),
    max_context=32,
)
PARAMS = init_llama(jax.random.key(0), CONFIG)


def changed(**sizes):
    return dataclasses.replace(CONFIG, **sizes)


@pytest.fixture
def saved(tmp_path):
    save_huggingface(tmp_path, CONFIG, PARAMS, "abcde", dtype=np.float32)
    return tmp_path


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


HEADED = dataclasses.replace(PARAMS, head=jnp.ones((5, 8)))
POISONED = dataclasses.replace(PARAMS, norm=PARAMS.norm.at[3].set(jnp.nan))


@pytest.mark.parametrize(
    ("config", "params", "options", "message"),
    [
        (changed(layers=2), PARAMS, {}, "layers"),
        (changed(width=16), PARAMS, {}, r"\(5, 8\)"),
        (changed(hidden=32), PARAMS, {}, "gate"),
        (CONFIG, HEADED, {}, "head"),
        (changed(is_tied=False), PARAMS, {}, "head"),
        (CONFIG, POISONED, {}, "model.norm.weight has an entry that is not finite"),
        (CONFIG, PARAMS, {"dtype": np.int8}, "dtype is int8, must be float16 or float32"),
        (CONFIG, PARAMS, {"alphabet": "abc"}, "must be 5 distinct ones, sorted"),
        (CONFIG, PARAMS, {"alphabet": "aabcd"}, "must be 5 distinct ones, sorted"),
        (CONFIG, PARAMS, {"alphabet": "edcba"}, "must be 5 distinct ones, sorted"),
        (CONFIG, PARAMS, {"alphabet": None}, "tokenizer.json is there, yet not written anew"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_the_checkpoint_that_stood_there_stays_whole(
    saved, config, params, options, message
):
    before = contents(saved)
    with pytest.raises(ValueError, match=message):
        save_huggingface(saved, config, params, **({"alphabet": "abcde"} | options))
    assert contents(saved) == before


def test_a_write_that_fails_midway_leaves_the_checkpoint_that_stood_there(saved, monkeypatch):
    before = contents(saved)

    def full(*arguments):
        raise OSError("no space left on the device")

    monkeypatch.setattr(saving.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_huggingface(saved, CONFIG, init_llama(jax.random.key(1), CONFIG), "abcde")
    assert contents(saved) == before


def test_a_saved_tokenizer_refuses_by_name_what_it_has_no_token_for(saved):
    tokenizer = load_huggingface(saved).tokenizer
    assert tokenizer.decode(tokenizer.encode("badec")) == "badec"
    with pytest.raises(ValueError, match="é"):
        tokenizer.encode("abé")
    for token in (-1, 5):
        with pytest.raises(ValueError, match=str(token)):
            tokenizer.decode([0, token])
