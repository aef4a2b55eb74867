"""Products of a few tokens with a weight matrix, and a storage layout for few tokens.

In the shape descriptions L denotes the tokens of a block, I the input features, O the output
features, P the width of a panel.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import struct

WIDTH = 16


@struct
class Panels:
    """A matrix [O, I], stored so that the product with a few tokens reads it front to back.

    The weights of P output features are contiguous. A product of 2 to 8 tokens on a CPU waits for
    weights rather than for arithmetic once the network is larger than a core's private cache, and
    rows or columns make it jump between cache lines. From about 16 tokens (all sequences of a batch
    together) the plain matrix is as fast, from 64 faster.

    >>> panels = cut(jnp.arange(64.0).reshape(32, 2))
    >>> panels.shape, panels.panels.shape, panels.panels[1, 0, :3].tolist()
    ((32, 2), (2, 2, 16), [32.0, 34.0, 36.0])
    """

    panels: jax.Array  # [O / P, I, P]

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I), as the matrix itself has it."""
        count, features, width = self.panels.shape
        return count * width, features


def cut(weights: Panels | jax.Array) -> Panels | jax.Array:
    """Cut a matrix [O, I] into panels, unless it is cut already or O is not a multiple of 16."""
    if isinstance(weights, Panels) or weights.shape[0] % WIDTH:
        return weights
    return Panels(panels=weights.reshape(-1, WIDTH, weights.shape[1]).swapaxes(1, 2))


def whole_of(weights: Panels | jax.Array) -> jax.Array:
    """Return the matrix [O, I]; inverse of `cut`."""
    if not isinstance(weights, Panels):
        return weights
    return weights.panels.swapaxes(1, 2).reshape(weights.shape)


def dense(weights: Panels | jax.Array, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return x W^T + b, [L, O], for tokens x [L, I]."""
    if isinstance(weights, Panels):
        panels = weights.panels
        copies = jnp.broadcast_to(x, (panels.shape[0], *x.shape))
        y = lax.dot_general(copies, panels, (((2,), (1,)), ((0,), (0,))))
        y = y.swapaxes(0, 1).reshape(x.shape[0], -1)
    else:
        # Weights [O, I] times columns: XLA on a CPU would repack the weights in every call, a fifth
        # of the time for 5 to 32 tokens. Without the barriers it would transpose the product again.
        columns = lax.optimization_barrier(x.T)
        y = lax.optimization_barrier(weights @ columns).T
    return y if bias is None else y + bias[None]
