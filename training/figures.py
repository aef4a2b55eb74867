"""What a pair of networks is worth on held-out text: bits a character, and acceptance.

In the shape descriptions T denotes the length of a text, V the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxspec.models.network import Block, LanguageModel
from jaxspec.models.ngram import NGram, bits_per_character, fit_ngram
from jaxspec.models.text import decode
from jaxspec.rows import overlap

_WINDOWS = 8  # scored at once


def text_rows(
    model: LanguageModel, tokens: npt.NDArray[np.int32], context: int, *, params: Any = None
) -> jax.Array:
    """Return the law of every character of a text but the first, given those before it.

    Windows of `context` characters overlap by half, and count for their second half: a row knows
    the last `context / 2` to `context` characters, or all there are.

    Args:
      model: the network.
      tokens: int32 [T], at least 2.
      context: length of a window, even.
      params: weights in place of the model's.

    Returns:
      float32 [T - 1, V], row t the law of tokens[t + 1].
    """
    half = context // 2
    count = max(-(-(len(tokens) - 1) // half) - 1, 1)
    count = -(-count // _WINDOWS) * _WINDOWS
    padded = np.zeros((count + 1) * half, np.int32)
    padded[: len(tokens) - 1] = tokens[: len(padded)][: len(tokens) - 1]
    windows = np.lib.stride_tricks.sliding_window_view(padded, context)[::half]
    params = model.params if params is None else params
    parts = (jnp.asarray(windows[at : at + _WINDOWS]) for at in range(0, count, _WINDOWS))
    laws = np.concatenate([np.asarray(_window_laws(model, params, part)) for part in parts])
    rows = np.concatenate([laws[0, :half], laws[:, half:].reshape(-1, laws.shape[-1])])
    return jnp.asarray(rows[: len(tokens) - 1])


def window_logits(model: LanguageModel, params: Any, windows: jax.Array) -> jax.Array:
    """Return the logits after every token of windows of text.

    Args:
      model: the network.
      params: its weights, or others.
      windows: int32 [B, L].

    Returns:
      float32 [B, L, V].
    """
    length = windows.shape[1]
    cache = model.init_cache(length)

    def one(window: jax.Array) -> jax.Array:
        return model.forward(params, cache, Block.of_text(window, 0, length))[0]

    return jax.vmap(one)(windows)


@functools.partial(jax.jit, static_argnums=0)
def _window_laws(model: LanguageModel, params: Any, windows: jax.Array) -> jax.Array:
    return jax.nn.softmax(window_logits(model, params, windows), axis=-1)


def ngram_rows(model: NGram, tokens: npt.NDArray[np.int32]) -> jax.Array:
    """Return the rows of an n-gram model where `text_rows` has those of a network.

    Args:
      model: the n-gram model.
      tokens: int32 [T].

    Returns:
      float32 [T - 1, V].
    """
    reach = max(model.order - 1, 1)
    padded = np.concatenate([np.full(reach - 1, -1, np.int32), tokens[:-1]])
    return model.rows(np.lib.stride_tricks.sliding_window_view(padded, reach))


def bits(rows: jax.Array, tokens: npt.NDArray[np.int32]) -> float:
    """Return the mean of -log2 P(character) under rows as `text_rows` makes them."""
    kept = np.take_along_axis(np.asarray(rows), tokens[1:, None], axis=1)
    return float(-np.log2(kept.astype(np.float64)).mean())


def alpha(target_rows: jax.Array, draft_rows: jax.Array) -> float:
    """Return the mean of sum_x min(p(x), q(x)): how often a drafted token is kept."""
    return float(np.asarray(overlap(target_rows, draft_rows), np.float64).mean())


def agreement(target_rows: jax.Array, draft_rows: jax.Array) -> float:
    """Return how often both rows have the same arg max: acceptance at temperature 0."""
    return float((target_rows.argmax(axis=-1) == draft_rows.argmax(axis=-1)).mean())


def pair_figures(
    target: LanguageModel,
    draft: LanguageModel,
    training_text: str,
    tokens: npt.NDArray[np.int32],
    alphabet: str,
    context: int,
) -> dict[str, dict[str, float]]:
    """Return the figures of a pair on held-out text, and those of n-grams beside it.

    Args:
      target: the target.
      draft: the draft.
      training_text: what the n-grams are counted from.
      tokens: int32 [T], the held-out text.
      alphabet: its characters.
      context: see `text_rows`.

    Returns:
      "bits", "alpha" and "agreement", the last two with the target, by model.
    """
    text = decode(tokens, alphabet)
    p, q = text_rows(target, tokens, context), text_rows(draft, tokens, context)
    figures = {
        "bits": {"target": bits(p, tokens), "draft": bits(q, tokens)},
        "alpha": {"draft": alpha(p, q)},
        "agreement": {"draft": agreement(p, q)},
    }
    model = fit_ngram(training_text, 6, alphabet)
    for order in (3, 4, 5, 6):
        ngram = model.truncated(order)
        figures["bits"][f"{order}-gram"] = bits_per_character(ngram, text)
        q = ngram_rows(ngram, tokens)
        figures["alpha"][f"{order}-gram"] = alpha(p, q)
        figures["agreement"][f"{order}-gram"] = agreement(p, q)
    return {kind: {k: round(v, 4) for k, v in by.items()} for kind, by in figures.items()}
