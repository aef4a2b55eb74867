"""Character n-gram models: real, context-dependent rows counted from a text, without a download.

A model is a tree of contexts, one flat table per context length. A context is found by its code
`parent * V + older`: the row, in the table before, of the context without its oldest symbol, and
that symbol. So one walk back from the latest symbol meets every context that a row mixes, codes fit
an int64 at any order, and a model of a lower order is the same tables without the last ones.

All of it runs on the host in numpy; rows are returned as jnp arrays. In the shape descriptions V
denotes the size of the alphabet, L the length of a context.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxspec.models.provider import Answer, Provider, Query
from jaxspec.models.text import TextError, assert_none, encode, token_ids


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ContextTable:
    """What followed each context of one length: C contexts, E pairs (context, next symbol)."""

    codes: npt.NDArray[np.int64]  # [C], increasing: parent * V + older; 0 for the empty context
    starts: npt.NDArray[np.int64]  # [C + 1]: the pairs of c are starts[c] to starts[c + 1]
    symbols: npt.NDArray[np.int32]  # [E]: next symbols, increasing within a context
    counts: npt.NDArray[np.int32]  # [E]: how often each pair was seen, at least 1


# Witten-Bell and not interpolated Kneser-Ney: on the bundled text they are equal up to order 4
# (held out, order 5: 1.70 and 1.68 bits), and only with it are the rows of a truncated model, and of
# a short context, those of the model of that order, with one set of counts for all orders.
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NGram:
    """An interpolated n-gram model of characters, made by `fit_ngram`.

    With n(c, x) how often the symbol x followed the context c, n(c) the sum over x, T(c) how many
    different x followed c, and c' the context c without its oldest symbol, the row is

        P(x | c) = (n(c, x) + T(c) P(x | c')) / (n(c) + T(c)),    P(x | c') where c was never seen,

    down to 1 / V below the empty context. So every entry is positive and every row sums to 1.
    (As float32, an entry below 1e-38 may be 0: on the bundled text only above order 9.)

    Attributes:
      alphabet: the V symbols, sorted; a token id is an index in it.
      tables: one `ContextTable` per context length 0 .. order - 1.

    References:
      Timothy C. Bell, John G. Cleary, Ian H. Witten, "Text Compression", Prentice Hall, 1990.
      Ian H. Witten, Timothy C. Bell, "The zero-frequency problem: estimating the probabilities of
      novel events in adaptive text compression", IEEE Trans. Information Theory, 1991, method C.
      Stanley F. Chen, Joshua Goodman, "An empirical study of smoothing techniques for language
      modeling", Computer Speech and Language, 1999, section 2.4 (the interpolation).
    """

    alphabet: str
    tables: tuple[ContextTable, ...]

    @property
    def order(self) -> int:
        """The length of the longest n-gram: a row depends on the last `order - 1` symbols."""
        return len(self.tables)

    @property
    def vocab(self) -> int:
        """V, the number of symbols."""
        return len(self.alphabet)

    def rows(self, contexts: npt.ArrayLike) -> jax.Array:
        """Return the next-symbol distribution after each context.

        Only the last `order - 1` ids of a context count. A context with fewer has the row of the
        model truncated to that many plus one. Host only: no tracers.

        Args:
          contexts: integers [..., L] in [0, V), any L; -1 on the left means "no symbol".

        Returns:
          float32 [..., V], strictly positive, each row summing to 1 within 1e-6.

        Raises:
          TextError: an id outside [-1, V), a -1 right of a symbol, not integers, or a scalar.

        >>> model = fit_ngram("abab", 2)
        >>> rows = model.rows([[0], [1], [-1]])  # after a, after b, after nothing
        >>> [[round(entry, 3) for entry in row] for row in rows.tolist()]
        [[0.167, 0.833], [0.75, 0.25], [0.5, 0.5]]
        """
        ids = token_ids(contexts, "contexts", -1, self.vocab)
        late = (ids < 0) & np.logical_or.accumulate(ids >= 0, axis=-1)
        assert_none(ids, late, "contexts", "right of a symbol; padding goes on the left")
        return jnp.asarray(self._rows(ids).astype(np.float32))

    def row(self, context: npt.ArrayLike) -> jax.Array:
        """Return the row of one context [L], float32 [V]; see `rows`.

        >>> fit_ngram("abab", 1).row([]).tolist()
        [0.5, 0.5]
        """
        if np.ndim(context) != 1:
            raise TextError(f"context has shape {np.shape(context)}, not [L]; rows takes more")
        return self.rows(context)

    def truncated(self, order: int) -> "NGram":
        """Return the model of a lower order, from 0 (uniform) on, which shares this one's tables.

        Its rows are those of `fit_ngram` at that order on the same text, bit for bit.

        Raises:
          TextError: an order that was not counted.
        """
        if not 0 <= order <= self.order:
            raise TextError(f"order {order} is not in 0 .. {self.order}; fit a model of that order")
        return dataclasses.replace(self, tables=self.tables[:order])

    def provider(self, name: str) -> Provider:
        """Return the model as a provider; all contexts of a call are looked up at once.

        >>> model = fit_ngram("abab", 2).provider("ab")
        >>> rows, usage = model.rows([(0, 1), (0,)])
        >>> usage
        Usage(queries=2, calls=1)
        """
        reach = max(self.order - 1, 1)

        def ask(queries: list[Query]) -> list[Answer]:
            contexts = np.full((len(queries), reach), -1, np.int64)
            for place, query in enumerate(queries):
                tail = query.context[-reach:]
                contexts[place, reach - len(tail) :] = tail
            rows = np.asarray(self.rows(contexts))
            return [Answer(query.id, row) for query, row in zip(queries, rows, strict=True)]

        return Provider(name=name, vocab=self.vocab, ask=ask, is_batched=True)

    def _rows(self, contexts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the rows [..., V] of checked contexts [..., L]."""
        *batch, length = contexts.shape
        flat, size = contexts.reshape(math.prod(batch), length), self.vocab
        rows = np.full((len(flat), size), 1 / size)
        alive = np.arange(len(flat))  # the contexts still found in the tree,
        place = np.zeros_like(alive)  # and their places in the current table
        for depth, table in enumerate(self.tables[: length + 1]):
            if depth:
                older = flat[alive, -depth]
                code = place * size + older
                place = np.searchsorted(table.codes, code)
                found = (older >= 0) & (table.codes.take(place, mode="clip") == code)
                alive, place = alive[found], place[found]
            if not alive.size:
                break
            first, kinds = table.starts[place], table.starts[place + 1] - table.starts[place]
            pairs = np.repeat(first - np.cumsum(kinds) + kinds, kinds) + np.arange(kinds.sum())
            counts = np.zeros((alive.size, size))
            counts[np.repeat(np.arange(alive.size), kinds), table.symbols[pairs]] = table.counts[
                pairs
            ]
            kinds = kinds[:, None]
            rows[alive] = (counts + kinds * rows[alive]) / (counts.sum(1, keepdims=True) + kinds)
        return rows.reshape(*batch, size)


def fit_ngram(text: str, order: int, alphabet: str | None = None) -> NGram:
    """Count the n-grams of a text up to an order.

    Every position counts once at each context length that fits before it. A target and a draft must
    share one alphabet: fit both with the same, or use `NGram.truncated`.

    Args:
      text: at least `order` characters, and at least one.
      order: length of the longest n-gram, at least 0; 0 is the uniform model.
      alphabet: sorted distinct symbols; those of the text unless given.

    Raises:
      TextError: a text too short, a symbol outside the alphabet, or an invalid alphabet or order.

    >>> model = fit_ngram("abracadabra", 3)
    >>> model.alphabet, [len(table.codes) for table in model.tables]
    ('abcdr', [1, 5, 7])
    """
    if order < 0:
        raise TextError(f"order is {order}; it must be at least 0")
    if len(text) < max(order, 1):
        raise TextError(f"text has {len(text)} characters; order {order} needs {max(order, 1)}")
    alphabet = "".join(sorted(set(text))) if alphabet is None else alphabet
    tokens, size = encode(text, alphabet).astype(np.int64), len(alphabet)
    grams, weights = _distinct_grams(tokens, order, size)
    place = np.zeros(len(grams), np.int64)
    codes = np.zeros(1, np.int64)
    tables = []
    for depth in range(order):
        if depth:
            whole = grams[:, depth - 1] >= 0  # the first symbols have no context of this length
            grams, weights, place = grams[whole], weights[whole], place[whole]
            codes, place = np.unique(place * size + grams[:, depth - 1], return_inverse=True)
        pairs, inverse = np.unique(place * size + grams[:, -1], return_inverse=True)
        table = ContextTable(
            codes=codes,
            starts=np.searchsorted(pairs, np.arange(len(codes) + 1) * size),
            symbols=(pairs % size).astype(np.int32),
            counts=np.bincount(inverse, weights).astype(np.int32),
        )
        for array in vars(table).values():
            array.flags.writeable = False  # models share their tables
        tables.append(table)
    return NGram(alphabet=alphabet, tables=tuple(tables))


def _distinct_grams(
    tokens: npt.NDArray[np.int64], order: int, size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the distinct n-grams [G, order] and how often each occurs, [G].

    Columns: the symbols before the last, latest first, -1 before the text starts; then the last.
    """
    padded = np.concatenate([np.zeros(max(order - 1, 0), np.int64), tokens + 1])
    columns = [padded[len(padded) - len(tokens) - back :] for back in (*range(1, order), 0)]
    columns = [column[: len(tokens)] for column in columns]
    code, bound = np.zeros_like(tokens), 1
    for column in columns:
        if bound * (size + 1) > 2**63:  # would overflow: replace the codes by their ranks
            code = np.unique(code, return_inverse=True)[1]
            bound = int(code.max()) + 1
        code, bound = code * (size + 1) + column, bound * (size + 1)
    _, first, weights = np.unique(code, return_index=True, return_counts=True)
    return np.stack([column[first] for column in columns], axis=1) - 1, weights
