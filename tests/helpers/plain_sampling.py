"""Sampler settings in float64, a row at a time, as their definitions say."""

from typing import Any

import numpy as np


def adjusted(
    logits: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
    output: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (),
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> np.ndarray:
    """Adjust a row [V], token by token: bias, repetition, frequency, presence, allowed tokens."""
    exact = logits.astype(np.float64)
    for token in range(len(exact)):
        if bias is not None:
            exact[token] += bias[token]
        if token in prompt or token in output:
            exact[token] *= 1 / repetition if exact[token] > 0 else repetition
        exact[token] -= frequency * output.count(token)
        exact[token] -= presence * (token in output)
        if allowed is not None and not allowed[token]:
            exact[token] = -np.inf
    return exact


def filtered(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The filtered law, token by token: temperature, top-k, top-p, min-p; equal logits together."""
    exact = logits.astype(np.float64)
    if temperature == 0 or top_k == 1:
        return np.eye(len(exact))[np.argmax(exact)]
    weights = np.exp((exact - exact.max()) / temperature)
    order = np.argsort(-exact, kind="stable")
    if top_k > 0:
        weights[exact < exact[order[min(top_k, len(exact)) - 1]]] = 0
    law = weights / weights.sum()
    kept, mass = exact.max(), 0.0
    for token in order:
        if mass >= top_p or law[token] == 0:
            break
        kept, mass = exact[token], mass + law[token]
    law[exact < kept] = 0
    law[law < min_p * law.max()] = 0
    return law / law.sum()


def processed(logits: np.ndarray, **settings: Any) -> np.ndarray:
    """The law of a row [V] under any settings of `adjusted` and `filtered`."""
    filters = {
        name: settings.pop(name)
        for name in ("temperature", "top_k", "top_p", "min_p")
        if name in settings
    }
    return filtered(adjusted(logits, **settings), **filters)
