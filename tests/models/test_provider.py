"""Providers: a bad answer is an error that names fault, context and value; good ones come through."""

import pickle
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.audit import decoding_law
from jaxspec.checks import RowError
from jaxspec.decode import Decoder
from jaxspec.draft import FixedTree, SampledPath
from jaxspec.models.provider import (
    Answer,
    AnswerError,
    Context,
    ImpureProviderError,
    Provider,
    Query,
    Softmax,
    Usage,
    audit_provider,
)

CONTEXTS: list[Context] = [(5, token) for token in range(10)]
GOOD = np.array([0.25, 0.5, 0.25], np.float32)


def single(row: Any, transform: Softmax | None = None) -> Provider:
    """A model that gives one row whatever it is asked."""
    return Provider("single", vocab=3, ask=lambda context: row, transform=transform)


def batched(answer: Callable[[list[Query]], Any], transform: Softmax | None = None) -> Provider:
    return Provider("batch", vocab=3, ask=answer, is_batched=True, transform=transform)


def answers(queries: list[Query]) -> list[Answer]:
    """Rows that tell their contexts apart."""
    return [Answer(q.id, np.roll(GOOD, q.context[-1])) for q in queries]


def with_row(place: int, row: Any) -> Callable[[list[Query]], list[Answer]]:
    """A batch callback whose row at one place is another."""
    return lambda queries: [
        a._replace(row=row) if i == place else a for i, a in enumerate(answers(queries))
    ]


# --- what comes through


def test_a_batch_is_one_call_and_single_contexts_are_a_call_each() -> None:
    asked: list[Any] = []

    def ask(queries: Any) -> Any:
        asked.append(queries)
        return answers(queries) if isinstance(queries, list) else np.roll(GOOD, queries[-1])

    rows, usage = batched(ask).rows(CONTEXTS)
    assert asked == [[Query(i, context) for i, context in enumerate(CONTEXTS)]]
    assert usage == Usage(queries=10, calls=1)
    asked.clear()
    one_by_one, usage = Provider("single", vocab=3, ask=ask).rows(CONTEXTS)
    assert asked == CONTEXTS
    assert usage == Usage(queries=10, calls=10)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, one_by_one)
    np.testing.assert_array_equal(rows[1], [0.25, 0.25, 0.5])


def test_no_contexts_are_no_call() -> None:
    rows, usage = batched(lambda queries: pytest.fail("was called")).rows([])
    assert rows.shape == (0, 3)
    assert usage == Usage(0, 0)


def test_usages_add_up() -> None:
    assert sum([Usage(3, 1), Usage(2, 2)], Usage()) == Usage(queries=5, calls=3)


@pytest.mark.parametrize("is_batched", [True, False])
def test_a_buffer_that_the_callback_fills_again_does_not_corrupt_rows(is_batched: bool) -> None:
    buffer = np.zeros(3, np.float32)

    def fill(context: Context) -> np.ndarray:
        buffer[:] = np.roll(GOOD, context[-1])
        return buffer

    def stream(queries: list[Query]) -> Any:
        for query in queries:
            yield query.id, fill(query.context)

    rows, _ = Provider("p", 3, stream if is_batched else fill, is_batched).rows(CONTEXTS)
    buffer[:] = np.nan
    for context, row in zip(CONTEXTS, rows, strict=True):
        np.testing.assert_array_equal(row, np.roll(GOOD, context[-1]))


def test_a_callback_may_use_up_the_list_of_queries() -> None:
    def ask(queries: list[Query]) -> list[Answer]:
        found = []
        while queries:
            query = queries.pop(0)
            found.append(Answer(query.id, GOOD))
        return found

    assert batched(ask).rows(CONTEXTS)[1] == Usage(10, 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_rows_of_any_float_dtype_arrive_as_float32_over_their_sum(dtype: Any) -> None:
    row = jnp.array([0.1, 0.6, 0.3], dtype)
    rows, _ = single(row).rows([(0,)])
    assert rows.dtype == np.float32
    exact = np.asarray(row.astype(jnp.float32)).astype(np.float64)
    np.testing.assert_array_equal(rows[0], (exact / exact.sum()).astype(np.float32))


def test_a_row_of_mass_1_within_what_float32_rounds_keeps_its_bits() -> None:
    row = np.random.default_rng(0).dirichlet(np.ones(3)).astype(np.float32)
    assert row.astype(np.float64).sum() != 1
    rows, _ = single(row).rows([(0,)])
    np.testing.assert_array_equal(rows[0], row)
    again, _ = single(rows[0]).rows([(0,)])
    np.testing.assert_array_equal(again, rows)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_denormal_probabilities_are_0_given_or_made(dtype: str) -> None:
    for row in ([1e-45, 1.0, 0.0], [1.1e-38, 1.0, 0.0]):
        rows, _ = single(
            jnp.array(row, "bfloat16") if dtype == "bfloat16" else np.array(row, dtype)
        ).rows([(0,)])
        assert rows.tolist() == [[0.0, 1.0, 0.0]]
    made, _ = single(np.array([0.0, -100.0, -80.0]), Softmax()).rows([(0,)])
    assert made[0, 1] == 0
    assert made[0, 2] > 0
    least = float(np.finfo(np.float32).tiny)
    assert single([least, 1.0, 0.0]).rows([(0,)])[0][0, 0] == np.float32(least)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_rows_give_one_law_drafted_or_not(dtype: Any) -> None:
    def model(name: str, row: list[int]) -> Provider:
        return Provider(name, 4, lambda c: jnp.roll(jnp.asarray(np.array(row) / 20, dtype), c[-1]))

    target, draft = model("target", [1, 3, 7, 9]), model("draft", [12, 3, 4, 1])
    stored = np.asarray(target.ask((0,)).astype(jnp.float32)).astype(np.float64)
    assert stored.sum() != 1
    for drafter in (FixedTree(draft, (2, 1)), SampledPath(draft, 2)):
        law = decoding_law(Decoder(target, drafter), (0,), new_tokens=2)
        assert law.misses == 0
        assert law.tv <= 1e-6
        first = [sum(m for text, m in law.texts.items() if text[0] == x) for x in range(4)]
        assert np.abs(np.array(first) - stored / stored.sum()).sum() / 2 <= 1e-6


def test_lists_and_float64_rows_arrive_as_float32() -> None:
    for row in ([0.1, 0.6, 0.3], np.array([0.1, 0.6, 0.3])):
        np.testing.assert_array_equal(single(row).rows([(0,)])[0][0], np.float32([0.1, 0.6, 0.3]))


def test_ids_may_be_integers_of_any_library() -> None:
    for make in (np.int64, jnp.int32):
        provider = batched(lambda queries, make=make: [(make(q.id), GOOD) for q in queries])
        assert provider.rows(CONTEXTS)[0].shape == (10, 3)


# --- bad rows: the 7th of a batch, and the answer to a single context


class Metres(np.ndarray):
    """An array whose numbers are not all that it says."""


class Reluctant:
    """What a library of networks gives back while it records gradients."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("call detach")


BAD_ROWS: dict[str, list[tuple[Any, str]]] = {
    "non-finite": [
        ([0.5, np.nan, 0.5], "entry 1 is nan"),
        ([0.5, 0.5, np.inf], "entry 2 is inf"),
    ],
    "not a distribution": [
        ([1.5, -0.5, 0.0], "entry 1 is -0.5, below 0"),
        ([1.0, -1e-300, 0.0], "entry 1 is -1e-300, below 0"),
        ([0.25, 0.25, 0.375], "mass is 0.875, not 1 within 1e-05"),
        ([1e300, 0.0, 0.0], r"mass is 1e\+300, not 1"),
        ([0, 1, 0], "has dtype int64, wanted a float type"),
        (np.array([False, True, False]), "has dtype bool"),
        (np.array([1, 0, 0], complex), "has dtype complex128"),
        (np.array([1, 0, 0], np.longdouble), "wanted a float type: float64"),
        (np.array([1, 0.0, 0.0], object), "has dtype object"),
        (["a", "b", "c"], "wanted a float type"),
    ],
    "width": [
        ([0.5, 0.5], r"has shape \(2,\), wanted \(3,\)"),
        ([0.5, 0.5, 0.0, 0.0], r"has shape \(4,\), wanted \(3,\)"),
        ([[0.25, 0.5, 0.25]], r"has shape \(1, 3\), wanted \(3,\)"),
        (None, r"has shape \(\), wanted \(3,\)"),
    ],
    "malformed": [
        ([[1.0], [0.0, 0.0], [0.0]], "is not an array"),
        (
            np.ma.masked_array([0.25, 0.5, 0.25], mask=[0, 1, 0]),
            "is a MaskedArray: give a plain array, with a probability where it is masked",
        ),
        (
            [np.ma.masked_array(0.5, mask=True), 0.5, 0.0],
            "entry 0 is of type MaskedArray",
        ),
        (np.array([0.25, 0.5, 0.25]).view(Metres), "is a Metres"),
        ([True, 0.0, 0.0], "entry 0 is True, of type bool"),
        (Reluctant(), "is not an array: call detach"),
    ],
}


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_a_bad_row_is_named_with_its_fault_context_and_value(fault: str) -> None:
    for row, message in BAD_ROWS[fault]:
        for provider, place in ((batched(with_row(6, row)), 6), (single(row), 0)):
            where = rf"{provider.name}: row for context \(5, {place}\).*"
            with pytest.raises(RowError, match=where + message) as caught:
                provider.rows(CONTEXTS)
            assert caught.value.fault == fault
            assert isinstance(caught.value, AnswerError) == (fault == "malformed")


def test_a_long_context_is_shown_by_its_end() -> None:
    long = (*[0] * 50_000, *range(1, 9))
    with pytest.raises(RowError, match=r"of 50008 tokens that ends in \(1, .* 8\)") as caught:
        single([0.5, 0.5]).rows([long])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("dtype", "mass", "is_accepted"),
    [
        ("float32", 1 + 2**-17, True),
        ("float32", 1 + 2**-16, False),
        ("float16", 1 - 2**-10, True),
        ("float16", 1 - 2**-9, False),
        ("bfloat16", 1 - 2**-7, True),
        ("bfloat16", 1 - 2**-6, False),
    ],
)
def test_the_mass_may_be_off_by_what_the_dtype_rounds(
    dtype: str, mass: float, is_accepted: bool
) -> None:
    provider = single(jnp.array([mass, 0.0, 0.0], dtype))
    if is_accepted:
        assert provider.rows([(0,)])[0].tolist() == [[1.0, 0.0, 0.0]]
    else:
        with pytest.raises(RowError, match="not 1 within"):
            provider.rows([(0,)])


# --- bad batches


def swapped(queries: list[Query]) -> list[Answer]:
    found = answers(queries)
    found[3], found[4] = found[4], found[3]
    return found


BAD_BATCHES: dict[str, list[tuple[Callable[[list[Query]], Any], str]]] = {
    "missing": [
        (lambda qs: [a for a in answers(qs) if a.id != 6], r"no row for id 6, context \(5, 6\)"),
        (lambda qs: [], r"no row for id 0, context \(5, 0\)"),
    ],
    "extra": [
        (
            lambda qs: [*answers(qs), Answer(10, GOOD)],
            r"id 10, which was not asked for; .* ids 0 to 9, the first for context \(5, 0\)",
        ),
        (lambda qs: [Answer(-1, GOOD), *answers(qs)[1:]], "id -1, which was not asked for"),
        (lambda qs: [*answers(qs)[:-1], answers(qs)[2]], r"two rows for id 2, context \(5, 2\)"),
    ],
    "reordered": [
        (swapped, r"answer 3 is for id 4, wanted id 3, context \(5, 3\)"),
        (lambda qs: answers(qs)[::-1], r"answer 0 is for id 9, wanted id 0, context \(5, 0\)"),
    ],
    "malformed": [
        (lambda qs: None, r"returned a NoneType.*context \(5, 0\)"),
        (
            lambda qs: np.stack([a.row for a in answers(qs)]),
            r"answer 0 is a ndarray, wanted Answer\(id, row\)",
        ),
        (lambda qs: [(0, GOOD, 1)], "answer 0 is a tuple, wanted"),
        (lambda qs: [(q.id + 0.5, GOOD) for q in qs], "answer 0 has id 0.5, not an integer"),
    ],
}


@pytest.mark.parametrize("fault", BAD_BATCHES)
def test_a_batch_that_does_not_match_its_queries_is_an_error(fault: str) -> None:
    for ask, message in BAD_BATCHES[fault]:
        with pytest.raises(AnswerError, match=rf"batch: .*{message}") as caught:
            batched(ask).rows(CONTEXTS)
        assert caught.value.fault == fault
        assert pickle.loads(pickle.dumps(caught.value)).fault == fault


def test_rows_of_two_tokens_are_not_taken_for_pairs_of_id_and_row() -> None:
    rows = np.array([[0.0, 1.0], [1.0, 0.0]])
    provider = Provider("binary", vocab=2, ask=lambda queries: rows, is_batched=True)
    with pytest.raises(AnswerError, match="answer 0 is a ndarray"):
        provider.rows([(0,), (1,)])


@pytest.mark.parametrize("is_batched", [True, False])
def test_what_a_callback_raises_passes_through_and_it_can_be_asked_again(is_batched: bool) -> None:
    class OutOfMemoryError(Exception):
        pass

    fault, is_down = OutOfMemoryError("7th"), [True]

    def one(context: Context) -> np.ndarray:
        if context[-1] == 6 and is_down[0]:
            raise fault
        return np.roll(GOOD, context[-1])

    def many(queries: list[Query]) -> Any:
        return ((q.id, one(q.context)) for q in queries)  # raises while it is read

    provider = Provider("p", 3, many if is_batched else one, is_batched)
    with pytest.raises(OutOfMemoryError) as caught:
        provider.rows(CONTEXTS)
    assert caught.value is fault
    is_down[0] = False
    np.testing.assert_array_equal(provider.rows(CONTEXTS)[0][6], GOOD)


# --- logits


def test_logits_become_their_softmax() -> None:
    logits = np.log(np.array([1.0, 2.0, 5.0])) + 300.0
    rows, _ = single(logits, Softmax()).rows([(0,)])
    np.testing.assert_allclose(rows[0], [0.125, 0.25, 0.625], rtol=1e-6)
    rows, _ = single(logits, Softmax(temperature=0.5)).rows([(0,)])
    np.testing.assert_allclose(rows[0], np.array([1, 4, 25]) / 30, rtol=1e-6)


def test_a_logit_of_minus_infinity_is_probability_0() -> None:
    for temperature in (0.0, 0.5, 1.0):
        rows, _ = single([0.0, -np.inf, -np.inf], Softmax(temperature)).rows([(0,)])
        assert rows.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_at_temperature_0_the_lowest_of_equal_logits_takes_all(dtype: Any) -> None:
    rows, _ = single(jnp.array([1.0, 2.0, 2.0], dtype), Softmax(0)).rows([(0,)])
    assert rows.tolist() == [[0.0, 1.0, 0.0]]
    rows, _ = single(jnp.zeros(3, dtype), Softmax(0)).rows([(0,)])
    assert rows.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("logits", [[3e38, -3e38, 0.0], [1e308, -1e308, 0.0], [5.0, 4.0, -5.0]])
def test_extreme_logits_and_temperatures_give_rows_without_nan(logits: list[float]) -> None:
    for temperature in (1e-300, 1e-40, 1e-3):
        rows, _ = single(logits, Softmax(temperature)).rows([(0,)])
        assert rows.tolist() == [[1.0, 0.0, 0.0]]


def test_bad_logits_are_errors_at_any_temperature() -> None:
    for logits, fault, message in (
        ([0.0, np.nan, 0.0], "non-finite", "logit 1 is nan"),
        ([0.0, 0.0, np.inf], "non-finite", "logit 2 is inf"),
        ([-np.inf] * 3, "not a distribution", "every logit is -inf"),
        ([0.0, 0.0], "width", "shape"),
        ([0, 0, 0], "not a distribution", "dtype int64"),
    ):
        for temperature in (0.0, 1.0):
            where = rf"row for context \(5, 6\).*{message}"
            with pytest.raises(RowError, match=where) as caught:
                batched(with_row(6, logits), Softmax(temperature)).rows(CONTEXTS)
            assert caught.value.fault == fault


def test_an_invalid_temperature_is_an_error() -> None:
    values: list[Any] = [-0.5, np.nan, np.inf, 10**400, True, "1", None, 1j, np.ones(1)]
    for temperature in values:
        with pytest.raises(ValueError, match=r"temperature is .*: it must be"):
            Softmax(temperature)


# --- contexts


def test_a_context_comes_back_as_plain_integers() -> None:
    provider = single(GOOD)
    for context in ((2, 0, 1), [2, 0, 1], np.array([2, 0, 1]), jnp.array([2, 0, 1])):
        checked = provider.check_context(context)
        assert checked == (2, 0, 1)
        assert all(type(token) is int for token in checked)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ((), "context is empty"),
        ((0, 3, 1), "context entry 1 is 3, outside the vocabulary of 3"),
        ((0, -1), "context entry 1 is -1, outside the vocabulary of 3"),
        ((0.0, 1.0), "sequence of token ids"),
        ([[0, 1]], "sequence of token ids"),
        ("abc", "sequence of token ids"),
        ([True, 0], "entry 0 is True, of type bool"),
        (np.ma.masked_array([0, 1], mask=[0, 1]), "plain array of them, not of type MaskedArray"),
        ([[0], [0, 1]], "sequence of token ids: .*inhomogeneous"),
        ([0, None], r"sequence of token ids, not \[0, None\]"),
    ],
)
def test_an_invalid_context_is_an_error(context: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"single: .*{message}"):
        single(GOOD).check_context(context)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 0}, "provider 'toy': vocab is 0"),
        ({"vocab": True}, "provider 'toy': vocab is True"),
        ({"name": None}, "a provider's name is None"),
        ({"ask": [0.5, 0.5]}, "provider 'toy': ask is of type list"),
        ({"is_batched": 1}, "provider 'toy': is_batched is 1"),
        ({"transform": 0.7}, "provider 'toy': transform is 0.7"),
        ({"transform": Softmax}, "provider 'toy': transform is the class Softmax"),
    ],
)
def test_an_argument_of_another_kind_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Provider(**{"name": "toy", "vocab": 3, "ask": lambda context: GOOD, **change})


# --- purity


def test_a_pure_provider_passes_the_audit_and_is_asked_as_often_as_it_says() -> None:
    calls: list[int] = []

    def ask(queries: list[Query]) -> list[Answer]:
        calls.append(len(queries))
        return answers(queries)

    audit_provider(batched(ask), CONTEXTS, repeats=2)
    assert calls == [10] + 20 * [1]  # all at once, then each alone, twice


def test_a_provider_that_counts_its_calls_is_caught() -> None:
    count = iter(range(1000))
    provider = Provider("counter", 3, lambda context: np.roll(GOOD, next(count)))
    with pytest.raises(ImpureProviderError, match=r"counter: .*\(5, 9\), entry \d is 0\.\d+, was"):
        audit_provider(provider, CONTEXTS)


def test_a_provider_that_drifts_in_one_bit_is_caught_unless_it_may() -> None:
    drift = iter(np.arange(1000) * 2.0**-24)
    provider = Provider("drift", 3, lambda c: np.array([0.5 - (d := next(drift)), 0.5 + d, 0.0]))
    with pytest.raises(ImpureProviderError, match=r"for \(5, 1\), entry 0 is"):
        audit_provider(provider, CONTEXTS[:2])
    audit_provider(provider, CONTEXTS[:2], tolerance=1e-5)


def test_a_provider_whose_rows_depend_on_their_company_is_caught() -> None:
    def ask(queries: list[Query]) -> list[Answer]:
        return [Answer(q.id, np.roll(GOOD, len(queries) // 5)) for q in queries]

    with pytest.raises(ImpureProviderError, match=r"batch: asked again for \(5, 9\)"):
        audit_provider(batched(ask), CONTEXTS)


def test_a_batch_that_gives_rows_of_other_contexts_under_the_right_ids_is_caught() -> None:
    def ask(queries: list[Query]) -> list[Answer]:
        rows = [a.row for a in answers(queries)]
        return [Answer(q.id, row) for q, row in zip(queries, rows[1:] + rows[:1], strict=True)]

    with pytest.raises(ImpureProviderError, match=r"asked again for \(5, 8\)"):
        audit_provider(batched(ask), CONTEXTS)


def test_an_audit_that_would_ask_nothing_is_an_error() -> None:
    for contexts, repeats in ((CONTEXTS, 0), ([], 2)):
        with pytest.raises(ValueError, match="nothing is asked again"):
            audit_provider(single(GOOD), contexts, repeats=repeats)
