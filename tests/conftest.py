"""Strictness, on for every test, and thrift: how a run of all tests keeps its time short.

Strictness: no silent broadcasting, no silent promotion, no warnings.

Thrift: nearly all of the time goes into compilation. What one process has compiled lies on disk for
the other processes of the run, the workers and those that tests start; `JAX_COMPILATION_CACHE_DIR`
names a folder that is kept for the next run. Machine code is not optimised, and XLA's older emitter
writes it, in one piece: a quarter of a compilation is left. What is to be the user's program (the
command line's proofs, the text of what the loop compiles to) is compiled as users do, and so is
everything for `-m networks` or with `JAX_DISABLE_MOST_OPTIMIZATIONS=0`. Tests that share most of
their programs run in one worker, and those that take longest start first, so that the workers end
together.
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
import pytest
from xdist.scheduler import LoadFileScheduling

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

DEFAULT = "not networks"
NEWER_EMITTER = "xla_cpu_use_fusion_emitters"
OLDER_EMITTER = f"--{NEWER_EMITTER}=false"
THRIFT = f"{OLDER_EMITTER} --xla_cpu_parallel_codegen_split_count=1"
TOGETHER = "tests/verify/"
LONGEST = (TOGETHER, "tests/audit/", "tests/test_notebooks.py", "tests/cli/test_audit.py")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    # One process may find an entry that another has not written to its end: it compiles anew.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # neither the user's nor the controller's
        folder = tempfile.mkdtemp(prefix="jaxspec-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if config.getoption("markexpr") == DEFAULT:
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", is_thrifty())
        if is_thrifty() and NEWER_EMITTER not in flags():
            wanted = f"{flags()} {THRIFT}".strip()
            if are_known(wanted):
                os.environ["XLA_FLAGS"] = wanted


def is_thrifty() -> bool:
    return os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS", "0") != "0"


def flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


def are_known(wanted: str) -> bool:
    """Ask in a process of its own, for XLA ends the process at a flag that it does not know."""
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    environment = {**os.environ, "XLA_FLAGS": wanted}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture(scope="session")
def users_options() -> dict[str, Any]:
    """Compiler options with which the text of a compiled program is that of the user's.

    How far the machine code made of it is optimised does not show in the text.
    """
    return {NEWER_EMITTER: True} if OLDER_EMITTER in flags() else {}


@pytest.fixture(scope="session")
def users_environment() -> dict[str, str]:
    """The environment of a process that compiles as users do."""
    ours = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": flags().replace(THRIFT, "").strip()}
    return {**os.environ, **ours}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return [*map(item.nodeid.startswith, LONGEST), True].index(True)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    # Tracing makes many objects and little garbage.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


class Scheduling(LoadFileScheduling):
    """Hands out tests file by file, but those of one folder all at once."""

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER if nodeid.startswith(TOGETHER) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
