"""Records of many numbers, shown in a few lines."""

import dataclasses
from collections.abc import Sized
from typing import Any

_MOST = 80
"""Characters of a field that are shown as they are."""


def brief(record: Any) -> str:
    """Return the repr of a record: arrays by type and shape, long collections by their length.

    To be set as `__repr__` in the body of a dataclass.

    >>> import numpy as np
    >>> @dataclasses.dataclass
    ... class Counts:
    ...     name: str
    ...     table: np.ndarray
    ...     rows: dict
    ...     __repr__ = brief
    >>> Counts("a", np.zeros((3, 4)), dict.fromkeys(range(100)))
    Counts(name='a', table=float64[3, 4], rows=dict of 100)
    """
    names = [field.name for field in dataclasses.fields(record)]
    shown = ", ".join(f"{name}={_shown(getattr(record, name))}" for name in names)
    return f"{type(record).__name__}({shown})"


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return brief(value)
    if isinstance(value, Sized) and not isinstance(value, str | bytes):
        text = repr(value) if len(value) <= _MOST else ""
        return text if 0 < len(text) <= _MOST else f"{type(value).__name__} of {len(value)}"
    return repr(value)
