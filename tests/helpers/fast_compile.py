"""Pytest plugin: compile quickly, once for all processes, and finish the workers together.

Nearly all of the suite's time is compilation. Measured on two cores with jax 0.10.2: 395 s with this
plugin, and more than three times as long without.

- A program that one process has compiled is read from disk by the others: the workers and the
  processes that tests start. `JAX_COMPILATION_CACHE_DIR` names a directory to keep between runs.
- Machine code is not optimized, and XLA's older emitter writes it in one piece, which leaves a
  quarter of the compile time. Programs that must be the user's (the command line's proofs, the HLO of
  the compiled loop) are compiled as users compile them, and so is everything for `-m networks` or with
  `JAX_DISABLE_MOST_OPTIMIZATIONS=0`.
- Tests that share most of their programs run in one worker, and the longest files start first.
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

DEFAULT_MARKERS = "not networks"
NEWER_EMITTER = "xla_cpu_use_fusion_emitters"
OLDER_EMITTER = f"--{NEWER_EMITTER}=false"
FAST_FLAGS = f"{OLDER_EMITTER} --xla_cpu_parallel_codegen_split_count=1"
ONE_WORKER = "tests/verify/"
LONGEST = (ONE_WORKER, "tests/audit/", "tests/test_notebooks.py", "tests/cli/")


def pytest_configure(config: pytest.Config) -> None:
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # neither the user's nor the controller's
        folder = tempfile.mkdtemp(prefix="jaxspec-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if config.getoption("markexpr") != DEFAULT_MARKERS:
        return
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    is_fast = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0"
    jax.config.update("jax_disable_most_optimizations", is_fast)
    flags = f"{_flags()} {FAST_FLAGS}".strip()
    if is_fast and NEWER_EMITTER not in _flags() and _are_known(flags):
        os.environ["XLA_FLAGS"] = flags


def _flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


def _are_known(flags: str) -> bool:
    """Return whether XLA knows the flags; it ends the process at an unknown one."""
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    environment = {**os.environ, "XLA_FLAGS": flags}
    return (
        subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(scope="session")
def users_options() -> dict[str, Any]:
    """Compiler options with which the HLO text of a compiled program is the user's."""
    return {NEWER_EMITTER: True} if OLDER_EMITTER in _flags() else {}


@pytest.fixture(scope="session")
def users_environment() -> dict[str, str]:
    """The environment of a process that compiles as users do."""
    flags = _flags().replace(FAST_FLAGS, "").strip()
    return {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": flags}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return [*map(item.nodeid.startswith, LONGEST), True].index(True)

    items.sort(key=place)


def pytest_collection_finish() -> None:
    # Tracing makes many objects and little garbage.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


class Scheduling(LoadFileScheduling):
    """Hand out tests file by file, but the tests of one directory to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return ONE_WORKER if nodeid.startswith(ONE_WORKER) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
