"""What comes with the package: the text as it was packed, the pair of models counted from it."""

import hashlib
import importlib.resources

import numpy as np
import pytest

from jaxspec.models import TextError, bundled_ngrams, bundled_text, encode

DATA = importlib.resources.files("jaxspec.models") / "data"


def test_the_pair_is_real_and_shared(held_out):
    target, draft = bundled_ngrams()
    assert (target.order, draft.order) == (5, 3)
    assert target.alphabet == draft.alphabet == "".join(sorted(set(bundled_text())))
    assert draft.tables[2] is target.tables[2] is bundled_ngrams()[0].tables[2]
    with pytest.raises(ValueError, match="read-only"):
        target.tables[0].counts[0] = 0
    after = target.row(encode("unto the LOR", target.alphabet))
    assert target.alphabet[int(after.argmax())] == "D"
    # The acceptances that the docstring of bundled_ngrams gives.
    for order, alpha in ((2, 0.45), (3, 0.64), (4, 0.82)):
        p, q = target.rows(held_out), target.truncated(order).rows(held_out)
        assert float(np.minimum(p, q).sum(axis=-1).mean()) == pytest.approx(alpha, abs=0.01)
    assert bundled_ngrams(3, 5)[1].order == 5
    with pytest.raises(TextError, match="order -1"):
        bundled_ngrams(5, -1)


def test_the_shipped_text():
    text = bundled_text()
    assert len((DATA / "kjv.txt.xz").read_bytes()) < 1_000_000
    assert len(text) == 4_153_207
    assert text.isascii()
    assert len(set(text)) == 73
    assert sum(line[-1:].isdigit() for line in text.splitlines()) == 1189  # chapter headings
    checksum = hashlib.sha256(text.encode()).hexdigest()
    assert checksum in (DATA / "README.md").read_text(encoding="utf-8")
