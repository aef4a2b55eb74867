"""Training: it learns, is reproducible, continues after an interruption, and saves what loads."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax", reason="the extra train is not installed")
pytest.importorskip("safetensors", reason="the extra models is not installed")

from jaxspec.models.llama import LlamaConfig, init_llama, llama, rope_frequencies
from jaxspec.models.load.huggingface import load_huggingface
from jaxspec.models.text import encode
from training.measure import alpha, bits, text_rows
from training.save import save_huggingface
from training.train import Stage, distillation_loss, main, text_loss, train

ALPHABET = " abdehlnorstuw"
TOKENS = encode("thou shalt not and then the sword shall rest beneath her hands " * 16, ALPHABET)
SMALL = LlamaConfig(
    vocab=len(ALPHABET),
    width=8,
    layers=1,
    heads=2,
    kv_heads=1,
    head_width=4,
    hidden=16,
    rope_frequencies=rope_frequencies(4),
    max_context=16,
)
MODEL = llama(SMALL, init_llama(jax.random.key(0), SMALL))
STAGES = [Stage(1.0, 16, text_loss(SMALL))]
STEPS = 30


class StoppedError(Exception):
    pass


def run(**options):
    return train(SMALL, STAGES, TOKENS, steps=STEPS, characters=64, seed=0, **options)


@pytest.fixture(scope="module")
def trained():
    """Weights of a run from start to end."""
    params, steps = run()
    assert steps == STEPS
    return params


def rows(params):
    return text_rows(MODEL, TOKENS[:129], 16, params=params)


def equal(these, those):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), these, those))


def test_training_lowers_the_held_out_bits(trained):
    before, after = bits(rows(MODEL.params), TOKENS[:129]), bits(rows(trained), TOKENS[:129])
    assert after < 0.8 * before


def test_an_interrupted_run_ends_as_an_uninterrupted_one(trained, tmp_path):
    state = tmp_path / "run.npz"

    def stop(params, line):
        if line.startswith("step 12,"):
            raise StoppedError

    with pytest.raises(StoppedError):
        run(state=state, report=stop, report_seconds=-1.0, save_seconds=-1.0)
    params, steps = run(state=state)
    assert steps == STEPS
    assert equal(params, trained)
    again, steps = run(state=state)  # it is finished: nothing is trained
    assert steps == STEPS
    assert equal(again, trained)


def test_saved_weights_load_to_the_same_rows(trained, tmp_path):
    save_huggingface(tmp_path, SMALL, trained, ALPHABET, dtype=np.float32)
    loaded = load_huggingface(tmp_path)
    assert equal(loaded.params, trained)
    assert loaded.max_context == SMALL.max_context
    assert equal(text_rows(loaded, TOKENS[:129], 16), rows(trained))


def test_half_precision_that_overflows_is_an_error(trained, tmp_path):
    huge = jax.tree.map(lambda w: 1e6 * w, trained)
    with pytest.raises(ValueError, match=r"embed_tokens.* not finite as float16"):
        save_huggingface(tmp_path, SMALL, huge)


def test_a_draft_learns_first_by_divergence_and_in_the_end_by_acceptance(trained):
    target = llama(SMALL, trained)
    loss = jax.jit(distillation_loss(SMALL, target))
    windows = jnp.asarray(TOKENS[None, :17])
    p = text_rows(MODEL, TOKENS[:17], 16, params=trained)
    q = text_rows(MODEL, TOKENS[:17], 16, params=MODEL.params)
    divergence = (p * jnp.log(p / q)).sum(axis=-1).mean()
    assert float(loss(MODEL.params, windows, 0.0)) == pytest.approx(float(divergence), rel=1e-4)
    assert float(loss(MODEL.params, windows, 1.0)) == pytest.approx(1 - alpha(p, q), rel=1e-4)
    assert float(loss(trained, windows, 0.5)) == pytest.approx(0.0, abs=1e-6)


def test_what_is_missing_is_named_with_its_extra(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"optax: pip install -e '\.\[train\]'"):
        run()
    with pytest.raises(ImportError, match=r"safetensors: pip install -e '\.\[models\]'"):
        save_huggingface(tmp_path, SMALL, trained)


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(option in out for option in ("--minutes", "--steps", "--seed", "--out", "--which"))
