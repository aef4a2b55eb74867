"""Rows from logits: the law of a temperature, greedy decoding, values that are no logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.plain_sampling import filtered

import jaxspec as js
from jaxspec import Status

BATCH = 512
WIDE = 33380  # two spans of 32 tiles, one more tile, a tail of 100
TILE = 512

ROOT_ALONE = js.PointMass(tree=js.make_tree([-1], [-1]))


def draw(logits: np.ndarray, temperature: np.ndarray, final: np.ndarray) -> js.Verdict:
    """Draw one token for each pair, from one row [V] at temperatures [B]: a tree of the root alone.

    Small rows go through `vmap`, large ones one after another.
    """
    batch = len(temperature)
    draws = js.Draws(accept=jnp.zeros((batch, 1)), final=jnp.asarray(final, jnp.float32))
    values, temperatures = jnp.asarray(logits)[None], jnp.asarray(temperature, jnp.float32)
    if len(logits) <= TILE:
        rows = js.Logits(values=values, temperature=temperatures)
        axes = (0, None, js.Logits(values=None, temperature=0))
        return jax.vmap(js.verify_tree, in_axes=axes)(draws, ROOT_ALONE, rows)
    verdicts = [
        js.verify_tree(
            jax.tree.map(lambda x, b=b: x[b], draws),
            ROOT_ALONE,
            js.Logits(values=values, temperature=temperatures[b]),
        )
        for b in range(batch)
    ]
    return jax.tree.map(lambda *xs: np.stack(xs), *verdicts)


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def assert_law(logits: np.ndarray, temperature: float, *, batch: int = BATCH) -> None:
    """Assert that tokens are those of the exact softmax, away from the edges of the inverse CDF."""
    law = softmax(logits, temperature)
    final = np.random.default_rng(0).random((batch, 2)).astype(np.float32)
    verdict = draw(logits, np.full(batch, temperature), final)
    assert not verdict.status.any()
    sums = np.add.reduceat(law, np.arange(0, len(law), TILE))
    num_compared = 0
    for (first, second), token in zip(final, np.asarray(verdict.tokens)[:, 0], strict=True):
        running = np.cumsum(sums)
        block = int(np.argmax(running > first)) if len(law) > TILE else 0
        within = np.cumsum(law[block * TILE : (block + 1) * TILE])
        within /= within[-1]
        near = min(np.abs(running[:-1] - first).min(initial=1), np.abs(within - second).min())
        if near > 1e-5:
            num_compared += 1
            assert token == block * TILE + np.argmax(within > second)
    assert num_compared > 0.9 * batch


LOGITS = np.random.default_rng(3).normal(0, 3, 40).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0, 1e6])
def test_a_row_has_the_law_of_the_softmax_at_its_temperature(temperature: float) -> None:
    assert_law(LOGITS, temperature)


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    for shift in (-1000.0, 1000.0):
        assert_law(np.round(LOGITS) + np.float32(shift), 1.0)


def test_a_logit_of_minus_infinity_is_a_token_that_cannot_occur() -> None:
    logits = LOGITS.copy()
    logits[::2] = -np.inf
    assert_law(logits, 1.0)
    final = np.stack([np.full(BATCH, 0.5), np.linspace(0, 1 - 2**-23, BATCH)], axis=1)
    for temperature in (0.0, 1.0, 1e6):
        tokens = draw(logits, np.full(BATCH, temperature), final).tokens
        assert (tokens % 2 == 1).all()


def test_extreme_logits_do_not_overflow() -> None:
    logits = np.full(40, -3e38, np.float32)
    logits[[7, 30]] = 3e38
    final = np.stack([np.full(BATCH, 0.5), (np.arange(BATCH) + 0.5) / BATCH], axis=1)
    verdict = draw(logits, np.ones(BATCH), final)
    assert not verdict.status.any()
    assert np.bincount(verdict.tokens[:, 0])[[7, 30]].tolist() == [BATCH / 2, BATCH / 2]


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-39])
def test_at_temperature_zero_the_lowest_of_the_greatest_logits_is_certain(
    temperature: float,
) -> None:
    generator = np.random.default_rng(4)
    final = generator.choice([0.0, -0.0, 0.5, 1 - 2**-24], (BATCH, 2))
    for _ in range(20):
        logits = generator.integers(-3, 3, 40).astype(np.float32)
        verdict = draw(logits, np.full(BATCH, temperature), final)
        assert (verdict.tokens[:, 0] == logits.argmax()).all()
        assert not verdict.status.any()


def test_a_temperature_near_zero_shares_the_mass_among_the_greatest_logits() -> None:
    logits = np.zeros(40, np.float32)
    logits[[3, 9, 20, 21]] = 1.0
    final = np.stack([np.full(BATCH, 0.5), (np.arange(BATCH) + 0.5) / BATCH], axis=1)
    tokens = draw(logits, np.full(BATCH, 1e-30), final).tokens[:, 0]
    assert np.bincount(tokens)[[3, 9, 20, 21]].tolist() == [BATCH / 4] * 4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_bad_logit_stays_visible_wherever_it_stands(bad: float, temperature: float) -> None:
    final = np.full((BATCH, 2), 0.5)
    for place in range(40):
        logits = LOGITS.copy()
        logits[place] = bad
        verdict = draw(logits, np.full(BATCH, temperature), final)
        assert (verdict.tokens == -1).all()
        assert (verdict.status == Status.NON_FINITE_ROW).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_rows_that_are_known_when_compiling_give_no_token(bad: float) -> None:
    """XLA makes any number of exp(nan / x) on a CPU if it knows the NaN."""
    rows = np.zeros((3, 7), np.float32)
    rows[0] = bad

    @jax.jit
    def verify(draws: js.Draws, temperature: jax.Array) -> js.Verdict:
        filters = {"top_k": jnp.int32(3), "top_p": jnp.float32(0.9)}
        known = js.Logits(values=jnp.asarray(rows), temperature=temperature, **filters)
        return js.verify_tree(draws, js.PointMass(tree=js.chain(jnp.array([3, 2]))), known)

    draws = js.Draws(accept=jnp.full(3, 0.5), final=jnp.full(2, 0.5))
    for temperature in (0.0, 1.0):
        verdict = verify(draws, jnp.float32(temperature))
        assert verdict.tokens.tolist() == [-1] * 3
        assert verdict.status == Status.NON_FINITE_ROW


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_row_of_nothing_but_minus_infinity_has_no_mass(temperature: float) -> None:
    logits = np.full(40, -np.inf, np.float32)
    verdict = draw(logits, np.full(BATCH, temperature), np.full((BATCH, 2), 0.5))
    assert (verdict.tokens == -1).all()
    assert (verdict.status == Status.MASSLESS_ROW).all()


def test_a_bad_temperature_is_flagged_for_its_own_sequence_only() -> None:
    temperature = np.ones(BATCH)
    temperature[:4] = [np.nan, np.inf, -np.inf, -1e-3]
    verdict = draw(LOGITS, temperature, np.full((BATCH, 2), 0.5))
    assert (verdict.status[:4] == Status.NON_FINITE_ROW).all()
    assert (verdict.tokens[:4] == -1).all()
    assert not verdict.status[4:].any()
    assert (verdict.tokens[4:] >= 0).all()


@pytest.mark.parametrize("vocab", [5000, WIDE])
def test_a_large_row_has_the_law_of_the_softmax(vocab: int) -> None:
    assert_law(np.random.default_rng(7).normal(0, 4, vocab).astype(np.float32), 0.8, batch=24)


def test_a_large_row_is_greedy_and_keeps_bad_values_visible_in_every_span() -> None:
    for place in (0, 16383, 16384, 32768, 33279, 33280, WIDE - 1):
        logits = np.random.default_rng(8).normal(0, 1, WIDE).astype(np.float32)
        logits[place] = logits[min(place + 7, WIDE - 1)] = 50.0  # a tie, if there is room for it
        assert draw(logits, np.zeros(1), np.full((1, 2), 0.5)).tokens == place
        for bad in (np.nan, np.inf):
            logits[place] = bad
            for temperature in (np.zeros(1), np.ones(1)):
                verdict = draw(logits, temperature, np.full((1, 2), 0.5))
                assert verdict.status == Status.NON_FINITE_ROW


OFF = jnp.float32(0)
TIED = np.array([2.0, 0.5, 2.0, -np.inf, 1.0, 1.0, 1.0, -1.0], np.float32)


@jax.jit
def drawn(
    final: jax.Array,
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array = OFF,
) -> js.Verdict:
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}

    def one(final: jax.Array) -> js.Verdict:
        rows = js.Logits(values=logits[None], temperature=temperature, **filters)
        return js.verify_tree(js.Draws(accept=jnp.zeros(1), final=final), ROOT_ALONE, rows)

    return jax.vmap(one)(final)


FINAL = np.stack([np.zeros(BATCH), (np.arange(BATCH) + 0.5) / BATCH], 1).astype(np.float32)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 8, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),  # off, as in every engine
        (0.7, -1, 0.5, 0.0),
        (1.0, 3, 1.0, 0.0),  # the third of three equal logits: all of them stay
        (0.7, 8, 0.5, 0.0),
        (0.7, 8, 1e-6, 0.0),
        (2.0, 4, 0.9, 0.0),
        (2.0, 2, 0.99, 0.0),
        (1.0, 99, 0.999, 0.0),
        (1.0, 0, 1.0, 0.3),
        (2.0, 6, 0.95, 0.4),
        (0.7, -1, 1.0, 1.0),  # those as probable as the most probable
    ],
)
def test_filters_keep_top_k_then_top_p_then_min_p_and_normalise_what_is_left(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    for logits in (TIED, np.random.default_rng(3).normal(0, 2, 8).astype(np.float32)):
        arguments = (temperature, top_k, top_p, min_p)
        dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
        arguments = [dtype(x) for dtype, x in zip(dtypes, arguments, strict=True)]
        verdict = drawn(jnp.asarray(FINAL), jnp.asarray(logits), *arguments)
        running = np.cumsum(filtered(logits, temperature, top_k, top_p, min_p))
        u = FINAL[:, 1].astype(np.float64)
        wanted = np.sum(running[None] <= u[:, None], axis=1)
        is_clear = np.min(np.abs(running[None] - u[:, None]), axis=1) > 1e-6
        np.testing.assert_array_equal(np.asarray(verdict.tokens)[is_clear, 0], wanted[is_clear])
        assert is_clear.mean() > 0.95
        assert not np.asarray(verdict.status).any()


@jax.jit
def dense_filtered(
    values: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    rows = js.Logits(values=values, temperature=temperature, top_k=top_k, top_p=top_p)
    return js.dense_rows(rows, values.shape[0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 200, 0.5),  # among the logits that are sorted
        (1.0, 256, 1.0),
        (1.0, 257, 1.0),  # the first that is not
        (0.7, 900, 0.999),
        (3.0, 0, 0.8),  # far beyond them
        (1.0, 1999, 1.0),
    ],
)
def test_filters_of_a_large_row_find_their_cutoff_among_all_logits(
    temperature: float, top_k: int, top_p: float
) -> None:
    generator = np.random.default_rng(8)
    spread = generator.normal(0, 2, 2000).astype(np.float32)
    tied = np.round(spread * 4).astype(np.float32) / 4  # of both signs, some forty at each value
    holed = np.where(np.arange(2000) % 3 == 0, -np.inf, spread).astype(np.float32)
    arguments = (jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))
    dense = np.asarray(dense_filtered(jnp.asarray(np.stack([spread, tied, holed])), *arguments))
    for row, logits in zip(dense, (spread, tied, holed), strict=True):
        wanted = filtered(logits, temperature, top_k, top_p, 0.0)
        # Rounding of a sum of 2000 may move the last token that top_p keeps, no more.
        assert np.sum((row > 0) != (wanted > 0)) <= 1
        np.testing.assert_allclose(row, wanted, rtol=1e-4, atol=2e-5)


def test_filters_leave_greedy_decoding_and_bad_values_as_they_are() -> None:
    cold = (jnp.float32(0), jnp.int32(2), jnp.float32(0.3))
    assert (np.asarray(drawn(jnp.asarray(FINAL), jnp.asarray(TIED), *cold).tokens)[:, 0] == 0).all()
    warm = (jnp.float32(1), jnp.int32(2), jnp.float32(0.3))
    for bad, status in ((np.nan, Status.NON_FINITE_ROW), (np.inf, Status.NON_FINITE_ROW)):
        logits = TIED.copy()
        logits[1] = bad
        verdict = drawn(jnp.asarray(FINAL), jnp.asarray(logits), *warm)
        assert (np.asarray(verdict.status) == status).all()
        assert (np.asarray(verdict.tokens)[:, 0] == -1).all()
    nothing = drawn(jnp.asarray(FINAL), jnp.full(8, -jnp.inf), *warm)
    assert (np.asarray(nothing.status) == Status.MASSLESS_ROW).all()


def test_top_k_of_1_is_greedy_at_every_temperature() -> None:
    for temperature in (0.0, 1.0, 1e6):
        rows = (jnp.asarray(TIED), jnp.float32(temperature), jnp.int32(1), jnp.float32(0.3))
        verdict = drawn(jnp.asarray(FINAL), *rows)
        assert (np.asarray(verdict.tokens)[:, 0] == 0).all()  # the lower of two equal logits
        assert not np.asarray(verdict.status).any()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, -2, 1.0),
        (0.0, -2, 1.0),
        (1.0, -(2**31), 1.0),
        (1.0, 8, 0.0),
        (1.0, 8, -0.1),
        (1.0, 8, np.nan),
        (0.0, 8, 1.0001),
        (1.0, 8, np.inf),
        (np.nan, 1, 1.0),
        (-1e-30, 1, 1.0),
        (np.inf, 0, 0.5),
    ],
)
def test_a_parameter_outside_its_range_is_flagged_and_yields_no_token(
    temperature: float, top_k: int, top_p: float
) -> None:
    parameters = (jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))
    verdict = drawn(jnp.asarray(FINAL), jnp.asarray(TIED), *parameters)
    assert (np.asarray(verdict.status) == Status.NON_FINITE_ROW).all()
    assert (np.asarray(verdict.tokens) == -1).all()


CHECKED = jax.jit(js.checked(js.verify_tree))


@pytest.mark.parametrize(
    ("top_k", "top_p", "message"),
    [
        (-2, 1.0, "target top_k is -2: it must be at least 1, or 0 or -1 for no filter"),
        (1, 0.0, "target top_p is 0.0"),
        (1, 1.5, "target top_p is 1.5"),
        (1, np.nan, "target top_p is nan"),
    ],
)
def test_checked_names_a_filter_that_is_none(top_k: int, top_p: float, message: str) -> None:
    rows = js.Logits(
        values=jnp.asarray(TIED)[None],
        temperature=jnp.float32(1),
        top_k=jnp.int32(top_k),
        top_p=jnp.float32(top_p),
    )
    draws = js.Draws(accept=jnp.zeros(1), final=jnp.zeros(2))
    error, _ = CHECKED(draws, ROOT_ALONE, rows)
    assert message in error.get()


@pytest.mark.parametrize("min_p", [-0.1, 1.001, np.nan, np.inf])
def test_a_min_p_outside_its_range_is_flagged_and_yields_no_token(min_p: float) -> None:
    parameters = (jnp.float32(1), jnp.int32(0), jnp.float32(1), jnp.float32(min_p))
    verdict = drawn(jnp.asarray(FINAL), jnp.asarray(TIED), *parameters)
    assert (np.asarray(verdict.status) == Status.NON_FINITE_ROW).all()
    assert (np.asarray(verdict.tokens) == -1).all()


def test_min_p_alone_needs_no_other_filter() -> None:
    rows = js.Logits(
        values=jnp.asarray(TIED)[None], temperature=jnp.float32(0.5), min_p=jnp.float32(0.1)
    )
    np.testing.assert_allclose(
        js.dense_rows(rows, 1)[0], filtered(TIED, 0.5, 0, 1.0, 0.1), atol=1e-6
    )
