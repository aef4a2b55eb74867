"""Every row of a batch by itself."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxspec.models.batched import per_sequence


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
def test_each_row_of_a_batch_gives_what_it_gives_alone(batch):
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
