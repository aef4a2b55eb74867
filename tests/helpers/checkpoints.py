"""Stored checkpoints of random networks, copies to damage, and the logits of a text."""

import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models import Block, LanguageModel

DATA = pathlib.Path(__file__).parents[1] / "models" / "load" / "data"
LLAMA = DATA / "llama3_untied_sharded"  # bfloat16, two shards, scaled RoPE, heads of explicit width
QWEN2 = DATA / "qwen2_tied"  # float32, biases


def copied(stored: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    """Copy a checkpoint over what is at a place."""
    shutil.rmtree(place, ignore_errors=True)
    return pathlib.Path(shutil.copytree(stored, place))


def change(path: pathlib.Path, **fields: Any) -> None:
    """Change fields of a JSON file; those of value `...` are taken out."""
    content = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: value for name, value in (content | fields).items() if value is not ...}
    path.write_text(json.dumps(kept))


def logits_of(model: LanguageModel, tokens: Any) -> np.ndarray:
    """Return a network's logits after each token of a text."""
    block = Block.of_text(jnp.asarray(tokens, jnp.int32), 0, len(tokens))
    logits, _ = jax.jit(model.forward)(model.params, model.init_cache(len(tokens)), block)
    return np.asarray(logits)
