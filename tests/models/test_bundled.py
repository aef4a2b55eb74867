"""The bundled text, n-gram models and pair of networks: size, source and quality."""

import hashlib
import importlib.resources
import json
import sys

import jax
import numpy as np
import pytest

from jaxspec.models import (
    CharacterTokenizer,
    bundled_ngrams,
    bundled_pair,
    bundled_text,
    split_text,
)
from jaxspec.models.load.huggingface import load_huggingface
from jaxspec.models.network import Tokenizer, assert_same_tokens
from jaxspec.models.text import TextError, encode
from training.measure import agreement, alpha, bits, ngram_rows, text_rows

PACKED = importlib.resources.files("jaxspec.models") / "data"
DATA = PACKED / "pair"
VERSE = "In the beginning God created the heaven and the earth.\nAnd the earth"


@pytest.fixture(scope="module")
def text():
    """Tokens of the first half of a held-out block."""
    return encode(split_text(bundled_text(), held_out=True)[:4097], bundled_ngrams()[0].alphabet)


@pytest.fixture(scope="module")
def rows(text):
    """The rows of target and draft for it."""
    return tuple(text_rows(model, text, 256) for model in bundled_pair())


def test_the_pair_weighs_less_than_4_500_000_bytes():
    files = [
        DATA / which / name
        for which in ("target", "draft")
        for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    ]
    assert sum(len(file.read_bytes()) for file in files) < 4_500_000


def test_target_and_draft_have_the_characters_of_the_bundled_text():
    target, draft = bundled_pair()
    assert bundled_pair()[0] is target
    assert_same_tokens(target, draft)
    for model in (target, draft):
        assert "".join(model.tokenizer.pieces) == bundled_ngrams()[0].alphabet
        assert model.vocab == 73
        assert model.max_context == 256


def test_the_target_knows_its_text_better_than_a_6_gram(rows, text):
    assert bits(rows[0], text) < bits(ngram_rows(bundled_ngrams(6, 6)[0], text), text) - 0.15


def test_the_target_keeps_six_of_seven_tokens_of_the_draft(rows):
    assert alpha(*rows) > 6 / 7
    assert agreement(*rows) > 0.84


def test_the_pair_needs_no_library_and_is_what_the_libraries_read(monkeypatch):
    for name in ("safetensors", "tokenizers"):
        pytest.importorskip(name, reason="the extra models is not installed")
    read = [load_huggingface(str(DATA / which)) for which in ("target", "draft")]
    for name in ("safetensors", "tokenizers", "optax"):
        monkeypatch.setitem(sys.modules, name, None)
    for ours, theirs in zip(bundled_pair.__wrapped__(), read, strict=True):
        assert jax.tree.all(
            jax.tree.map(lambda a, b: bool((a == b).all()), ours.params, theirs.params)
        )
        assert_same_tokens(ours, theirs)


def test_characters_are_tokens():
    tokenizer: Tokenizer = bundled_pair()[0].tokenizer
    assert tokenizer.decode(tokenizer.encode(VERSE)) == VERSE
    assert tokenizer.encode("") == []
    assert tokenizer.decode([]) == ""
    with pytest.raises(TextError, match="'é'"):
        tokenizer.encode("Noé")


@pytest.mark.parametrize("which", ["target", "draft"])
def test_the_tokenizer_file_gives_the_same_ids(which):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra models is not installed")
    read = tokenizers.Tokenizer.from_str((DATA / which / "tokenizer.json").read_text())
    ours = CharacterTokenizer(bundled_ngrams()[0].alphabet)
    assert read.encode(VERSE).ids == ours.encode(VERSE)
    assert read.decode(read.encode(VERSE).ids) == VERSE


def test_the_card_has_the_figures_of_these_weights(rows, text):
    card = (DATA / "README.md").read_text(encoding="utf-8")
    figures = json.loads(card.split("```json")[1].split("```")[0])
    # Of all of the held-out text; here, a fiftieth of it.
    for row, which in zip(rows, ("target", "draft"), strict=True):
        assert bits(row, text) == pytest.approx(figures["bits"][which], abs=0.15)
    assert alpha(*rows) == pytest.approx(figures["alpha"]["draft"], abs=0.03)
    assert figures["bits"]["target"] < min(figures["bits"][f"{n}-gram"] for n in (3, 4, 5, 6))


def test_the_n_gram_models_share_their_tables(held_out):
    target, draft = bundled_ngrams()
    assert (target.order, draft.order) == (5, 3)
    assert target.alphabet == draft.alphabet == "".join(sorted(set(bundled_text())))
    assert draft.tables[2] is target.tables[2] is bundled_ngrams()[0].tables[2]
    with pytest.raises(ValueError, match="read-only"):
        target.tables[0].counts[0] = 0
    after = target.row(encode("unto the LOR", target.alphabet))
    assert target.alphabet[int(after.argmax())] == "D"
    # The acceptances that the docstring of bundled_ngrams gives.
    for order, kept in ((2, 0.45), (3, 0.64), (4, 0.82)):
        p, q = target.rows(held_out), target.truncated(order).rows(held_out)
        assert float(np.minimum(p, q).sum(axis=-1).mean()) == pytest.approx(kept, abs=0.01)
    assert bundled_ngrams(3, 5)[1].order == 5
    with pytest.raises(TextError, match="order -1"):
        bundled_ngrams(5, -1)


def test_the_bundled_text():
    text = bundled_text()
    assert len((PACKED / "kjv.txt.xz").read_bytes()) < 1_000_000
    assert len(text) == 4_153_207
    assert text.isascii()
    assert len(set(text)) == 73
    assert sum(line[-1:].isdigit() for line in text.splitlines()) == 1189  # chapter headings
    checksum = hashlib.sha256(text.encode()).hexdigest()
    assert checksum in (PACKED / "README.md").read_text(encoding="utf-8")
