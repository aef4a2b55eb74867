"""JAX's modes: both loops decode the tokens that they decode without."""

from typing import Any

import jax
import numpy as np
import pytest
from helpers.small import FUSED, LENGTH, PROMPTS, TARGET, decoder, host_drafters, keys, provider

import jaxspec as js
from jaxspec import audit, decode
from jaxspec.decode import CachedNetwork, CompiledDecoder, Decoder

OPTIONS: dict[str, Any] = {
    "new_tokens": 12,
    "temperature": 0.25,
    "top_k": 4,
    "top_p": 0.99,
    "stop_tokens": [1],
}


@pytest.mark.parametrize("name", ["path by token", "adaptive tree"])
def test_the_compiled_loop_decodes_the_same_tokens(name: str) -> None:
    (text,) = decoder(name).run(PROMPTS[:1], keys(1), **OPTIONS)
    with jax.enable_x64(True):
        other = CompiledDecoder(TARGET, FUSED[name](), max_context=LENGTH, prefill_width=4)
        (wide,) = other.run(PROMPTS[:1], keys(1), **OPTIONS)
    assert (wide.tokens, wide.rounds, wide.status) == (text.tokens, text.rounds, 0)


@pytest.mark.parametrize("name", ["tree without replacement", "best-first tree", "lookup tree"])
def test_the_loop_of_every_drafter_is_traced(name: str) -> None:
    with jax.enable_x64(True):
        CompiledDecoder(TARGET, FUSED[name](), max_context=LENGTH, prefill_width=4).lower(2)


@pytest.mark.parametrize("name", ["path by block", "top-k tree", "adaptive tree"])
def test_the_host_loop_decodes_the_same_tokens(name: str) -> None:
    def text() -> tuple[int, ...]:
        target, drafter = provider(0.0, 0.25), host_drafters(0.25)[name]
        options = {"new_tokens": 12, "stop_tokens": [1], "top_p": 0.9}
        return Decoder(target, drafter).run((1, 2), jax.random.key(0), **options).tokens  # type: ignore[arg-type]

    narrow = text()
    with jax.enable_x64(True):
        assert text() == narrow


def test_tree_attention_gives_the_same_rows() -> None:
    def rows() -> np.ndarray:
        attention = CachedNetwork(TARGET, slots=20, chunk=4)
        tree = js.make_tree([4, 0, 1, 2], [-1, 0, 0, 1], max_nodes=6)
        return attention.rows(tree, [3, 1, 4], bonus=True).rows

    narrow = rows()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(rows(), narrow)


def without_transfers() -> Any:
    return jax.transfer_guard("disallow")


def with_checks_of_nans() -> Any:
    return jax.debug_nans(True)


@pytest.mark.parametrize("mode", [without_transfers, with_checks_of_nans])
def test_what_runs_on_the_host_runs_where_step_functions_are_watched(mode: Any) -> None:
    """The transfers of the host's loops and of the audit are meant; their programs make no NaN."""
    key, prompts, options = keys(1), PROMPTS[:1], OPTIONS
    drafter = host_drafters(0.25)["path by token"]
    host = Decoder(provider(0.0, 0.25), drafter)
    rule = js.RULES["token"]
    case = audit.instances_for(rule)[0]

    def run() -> Any:
        (text,) = decoder("path by token").run(prompts, key, **options)
        state = host.start((1, 2), host_key, new_tokens=6, top_k=3)
        state, record = host.step(state)
        laws = audit.exact_law(rule, case).tv, decode.differences([record])
        return text.tokens, text.rounds, host.resume(state).tokens, laws

    host_key = jax.random.key(0)
    wanted = run()
    with mode():
        found = run()
    assert found == wanted
