"""Saving a network: all is checked before a file is changed, and a failure leaves the old files."""

import contextlib
import dataclasses
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import (
    CheckpointError,
    LlamaConfig,
    init_llama,
    load_huggingface,
    rope_frequencies,
)
from jaxspec.models.load import huggingface as checkpoint
from training.save import save_huggingface

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
NAMES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def changed(**sizes):
    return dataclasses.replace(CONFIG, **sizes)


@pytest.fixture
def saved(tmp_path):
    place = tmp_path / "saved"
    save_huggingface(place, CONFIG, PARAMS, "abcde", dtype=np.float32)
    return place


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


HEADED = dataclasses.replace(PARAMS, head=jnp.ones((5, 8)))
CORRUPTED = dataclasses.replace(PARAMS, norm=PARAMS.norm.at[3].set(jnp.nan))


@pytest.mark.parametrize(
    ("config", "params", "options", "message"),
    [
        (changed(layers=2), PARAMS, {}, "layers"),
        (changed(width=16), PARAMS, {}, r"\(5, 8\)"),
        (changed(hidden=32), PARAMS, {}, "gate"),
        (CONFIG, HEADED, {}, "head"),
        (changed(is_tied=False), PARAMS, {}, "head"),
        (CONFIG, CORRUPTED, {}, "model.norm.weight has an entry that is not finite"),
        (CONFIG, PARAMS, {"dtype": np.int8}, "dtype is int8, must be float16 or float32"),
        (CONFIG, PARAMS, {"alphabet": "abc"}, "must be 5 distinct ones, sorted"),
        (CONFIG, PARAMS, {"alphabet": "aabcd"}, "must be 5 distinct ones, sorted"),
        (CONFIG, PARAMS, {"alphabet": "edcba"}, "must be 5 distinct ones, sorted"),
        (CONFIG, PARAMS, {"alphabet": None}, "tokenizer.json exists but would not be rewritten"),
    ],
)
def test_what_cannot_be_saved_is_an_error_and_the_old_checkpoint_stays(
    saved, config, params, options, message
):
    before = contents(saved)
    with pytest.raises(ValueError, match=message):
        save_huggingface(saved, config, params, **({"alphabet": "abcde"} | options))
    assert contents(saved) == before


def test_a_write_that_fails_midway_leaves_the_old_checkpoint(saved, monkeypatch):
    before = contents(saved)

    def full(*arguments):
        raise OSError("no space left on the device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_huggingface(saved, CONFIG, init_llama(jax.random.key(1), CONFIG), "abcde")
    assert contents(saved) == before


NEW = dataclasses.replace(PARAMS, norm=2 * PARAMS.norm)
OTHER_ALPHABET = "vwxyz"


class Killed(BaseException):
    """The process ends here."""


def loaded(directory):
    """Return which checkpoint is loaded, or None if loading fails."""
    try:
        model = load_huggingface(directory)
    except CheckpointError as error:
        assert str(directory) in str(error)
        return None
    is_new = bool((model.params.norm == NEW.norm).all())
    assert model.max_context == (64 if is_new else 32)
    if is_new or model.tokenizer is not None:  # the old one may have none
        assert model.tokenizer.decode(range(5)) == (OTHER_ALPHABET if is_new else "abcde")
    return "new" if is_new else "old"


def save_new(directory):
    config = changed(max_context=64)
    save_huggingface(directory, config, NEW, OTHER_ALPHABET, dtype=np.float32)


def break_at(monkeypatch, call, error, is_dead):
    """Have a call that changes the folder fail, and all that come after it if the process is dead."""
    calls = 0

    def broken(function):
        def run(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == call or (is_dead and calls > call):
                raise error
            return function(*arguments, **options)

        return run

    monkeypatch.setattr(os, "replace", broken(os.replace))
    for name in ("unlink", "rename", "replace"):
        monkeypatch.setattr(pathlib.Path, name, broken(getattr(pathlib.Path, name)))
    return lambda: calls


@pytest.mark.parametrize("kept", [(), ("tokenizer.json", "tokenizer_config.json")])
def test_a_save_that_is_killed_at_any_point_leaves_no_mixture(saved, tmp_path, kept):
    for name in kept:  # the first save of a tokenizer with the weights
        (saved / name).unlink()
    outcomes = []
    for call in range(1, 40):
        place = shutil.copytree(saved, tmp_path / f"copy{call}")
        with pytest.MonkeyPatch.context() as patch:
            made = break_at(patch, call, Killed(), is_dead=True)
            with contextlib.suppress(Killed):
                save_new(place)
            if made() < call:
                break
        outcomes.append(loaded(place))
        save_new(place)  # clears up
        assert loaded(place) == "new"
        assert {path.name for path in place.iterdir()} == set(contents(saved)) | set(NAMES)
    order = {"old": 0, None: 1, "new": 2}
    assert outcomes == sorted(outcomes, key=order.get)
    assert {"old", None, "new"} == set(outcomes)


def test_a_save_that_fails_at_any_point_leaves_the_old_checkpoint_or_the_new_one(saved, tmp_path):
    before = contents(saved)
    for call in range(1, 40):
        place = shutil.copytree(saved, tmp_path / f"copy{call}")
        with pytest.MonkeyPatch.context() as patch:
            made = break_at(patch, call, OSError("disk"), is_dead=False)
            with contextlib.suppress(OSError):
                save_new(place)
            if made() < call:
                break
        which = loaded(place)
        assert which == "new" or contents(place) == before
    assert call > 8


def test_a_link_stays_one_and_its_target_is_replaced(saved, tmp_path):
    target = (saved / "config.json").rename(tmp_path / "blob")
    (saved / "config.json").symlink_to(target)
    save_new(saved)
    assert loaded(saved) == "new"
    assert (saved / "config.json").readlink() == target
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blob", "saved"]


def test_saving_to_a_folder_while_it_is_loaded_is_an_error(saved, monkeypatch):
    read = checkpoint.params_from_tensors

    def slow(*arguments):
        save_huggingface(saved, CONFIG, PARAMS, OTHER_ALPHABET)  # of the same sizes
        return read(*arguments)

    monkeypatch.setattr(checkpoint, "params_from_tensors", slow)
    with pytest.raises(CheckpointError, match="saved anew while it was loaded; load it again"):
        load_huggingface(saved)


def test_a_folder_where_a_save_was_interrupted_says_so(saved):
    (saved / "config.json").rename(saved / ".config.json.0123.old")
    with pytest.raises(CheckpointError, match="saving to this folder was interrupted; save again"):
        load_huggingface(saved)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "chat_template.jinja"])
def test_other_files_of_an_old_tokenizer_are_not_left_with_new_weights(saved, name):
    (saved / name).write_text("{}")
    with pytest.raises(ValueError, match=f"{name} exists but would not be rewritten"):
        save_new(saved)


def test_a_saved_tokenizer_names_what_it_has_no_token_for(saved):
    tokenizer = load_huggingface(saved).tokenizer
    assert tokenizer.decode(tokenizer.encode("badec")) == "badec"
    with pytest.raises(ValueError, match="é"):
        tokenizer.encode("abé")
    for token in (-1, 5):
        with pytest.raises(ValueError, match=str(token)):
            tokenizer.decode([0, token])
