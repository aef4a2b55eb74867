"""Text to token ids and back, and the held-out part."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models import bundled_ngrams, bundled_text, split_text
from jaxspec.models.text import TextError, decode, encode


def test_encode_and_decode_round_trip():
    text = bundled_text()[:5000]
    alphabet = bundled_ngrams()[0].alphabet
    tokens = encode(text, alphabet)
    assert tokens.dtype == np.int32
    assert decode(tokens, alphabet) == text
    assert decode(jnp.asarray(tokens[:9]), alphabet) == text[:9]
    assert decode(encode("", "a"), "a") == ""
    assert decode(encode("é🜁a", "aé🜁"), "aé🜁") == "é🜁a"


def test_text_outside_the_alphabet_and_bad_alphabets_raise():
    with pytest.raises(TextError, match=r"text\[2\] is 'z', not in the alphabet 'ab'"):
        encode("abz", "ab")
    with pytest.raises(TextError, match=r"text\[0\] is '\\ud800'"):
        encode("\ud800", "ab")
    for alphabet in ("ba", "aab", ""):
        with pytest.raises(TextError, match="alphabet"):
            encode("a", alphabet)


def test_ids_that_are_no_text_raise():
    with pytest.raises(TextError, match=r"tokens\[1\] is -1, outside \[0, 2\)"):
        decode([0, -1], "ab")
    with pytest.raises(TextError, match="shape"):
        decode([[0]], "ab")


def test_split_text_parts_the_blocks():
    text = bundled_text()
    train, held = split_text(text), split_text(text, held_out=True)
    assert len(train) + len(held) == len(text)
    assert train.startswith(text[: 19 * 8192])
    assert held.startswith(text[19 * 8192 : 20 * 8192] + text[39 * 8192 : 40 * 8192])
    assert train[19 * 8192 :].startswith(text[20 * 8192 : 39 * 8192])
    assert (split_text("short"), split_text("short", held_out=True)) == ("short", "")
