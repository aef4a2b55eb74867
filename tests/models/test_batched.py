"""A batch of sequences: each as it is alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fake_model import fake_model, row_after
from jax import lax

from jaxspec.models.batched import BatchedNetwork, per_sequence


def collatz(row, at):
    """Follow a branch, and a loop whose length depends on the row."""
    start = lax.cond(row[at] % 2 == 0, lambda: row[at] // 2, lambda: 3 * row[at] + 1)
    steps, end = lax.while_loop(
        lambda state: state[1] > 1,
        lambda state: (state[0] + 1, jnp.where(state[1] % 2, 3 * state[1] + 1, state[1] // 2)),
        (1, start),
    )
    return {"steps": steps, "end": end[None]}


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_each_sequence_of_a_batch_gives_what_it_gives_alone(batch):
    rows, at = jnp.arange(2, 2 + 4 * batch).reshape(batch, 4), jnp.arange(batch)
    found = per_sequence(collatz)(rows, at)
    for row in range(batch):
        alone = collatz(rows[row], at[row])
        assert found["steps"][row] == alone["steps"]
        assert found["end"][row].tolist() == alone["end"].tolist() == [1]


def test_a_batch_of_one_runs_one_branch_of_a_condition_where_a_larger_batch_runs_both():
    def primitives(batch):
        rows, at = jnp.ones((batch, 4), jnp.int32), jnp.zeros(batch, jnp.int32)
        traced = jax.make_jaxpr(per_sequence(collatz))(rows, at)
        return [equation.primitive.name for equation in traced.eqns]

    assert "cond" in primitives(1)
    assert "cond" not in primitives(2)


def test_a_batch_of_blocks_has_the_cache_and_logits_of_each_sequence() -> None:
    model = fake_model()
    tokens, first = jnp.array([[3, 1, 4], [1, 0, 2]]), jnp.array([0, 2])
    for batch in (1, 2):
        network = BatchedNetwork(model, slots=8, batch=batch)
        cache = network.empty_cache()
        text = jnp.array([[3, 1], [2, 2]])[:batch]
        _, cache = network.text(model.params, cache, text, jnp.zeros(batch, jnp.int32))
        logits, _ = network.text(model.params, cache, tokens[:batch], first[:batch])
        assert cache.tokens.shape == ((8,) if batch == 1 else (2, 8))
        contexts = [(3,), (3, 1), (3, 1, 4)], [(2, 2, 1), (2, 2, 1, 0), (2, 2, 1, 0, 2)]
        for rows, expected in zip(logits, contexts[:batch], strict=True):
            np.testing.assert_array_equal(rows, [row_after(each) for each in expected])


def test_logits_of_another_vocabulary_are_padded_or_cut() -> None:
    model, tokens, first = fake_model(), jnp.array([[3, 1]]), jnp.array([0])
    for vocab in (3, 7):
        network = BatchedNetwork(model, slots=4, batch=1, vocab=vocab)
        logits, _ = network.text(model.params, network.empty_cache(), tokens, first)
        expected = np.full(7, -np.inf)
        expected[:5] = row_after((3, 1))
        np.testing.assert_array_equal(logits[0, 1], expected[:vocab])
