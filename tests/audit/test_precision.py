"""What float32 costs at a real vocabulary: the law of a round, from the verifier's own numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js
from jaxspec.audit import precision
from jaxspec.audit.precision import GRID, LIMIT, ROWS, bonus_law, exact_row, round_law, rows_of

VOCAB = 5000  # nine tiles and a tail
STORED = [("probabilities", "float32"), ("probabilities", "bfloat16"), ("logits", "float16")]


def away(law: np.ndarray, exact: np.ndarray) -> float:
    assert law.sum() == pytest.approx(1, abs=1e-12)
    return 0.5 * float(np.abs(law - exact).sum())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("form", "dtype"), STORED)
def test_the_law_of_a_round_is_the_target_row_within_2e_6(rows: str, form: str, dtype: str) -> None:
    target, draft = rows_of(rows, form, dtype, VOCAB)
    exact = exact_row(target)
    for weighed, drawn in (round_law(target, draft), bonus_law(target, draft)):
        assert away(weighed, exact) <= LIMIT
        assert away(drawn, exact) <= 2e-5
        assert not (drawn[exact == 0] > 0).any()
    if not rows.startswith("one token"):
        assert away(exact_row(draft), exact) > 0.05  # there was something to verify


def test_at_a_vocabulary_of_262144_as_well() -> None:
    target, draft = rows_of("peaked", "logits", "bfloat16", 262144)
    assert away(round_law(target, draft)[0], exact_row(target)) <= LIMIT


def test_a_verifier_that_forgets_the_mass_of_its_rows_is_beyond_the_limit(monkeypatch) -> None:
    """1 / V has a rounding error in half precision, the same for all tokens: masses are not 1."""
    target, draft = rows_of("flat, 1 / V", "probabilities", "bfloat16", VOCAB)
    assumed = property(lambda rows: True)
    monkeypatch.setattr("jaxspec.verify.reader._Rows.is_assumed", assumed)
    monkeypatch.setattr("jaxspec.verify.reader.RowReader.is_off", lambda *_: jnp.bool_(False))
    monkeypatch.setattr("jaxspec.rows.UNIT_MASS", 1.0)
    precision._numbers.clear_cache()
    try:
        assert away(round_law(target, draft)[0], exact_row(target)) > 10 * LIMIT
    finally:
        precision._numbers.clear_cache()


@pytest.mark.parametrize(("form", "dtype"), [STORED[0], STORED[2]])
def test_the_law_as_drawn_is_that_of_the_public_verifier(form: str, dtype: str) -> None:
    """Draw by draw: token and acceptance follow from the numbers that the law is made of."""
    target, draft = rows_of("peaked", form, dtype, VOCAB)
    numbers = precision._Numbers.of(target, draft, is_bonus=False)
    generator = np.random.default_rng(0)
    count = 200
    u, pairs = (
        (generator.integers(0, GRID, shape) / GRID).astype(np.float32)
        for shape in (count, (count, 2))
    )
    candidates = generator.choice(VOCAB, count, p=exact_row(draft))

    def token(at: int) -> int:
        candidate = candidates[at]
        if u[at] * numbers.drawn[candidate] < numbers.kept[candidate]:
            return candidate
        tiles = np.cumsum(precision._law(numbers.sums, numbers.running, True))
        tile = np.searchsorted(tiles, pairs[at, 0], side="right")
        inside = precision._law(numbers.weights[tile], numbers.running_inside[tile], True)
        place = np.searchsorted(np.cumsum(inside), pairs[at, 1], side="right")
        return int(numbers.starts[tile] + place)

    draws = js.Draws(accept=jnp.stack([jnp.zeros(count), jnp.asarray(u)], 1), final=pairs)
    two = js.dense_rows(target, 1) if form == "probabilities" else target.values
    rows = jnp.broadcast_to(two, (2, VOCAB))
    rows = rows if form == "probabilities" else js.Logits(values=rows, temperature=jnp.float32(1))

    def verify(draws: js.Draws, candidate: jax.Array) -> js.Verdict:
        return js.verify_path(draws, js.sampled_path(candidate[None], draft), rows)

    verdict = jax.jit(jax.vmap(verify))(draws, jnp.asarray(candidates, jnp.int32))
    assert not verdict.status.any()
    assert 0.1 < float(verdict.num_accepted.mean()) < 0.95
    assert verdict.tokens[:, 0].tolist() == [token(at) for at in range(count)]
