"""Products of a few tokens with a weight matrix, and a layout of it for few tokens.

In the shape descriptions L denotes the tokens of a block, I the features that go in, O those that
come out, P the width of a panel.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.checks import struct

WIDTH = 16


@struct
class Panels:
    """A matrix [O, I], stored so that a few tokens' product reads it from front to back.

    The weights of P features that come out lie together. A product of 2 to 8 tokens on a CPU waits
    for weights rather than for arithmetic once the network is larger than a core's own cache: in rows
    or columns it jumps from line to line. Beyond some 16 tokens (all sequences of a batch together)
    the plain matrix is as fast, beyond 64 faster.

    Attributes:
      panels: [O / P, I, P].

    >>> panels = cut(jnp.arange(64.0).reshape(32, 2))
    >>> panels.shape, panels.panels.shape, panels.panels[1, 0, :3].tolist()
    ((32, 2), (2, 2, 16), [32.0, 34.0, 36.0])
    """

    panels: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I), as the matrix itself has it."""
        count, features, width = self.panels.shape
        return count * width, features


def cut(weights: Panels | jax.Array) -> Panels | jax.Array:
    """Cut a matrix [O, I] into panels; one that is cut, or whose O is no multiple of 16, stays."""
    if isinstance(weights, Panels) or weights.shape[0] % WIDTH:
        return weights
    return Panels(panels=weights.reshape(-1, WIDTH, weights.shape[1]).swapaxes(1, 2))


def whole_of(weights: Panels | jax.Array) -> jax.Array:
    """Return the matrix [O, I] that was cut; an array as it is."""
    if not isinstance(weights, Panels):
        return weights
    return weights.panels.swapaxes(1, 2).reshape(weights.shape)


def dense(weights: Panels | jax.Array, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Return what a layer makes of tokens [L, I], that is x W^T + b, [L, O]."""
    if isinstance(weights, Panels):
        panels = weights.panels
        copies = jnp.broadcast_to(x, (panels.shape[0], *x.shape))
        y = lax.dot_general(copies, panels, (((2,), (1,)), ((0,), (0,))))
        y = y.swapaxes(0, 1).reshape(x.shape[0], -1)
    else:
        # Weights [O, I] times columns spare XLA on a CPU the repacking of the weights in every call,
        # a fifth of the time of 5 to 32 tokens. Without the barriers it would turn the product back.
        columns = lax.optimization_barrier(x.T)
        y = lax.optimization_barrier(weights @ columns).T
    return y if bias is None else y + bias[None]
