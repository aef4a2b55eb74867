"""Exact integer counts on grids of draws, and grids of any size in bounded memory."""

import itertools
import tracemalloc
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.plain_rules import PLAIN_RULES

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.instances import TWO_LEVEL_TREE
from jaxspec.audit.report import KNOWN_COUNTS, grid_counts
from jaxspec.audit.rounds import make_round
from jaxspec.draws import grid_chunks, grid_points

DIVISORS = [n for n in range(1, 10_001) if 10_000 % n == 0]


def quarter(u: jax.Array) -> jax.Array:
    """Four outcomes: three of a draw, one of two draws together."""
    return jnp.where(u[0] * u[1] > 0.5, 3, (u[-1] * 3).astype(jnp.int32))


def test_the_contract_grids_count_exactly_what_theory_says():
    assert {name: grid_counts(name) for name in KNOWN_COUNTS} == {
        "single_path": (2500, 7500),
        "two_level_tree": (2000, 500, 3000, 4500),
    }


def test_the_contract_tree_is_exact_on_the_grids_that_hold_its_edges_and_on_no_other():
    # The root's edge is 1/4, those below it 4/5 and 2/5: exact iff 4 | n1 and 5 | n2.
    grids = [(n, 10_000 // n) for n in DIVISORS]
    points = jnp.stack([jnp.asarray(next(grid_chunks(grid, 10_000))) for grid in grids])
    played = make_round(js.RULES["point_mass"], TWO_LEVEL_TREE)
    first = played.axes.index("accept 1")
    below = jnp.array([played.axes.index("accept 3"), played.axes.index("accept 5")])

    def outcome(u: jax.Array) -> jax.Array:
        grid, cell = (u * jnp.array([len(grids), 10_000], jnp.float32)).astype(jnp.int32)
        draws = jnp.full(len(played.axes), 0.5).at[first].set(points[grid, cell, 0])
        draws = draws.at[below].set(points[grid, cell, 1])
        tokens = played.play(played.world, draws).verdict.tokens
        return 4 * grid + 2 * tokens[0] + tokens[1]

    found = audit.count_outcomes(outcome, (len(grids), 10_000), 4 * len(grids))
    is_exact = {
        grid: tuple(counts) == KNOWN_COUNTS["two_level_tree"]
        for grid, counts in zip(grids, found.reshape(-1, 4).tolist(), strict=True)
    }
    assert is_exact == {(n1, n2): n1 % 4 == 0 and n2 % 5 == 0 for n1, n2 in grids}
    assert sum(is_exact.values()) == 12


def test_a_grid_of_a_million_cells_counts_a_path_with_its_residual_exactly():
    instance = audit.Instance(
        name="residual of two tokens",
        target={(): [Fraction(1, 10), Fraction(9, 20), Fraction(9, 20)]},
        draft={(): [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]},
        branching=(1,),
        bonus=False,
    )
    played = make_round(js.RULES["token"], instance, verify=PLAIN_RULES["token"])
    calls = []

    def outcome(u: jax.Array) -> jax.Array:
        return played.play(played.world, u).verdict.tokens[0]

    counts = audit.count_outcomes(
        outcome, (100, 100, 100), 3, progress=lambda *call: calls.append(call)
    )
    assert counts.tolist() == [100_000, 450_000, 450_000]
    assert calls == [("grid cells", done, 10**6) for done in (2**18, 2**19, 3 * 2**18, 10**6)]


def test_counts_do_not_depend_on_the_chunk():
    sizes = (7, 5, 3)
    cells = itertools.product(*map(grid_points, sizes))
    codes = [3 if cell[0] * cell[1] > 0.5 else int(cell[2] * 3) for cell in cells]
    for chunk in (1, 7, 104, 105, 1000):
        counts = audit.count_outcomes(quarter, sizes, 4, chunk=chunk)
        assert counts.tolist() == np.bincount(codes, minlength=4).tolist()
        assert counts.sum() == 105


def test_an_outcome_out_of_range_is_an_error_that_names_the_range():
    with pytest.raises(ValueError, match=r"have an outcome outside 0 \.\.\. 1"):
        audit.count_outcomes(lambda u: jnp.where(u[0] < 0.5, 0, 2), (10,), 2, chunk=6)


def test_chunks_cover_a_grid_once_in_order_and_only_the_last_is_short():
    sizes = (4, 3, 5)
    chunks = list(grid_chunks(sizes, 7))
    assert [len(chunk) for chunk in chunks] == [7] * 8 + [4]
    points = itertools.product(*map(grid_points, sizes))
    np.testing.assert_array_equal(np.concatenate(chunks), np.array(list(points)))
    assert {chunk.dtype for chunk in chunks} == {np.dtype(np.float32)}


def test_a_grid_of_a_hundred_million_cells_is_walked_in_bounded_memory():
    chunk = 2**16
    tracemalloc.start()
    walk = grid_chunks((10_000, 100, 100), chunk)
    shapes = [next(walk).shape for _ in range(3)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shapes == [(chunk, 3)] * 3
    # A few integers and floats for each cell of a chunk and axis; the grid itself is 1.2 GB.
    assert peak < 100 * chunk
