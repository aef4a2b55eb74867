"""What the loop compiles to: no copy of a cache, and a program for every platform."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import CompiledDecoder
from jaxspec.draft import FixedTree, Lookup, SampledPath
from jaxspec.models import LlamaConfig, init_llama, llama, rope_frequencies

CONFIG = LlamaConfig(
    vocab=11,
    width=20,
    layers=1,
    heads=2,
    kv_heads=2,
    head_width=10,
    hidden=16,
    rope_frequencies=rope_frequencies(10),
)
NETWORK = llama(CONFIG, init_llama(jax.random.key(0), CONFIG), name="tiny")
TREE = (2, 1)
DRAFTERS = {
    "path": lambda: SampledPath(NETWORK, 2),
    "tree": lambda: FixedTree(NETWORK, TREE),
    "lookup": lambda: Lookup({2: 4, 1: 2}),
}


def decoder(name: str) -> CompiledDecoder:
    return CompiledDecoder(NETWORK, DRAFTERS[name](), max_context=150, prefill_width=8)


@pytest.mark.parametrize(("name", "batch"), [("path", 1), ("lookup", 1), ("tree", 2)])
def test_the_compiled_loop_holds_no_copy_of_a_cache(
    name: str, batch: int, users_options: dict[str, Any]
) -> None:
    loop = decoder(name)
    text = loop.lower(batch).compile(users_options).as_text()
    shape = rf"f32\[(?:{batch},)?2,{loop.slots},10\]"
    assert re.search(shape, text)
    inside = text[: text.index("\nENTRY ")]
    copies = [
        line.strip() for line in inside.splitlines() if re.search(shape + r"\S* copy\(", line)
    ]
    assert copies == []


def test_a_cache_that_goes_through_cond_is_copied_so_the_test_above_can_see_one(
    users_options: dict[str, Any],
) -> None:
    shape = (2, 158, 10)

    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        count, cache = state
        written = jax.lax.cond(
            count % 2 == 0, lambda c: c.at[:, count].set(1.0), lambda c: c * 1.0 + c[:1], cache
        )
        return count + 1, written

    loop = jax.jit(
        lambda cache: jax.lax.while_loop(lambda s: s[0] < 9, body, (jnp.int32(0), cache))
    )
    text = loop.lower(jnp.zeros(shape)).compile(users_options).as_text()
    inside = text[: text.index("\nENTRY ")]
    assert re.search(r"f32\[2,158,10\]\S* copy\(", inside)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_loop_is_lowered_for_every_platform(platform: str) -> None:
    loop = decoder("tree")
    state = loop.start([[1, 2], [3]], jax.random.split(jax.random.key(0)), new_tokens=3)
    arguments = (NETWORK.params, NETWORK.params, state, np.int32(5))
    exported = jax.export.export(jax.jit(loop.loop), platforms=[platform])(*arguments)
    assert exported.platforms == (platform,)
