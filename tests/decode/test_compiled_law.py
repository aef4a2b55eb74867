"""The law of the compiled loop on the bundled pair, by counting decodes against the exact law.

The pair's rows after a prompt and up to two more characters are scored once, by the networks
themselves; the loop then runs over networks that look them up, so that 200,000 decodes take seconds.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxspec as js
from jaxspec import audit
from jaxspec.decode import CompiledDecoder
from jaxspec.draft import FixedTree, SampledPath
from jaxspec.models import Block, LanguageModel, bundled_pair

pytestmark = pytest.mark.networks

PROMPT = "In the beginning God "
BATCH, CALLS = 20_480, 10
NEW_TOKENS = 3  # so that the first round has room for two drafted tokens
LEVEL = 1e-4

ALONE, NOISE_REUSED, KEYED_BY_POSITION = 0, 1, 2
"""Where the draws come from: as they should; the final draw from the draft's; by absolute position."""


@functools.cache
def rows_of(which: int) -> np.ndarray:
    """A network's logits after the prompt and every continuation by 0, 1 and 2 characters."""
    network = bundled_pair()[which]
    assert network.tokenizer is not None
    prompt = np.asarray(network.tokenizer.encode(PROMPT), np.int32)
    length, vocab = len(prompt), network.vocab
    slots = length + 2

    @jax.jit
    def after(pairs: jax.Array) -> jax.Array:
        def one(pair: jax.Array) -> jax.Array:
            tokens = jnp.concatenate([jnp.asarray(prompt), pair])
            cache = network.init_cache(slots)
            return network.forward(network.params, cache, Block.of_text(tokens, 0, slots))[0]

        return jax.vmap(one)(pairs)[:, length - 1 :]

    pairs = np.stack(np.meshgrid(range(vocab), range(vocab), indexing="ij"), -1).astype(np.int32)
    scored = np.stack([np.asarray(after(jnp.asarray(row))) for row in pairs])  # [V, V, 3, V]
    return np.concatenate(
        [scored[0, 0, 0][None], scored[:, 0, 1], scored[:, :, 2].reshape(-1, vocab)]
    )


def table(which: int) -> LanguageModel:
    """A network that looks its rows up by the characters after the prompt."""
    vocab = bundled_pair()[which].vocab
    length = 1  # of a prompt, represented by its last character

    def forward(params: Any, cache: Any, block: Block) -> tuple[jax.Array, Any]:
        seen, places = cache
        positions, mask = block.positions, block.mask
        seen = lax.dynamic_update_slice(seen, block.tokens, (block.first,))
        places = lax.dynamic_update_slice(places, positions, (block.first,))

        def token_at(position: jax.Array) -> jax.Array:
            is_there = mask & (places[None] == position[:, None])
            return jnp.sum(jnp.where(is_there, seen[None], 0), axis=1)

        new = positions - (length - 1)
        first, last = token_at(jnp.minimum(positions, length)), token_at(positions)
        row = jnp.where(new == 1, 1 + last, 1 + vocab + first * vocab + last)
        row = jnp.where(new <= 0, 0, jnp.where(new > 2, 0, row))
        return params[row], (seen, places)

    def keep(cache: Any, at: Any, path: Any) -> Any:
        sources = at + jnp.where(path >= 0, path, jnp.arange(path.shape[0], dtype=jnp.int32))
        return tuple(lax.dynamic_update_slice(x, x[sources], (at,)) for x in cache)

    return LanguageModel(
        name=f"table {which}",
        vocab=vocab,
        params=jnp.asarray(rows_of(which)),
        forward=forward,
        init_cache=lambda slots: (jnp.zeros(slots, jnp.int32), jnp.full(slots, -1, jnp.int32)),
        keep=keep,
        takes_trees=True,
    )


def exact_law() -> np.ndarray:
    """The target's law of the first two characters, [V V]."""
    rows = np.asarray(jax.nn.softmax(jnp.asarray(rows_of(0)[: 1 + bundled_pair()[0].vocab])))
    return (rows[0][:, None] * rows[1:]).astype(np.float64).reshape(-1)


def draws_by_key(key: jax.Array, nodes: int, position: jax.Array) -> js.RoundDraws:
    """Draws in one of three ways, by the first word of the key, so that one program serves all."""
    word = jax.random.key_data(key)[0]
    way = (word >> 29).astype(jnp.int32)
    good = js.round_draws(key, nodes, position)
    absolute = jax.vmap(
        lambda node: jax.random.uniform(jax.random.fold_in(key, position + node), (), jnp.float32)
    )(jnp.arange(nodes))
    accept = jnp.where(way == KEYED_BY_POSITION, absolute, good.verify.accept)
    final = jnp.where(way == NOISE_REUSED, good.draft[1], good.verify.final)
    return js.RoundDraws(draft=good.draft, verify=js.Draws(accept=accept, final=final))


DRAFTERS = {
    "path": lambda draft: SampledPath(draft, 2),
    "block": lambda draft: SampledPath(draft, 2, js.RULES["block"]),
    "sampled tree": lambda draft: FixedTree(draft, (2, 2), js.RULES["without_replacement"]),
    "point-mass tree": lambda draft: FixedTree(draft, (2, 2)),
}


@functools.cache
def decoder(name: str) -> CompiledDecoder:
    return CompiledDecoder(
        table(0),
        DRAFTERS[name](table(1)),
        max_context=1 + NEW_TOKENS,
        prefill_width=1,
        draws=draws_by_key,
    )


def test_of_decodes(name: str, way: int) -> audit.GTest:
    """Count the first two characters of 204,800 decodes against the exact law."""
    network = bundled_pair()[0]
    assert network.tokenizer is not None
    prompt = network.tokenizer.encode(PROMPT)[-1:]
    vocab = network.vocab
    counts = np.zeros(vocab * vocab, np.int64)
    words = np.random.default_rng(7).integers(0, 2**29, (CALLS, BATCH, 2), dtype=np.uint32)
    words[:, :, 0] += np.uint32(way << 29)
    for data in words:
        keys = jax.random.wrap_key_data(jnp.asarray(data))
        state = decoder(name).advance(
            decoder(name).start([prompt] * BATCH, keys, new_tokens=NEW_TOKENS)
        )
        pairs = np.asarray(state.tokens)[:, len(prompt) : len(prompt) + 2]
        assert not np.asarray(state.status).any()
        counts += np.bincount(pairs[:, 0] * vocab + pairs[:, 1], minlength=vocab * vocab)
    assert counts.sum() == BATCH * CALLS >= 200_000
    return audit.fit_test(counts, exact_law(), level=LEVEL)


test_of_decodes.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_first_two_characters_have_the_exact_law_of_the_target(name: str) -> None:
    found = test_of_decodes(name, ALONE)
    assert found.detectable is not None
    assert found.detectable < 0.02
    assert found.p_value > LEVEL, found


def test_a_final_draw_that_reuses_the_drafts_noise_is_rejected() -> None:
    assert test_of_decodes("path", NOISE_REUSED).p_value < 1e-9


def test_block_verification_keyed_by_absolute_position_is_rejected() -> None:
    found = test_of_decodes("block", KEYED_BY_POSITION)
    assert found.p_value < 1e-9 or math.isinf(found.statistic)
