"""Strictness for every test: no silent broadcasting, no silent promotion, warnings are errors.

`helpers.fast_compile` makes a run quick; `JAX_DISABLE_MOST_OPTIMIZATIONS=0` turns it off, and every
program is then compiled as users compile it. CI runs the suite both ways.
"""

import jax
import pytest

pytest_plugins = ["helpers.fast_compile"]

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    # A process may find a cache entry that another is still writing; it then compiles the program.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")
