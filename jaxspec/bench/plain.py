"""The sampler settings as a textbook writes them: whole rows, sorted. For NumPy and for JAX."""

from types import ModuleType
from typing import Any


def plain_rows(
    logits: Any,
    xp: ModuleType,
    *,
    bias: Any = None,
    allowed: Any = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Any:
    """Return the laws of rows of logits [..., V].

    `xp` is the library, numpy or jax.numpy. Filters sort the row. The order is that of `Logits`.
    """
    if bias is not None:
        logits = logits + xp.broadcast_to(bias, logits.shape)
    if allowed is not None:
        logits = xp.where(xp.broadcast_to(allowed, logits.shape), logits, -xp.inf)
    logits = logits / xp.float32(temperature)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = xp.sort(logits, axis=-1)[..., -top_k]
        logits = xp.where(logits < kth[..., None], -xp.inf, logits)
    law = softmax(logits, xp)
    if top_p is not None:
        falling = -xp.sort(-law, axis=-1)
        is_kept = xp.cumsum(falling, axis=-1) - falling < xp.float32(top_p)
        least = xp.min(xp.where(is_kept, falling, xp.inf), axis=-1)
        law = xp.where(law < least[..., None], xp.float32(0), law)
    if min_p is not None:
        most = xp.max(law, axis=-1)[..., None]
        law = xp.where(law < xp.float32(min_p) * most, xp.float32(0), law)
    return law / xp.sum(law, axis=-1)[..., None]


def softmax(logits: Any, xp: ModuleType) -> Any:
    """Return the softmax of rows [..., V]."""
    weights = xp.exp(logits - xp.max(logits, axis=-1)[..., None])
    return weights / xp.sum(weights, axis=-1)[..., None]
