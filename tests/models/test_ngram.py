"""N-gram models: rows worked out by hand, a plain reference, and real text."""

import collections
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import bundled_ngrams, bundled_text, fit_ngram, split_text
from jaxspec.models.text import TextError, encode


def reference_row(text, order, alphabet, context):
    """Witten-Bell by its definition: exact, from strings, one recursion."""
    row = [Fraction(1, len(alphabet))] * len(alphabet)
    for length in range(min(order, len(context) + 1)):
        suffix = context[len(context) - length :]
        seen = collections.Counter(
            text[i] for i in range(length, len(text)) if text[i - length : i] == suffix
        )
        total, kinds = sum(seen.values()), len(seen)
        if total:
            row = [
                (seen[x] + kinds * below) / (total + kinds)
                for x, below in zip(alphabet, row, strict=True)
            ]
    return row


def test_rows_by_hand():
    # Text aab, symbols a b c. Nothing before: a twice, b once, so n = 3, T = 2, below it 1/3 each.
    #   a (2 + 2/3)/5 = 8/15    b (1 + 2/3)/5 = 1/3    c (2/3)/5 = 2/15
    # After a: a once, b once, n = 2, T = 2.
    #   a (1 + 16/15)/4 = 31/60    b (1 + 2/3)/4 = 5/12    c (4/15)/4 = 1/15
    # After aa: b once, n = 1, T = 1.
    #   a (31/60)/2 = 31/120    b (1 + 5/12)/2 = 17/24    c (1/15)/2 = 1/30
    model = fit_ngram("aab", 3, "abc")
    expected = {
        (): [Fraction(8, 15), Fraction(1, 3), Fraction(2, 15)],
        (0,): [Fraction(31, 60), Fraction(5, 12), Fraction(1, 15)],
        (0, 0): [Fraction(31, 120), Fraction(17, 24), Fraction(1, 30)],
        (1,): [Fraction(8, 15), Fraction(1, 3), Fraction(2, 15)],  # b was never followed
        (2, 0): [Fraction(31, 60), Fraction(5, 12), Fraction(1, 15)],  # ca was never seen
        (2, 0, 0): [Fraction(31, 120), Fraction(17, 24), Fraction(1, 30)],  # c is out of reach
    }
    for context, row in expected.items():
        assert sum(row) == 1
        np.testing.assert_array_equal(model.row(context), np.array(row, np.float64).astype("f4"))


@pytest.mark.parametrize("order", range(6))
def test_rows_equal_the_reference(order):
    text, alphabet = "abracadabra, abracadabra; a bar, a bard", "\n ,;abcdr"
    model = fit_ngram(text, order, alphabet)
    rng = np.random.default_rng(order)
    contexts = [text[at : at + length] for at in range(0, 30, 3) for length in range(7)]
    contexts += ["".join(rng.choice(list(alphabet), length)) for length in range(7)]
    for context in contexts:
        expected = reference_row(text, order, alphabet, context)
        np.testing.assert_allclose(
            model.row(encode(context, alphabet)), np.array(expected, float), rtol=2e-7
        )


def test_orders_whose_codes_overflow_equal_the_reference():
    rng = np.random.default_rng(0)
    alphabet = "".join(map(chr, range(0x4E00, 0x4E00 + 511)))
    words = ["".join(rng.choice(list(alphabet), 2)) for _ in range(2)]
    text = "".join(words[i] for i in rng.integers(0, 2, 200))
    order = 12
    assert (len(alphabet) + 1) ** order == 2**108  # codes that wrap would lose the latest symbols
    model = fit_ngram(text, order, alphabet)
    for at in range(0, 60, 7):
        context = text[at : at + 11]
        expected = np.array(reference_row(text, order, alphabet, context), float)
        np.testing.assert_allclose(model.row(encode(context, alphabet)), expected, rtol=2e-7)


def test_truncated_equals_fitted_bit_for_bit():
    text = bundled_text()[:100_000]
    alphabet = "".join(sorted(set(text)))
    model = fit_ngram(text, 12, alphabet)
    tokens = encode(text, alphabet)
    contexts = np.lib.stride_tricks.sliding_window_view(tokens, 12)[::997].copy()
    contexts[::3, 4] = 0
    for order in (0, 1, 2, 3, 5, 11):
        short, fitted = model.truncated(order), fit_ngram(text, order, alphabet)
        assert short.order == fitted.order == order
        np.testing.assert_array_equal(short.rows(contexts), fitted.rows(contexts))
        assert all(a is b for a, b in zip(short.tables, model.tables, strict=False))
        for mine, theirs in zip(short.tables, fitted.tables, strict=True):
            for name in ("codes", "starts", "symbols", "counts"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))


def test_a_short_context_has_the_row_of_the_truncated_model(held_out):
    target, _ = bundled_ngrams()
    contexts = held_out[:200]
    for length in range(4):
        short = contexts[:, 6 - length :]
        padded = np.pad(short, ((0, 0), (5 - length, 0)), constant_values=-1)
        expected = target.truncated(length + 1).rows(contexts)
        np.testing.assert_array_equal(target.rows(short), expected)
        np.testing.assert_array_equal(target.rows(padded), expected)
    np.testing.assert_array_equal(target.row([]), target.row([-1, -1]))


def test_orders_one_and_zero():
    model = fit_ngram("abca", 1)
    # n = 4, T = 3, below it 1/3 each: a (2 + 1)/7, b and c (1 + 1)/7.
    np.testing.assert_array_equal(
        model.rows([[0], [1]]), np.array([[3 / 7, 2 / 7, 2 / 7]] * 2, "f4")
    )
    uniform = fit_ngram("abca", 0)
    assert uniform.order == 0
    np.testing.assert_array_equal(uniform.row([2, 1]), np.full(3, 1 / 3, "f4"))
    assert fit_ngram("a", 1).row([]).tolist() == [1.0]


def test_rows_are_distributions(held_out):
    target, draft = bundled_ngrams()
    rng = np.random.default_rng(0)
    seen = held_out
    unseen = rng.integers(0, target.vocab, (500, 6))
    padded = np.where(np.arange(6) < rng.integers(0, 7, (500, 1)), -1, unseen)
    for model in (target, draft, target.truncated(1), target.truncated(0)):
        for contexts in (seen, unseen, padded, unseen[:, :0], unseen[:, :2]):
            rows = model.rows(contexts)
            assert isinstance(rows, jax.Array)
            assert rows.dtype == jnp.float32
            assert rows.shape == (len(contexts), 73)
            assert np.min(rows) > 0
            assert np.abs(np.asarray(rows, np.float64).sum(axis=-1) - 1).max() < 1e-6


def test_rows_stay_positive_in_float32_up_to_order_nine():
    def least(order):  # of any entry of any row: a symbol new at every context length
        model, _ = bundled_ngrams(9)
        floor = np.full(1, 1 / model.vocab)
        for table in model.tables[:order]:
            kinds = np.diff(table.starts)
            total = np.add.reduceat(table.counts, table.starts[:-1])
            floor = floor[table.codes // model.vocab] * kinds / (total + kinds)
        return floor.min()

    assert least(5) > 1e-30
    assert least(9) > np.finfo(np.float32).tiny


def test_any_batch_shape_gives_the_same_rows(held_out):
    target, _ = bundled_ngrams()
    contexts = held_out[:12]
    rows = np.asarray(target.rows(contexts))
    np.testing.assert_array_equal(target.rows(contexts.reshape(3, 4, 6)), rows.reshape(3, 4, -1))
    np.testing.assert_array_equal(target.rows(jnp.asarray(contexts)), rows)
    np.testing.assert_array_equal(target.row(contexts[7]), rows[7])
    assert target.rows(np.zeros((0, 6), int)).shape == (0, 73)
    assert target.rows(np.zeros((2, 0, 0))).shape == (2, 0, 73)


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        ([[0, 1], [0, 3]], r"contexts\[1, 1\] is 3, outside \[-1, 3\)"),
        ([[0, -2]], r"contexts\[0, 1\] is -2, outside \[-1, 3\)"),
        ([[[0, 1], [0, -1]]], r"contexts\[0, 1, 1\] is -1, right of a symbol"),
        ([-1, 1, -1, 2], r"contexts\[2\] is -1, right of a symbol"),
        (np.array([2**64 - 1], np.uint64), r"contexts\[0\] is 18446744073709551615, outside"),
        ([3, 0, 0, 0, 0], r"contexts\[0\] is 3, outside"),  # checked though out of reach
        ([0.0, 1.0], "dtype float64"),
        ([float("nan")], "dtype float64"),
        ([True], "dtype bool"),
        (1, "scalar"),
    ],
)
def test_hostile_contexts_raise(contexts, message):
    with pytest.raises(TextError, match=message):
        fit_ngram("abcabc", 3).rows(contexts)


def test_row_takes_one_context():
    for contexts in ([[0]], 0):
        with pytest.raises(TextError, match="context has shape"):
            fit_ngram("abc", 2).row(contexts)


def test_texts_and_orders_that_no_model_can_be_counted_from_raise():
    with pytest.raises(TextError, match="not in the alphabet"):
        fit_ngram("abz", 2, "ab")
    with pytest.raises(TextError, match="order is -1"):
        fit_ngram("abc", -1)
    with pytest.raises(TextError, match="0 characters; order 0 needs 1"):
        fit_ngram("", 0)
    with pytest.raises(TextError, match="2 characters; order 3 needs 3"):
        fit_ngram("ab", 3)
    for order in (3, -1):
        with pytest.raises(TextError, match=f"order {order} is not in 0 .. 2"):
            fit_ngram("abab", 2).truncated(order)


def test_held_out_bits_fall_with_the_order():
    target, _ = bundled_ngrams()
    sample = encode(split_text(bundled_text(), held_out=True)[:20_000], target.alphabet)
    contexts = np.lib.stride_tricks.sliding_window_view(np.pad(sample, (4, 0))[:-1], 4)
    bits = []
    for order in range(6):
        rows = np.asarray(target.truncated(order).rows(contexts), np.float64)
        bits.append(-np.log2(rows[np.arange(len(sample)), sample]).mean())
    assert bits[0] == pytest.approx(np.log2(73))
    assert all(lower > higher + 0.1 for lower, higher in itertools.pairwise(bits))
    assert bits[5] < 2.0
