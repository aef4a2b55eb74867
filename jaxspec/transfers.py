"""Host functions move data to and from devices on purpose, also under a transfer guard."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def moves_data(function: F) -> F:
    """Allow a host function to transfer data where `jax_transfer_guard` is "disallow".

    The guard is for step functions, where a transfer is an accident; the traced functions of jaxspec
    make none.
    """

    @functools.wraps(function)
    def with_transfers(*args: Any, **kwargs: Any) -> Any:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return with_transfers  # type: ignore[return-value]
