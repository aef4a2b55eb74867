"""What runs on the host moves data to and from devices on purpose, also under a transfer guard."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

F = TypeVar("F", bound=Callable[..., Any])


def moves_data(function: F) -> F:
    """Let a host function transfer where `jax_transfer_guard` says "disallow".

    That guard is for step functions, where a transfer is an accident. The traced functions of
    jaxspec make none; the host's loops and audits do nothing else between their compiled parts.
    """

    @functools.wraps(function)
    def with_transfers(*args: Any, **kwargs: Any) -> Any:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return with_transfers  # type: ignore[return-value]
