"""Every row of a batch by itself.

In the shape descriptions B denotes the batch.
"""

from collections.abc import Callable
from typing import Any

import jax


def per_sequence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function over a batch that treats every row as `function` treats one.

    It is `vmap`, but for a batch of one, which runs without: its conditions stay conditions, of which
    one branch is run, and its loops carry no copies of finished rows.

    Args:
      function: of pytrees of arrays, to a pytree of arrays.

    Returns:
      The same over arguments and results with a leading B.

    >>> import jax.numpy as jnp
    >>> per_sequence(lambda row, at: row[at])(jnp.array([[3, 5]]), jnp.array([1])).tolist()
    [5]
    """

    def over_batch(*arguments: Any) -> Any:
        batch = jax.tree.leaves(arguments)[0].shape[0]
        if batch > 1:
            return jax.vmap(function)(*arguments)
        one = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: x[None], one)

    return over_batch
