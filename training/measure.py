"""Quality of a pair of networks on held-out text: bits per character, and acceptance.

In the shape descriptions T denotes the length of a text, V the vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxspec.models import Block, LanguageModel
from jaxspec.models.ngram import NGram, fit_ngram

_WINDOWS = 8  # scored at once


def text_rows(
    model: LanguageModel, tokens: npt.NDArray[np.int32], context: int, *, params: Any = None
) -> jax.Array:
    """Return the row of each character of a text but the first, given those before it.

    Windows of `context` characters overlap by half, and count for their second half: a row depends
    on the last `context / 2` to `context` characters, or all there are.

    Args:
      model: the network.
      tokens: int32 [T], at least 2.
      context: length of a window, even.
      params: weights instead of the model's.

    Returns:
      float32 [T - 1, V], row t for tokens[t + 1].
    """
    half = context // 2
    count = max(-(-(len(tokens) - 1) // half) - 1, 1)
    count = -(-count // _WINDOWS) * _WINDOWS
    padded = np.zeros((count + 1) * half, np.int32)
    padded[: len(tokens) - 1] = tokens[: len(padded)][: len(tokens) - 1]
    windows = np.lib.stride_tricks.sliding_window_view(padded, context)[::half]
    params = model.params if params is None else params
    parts = (jnp.asarray(windows[at : at + _WINDOWS]) for at in range(0, count, _WINDOWS))
    windows_rows = np.concatenate([np.asarray(_window_rows(model, params, part)) for part in parts])
    rows = np.concatenate(
        [windows_rows[0, :half], windows_rows[:, half:].reshape(-1, windows_rows.shape[-1])]
    )
    return jnp.asarray(rows[: len(tokens) - 1])


def window_logits(model: LanguageModel, params: Any, windows: jax.Array) -> jax.Array:
    """Return the logits float32 [B, L, V] after each token of windows of text, int32 [B, L]."""
    length = windows.shape[1]
    cache = model.init_cache(length)

    def one(window: jax.Array) -> jax.Array:
        return model.forward(params, cache, Block.of_text(window, 0, length))[0]

    return jax.vmap(one)(windows)


@functools.partial(jax.jit, static_argnums=0)
def _window_rows(model: LanguageModel, params: Any, windows: jax.Array) -> jax.Array:
    return jax.nn.softmax(window_logits(model, params, windows), axis=-1)


def ngram_rows(model: NGram, tokens: npt.NDArray[np.int32]) -> jax.Array:
    """Return the rows float32 [T - 1, V] of an n-gram model, as `text_rows` for a network."""
    reach = max(model.order - 1, 1)
    padded = np.concatenate([np.full(reach - 1, -1, np.int32), tokens[:-1]])
    return model.rows(np.lib.stride_tricks.sliding_window_view(padded, reach))


def bits(rows: jax.Array, tokens: npt.NDArray[np.int32]) -> float:
    """Return the mean of -log2 P(character) under rows as `text_rows` makes them."""
    kept = np.take_along_axis(np.asarray(rows), tokens[1:, None], axis=1)
    return float(-np.log2(kept.astype(np.float64)).mean())


def alpha(target_rows: jax.Array, draft_rows: jax.Array) -> float:
    """Return the mean of sum_x min(p(x), q(x)): the acceptance rate of draft tokens."""
    return float(np.minimum(target_rows, draft_rows).sum(axis=-1, dtype=np.float64).mean())


def agreement(target_rows: jax.Array, draft_rows: jax.Array) -> float:
    """Return the share of rows with equal arg max: the acceptance rate at temperature 0."""
    return float((target_rows.argmax(axis=-1) == draft_rows.argmax(axis=-1)).mean())


def measure_pair(
    target: LanguageModel,
    draft: LanguageModel,
    training_text: str,
    tokens: npt.NDArray[np.int32],
    alphabet: str,
    context: int,
) -> dict[str, dict[str, float]]:
    """Measure a pair on held-out text, alongside n-gram models.

    Args:
      target: the target.
      draft: the draft.
      training_text: the text that n-grams are counted from.
      tokens: int32 [T], the held-out text.
      alphabet: its characters.
      context: see `text_rows`.

    Returns:
      "bits", "alpha" and "agreement", the last two with the target, by model.
    """
    p, q = text_rows(target, tokens, context), text_rows(draft, tokens, context)
    figures = {
        "bits": {"target": bits(p, tokens), "draft": bits(q, tokens)},
        "alpha": {"draft": alpha(p, q)},
        "agreement": {"draft": agreement(p, q)},
    }
    model = fit_ngram(training_text, 6, alphabet)
    for order in (3, 4, 5, 6):
        ngram = model.truncated(order)
        q = ngram_rows(ngram, tokens)
        figures["bits"][f"{order}-gram"] = bits(q, tokens)
        figures["alpha"][f"{order}-gram"] = alpha(p, q)
        figures["agreement"][f"{order}-gram"] = agreement(p, q)
    return {kind: {k: round(v, 4) for k, v in by.items()} for kind, by in figures.items()}
