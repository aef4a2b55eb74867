"""Tokenizers of the `tokenizers` library: none drops a character silently or depends on chance."""

import pytest

from jaxspec.models import CheckpointError, TextTokenizer
from jaxspec.models.load.tokenizers import byte_level_tokenizer

library = pytest.importorskip("tokenizers")

ENTRIES = {"a": 0, "b": 1, "ab": 2, "é": 3}
BYTES = {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
END = "<end>"  # none of its characters has a token


def pairs(vocab=ENTRIES, merges=(("a", "b"),), **options):
    return library.Tokenizer(library.models.BPE(dict(vocab), list(merges), **options))


def with_(tokenizer, **parts):
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_end(tokenizer, **options):
    tokenizer.add_special_tokens([library.AddedToken(END, special=True, **options)])
    return tokenizer


def byte_level(entries, merges=()):
    return byte_level_tokenizer("here", entries, merges)


def without(vocab, entry):
    return {name: token for name, token in vocab.items() if name != entry}


def test_characters_without_a_token_are_an_error_that_shows_them():
    for make, text, lost in (
        (pairs, "abzab", ["z"]),
        (pairs, "zéy" * 9, ["z", "y"]),
        (pairs, "ab\ud800", ["\ud800"]),
        (lambda: pairs(without(BYTES, "<0xA7>"), [], byte_fallback=True), "éaç", ["ç"]),
        (lambda: byte_level(["a", "b"]), "ab\x04", ["\x04"]),
        (lambda: byte_level(["a", "Ã", "©"]), "aéañ", ["ñ"]),  # Ã and a byte without a token
        (lambda: with_end(pairs()), f"ab{END}az", ["<", "e", "n", "d", ">", "z"]),
        (
            lambda: with_(pairs({"e": 0, "\u0301": 1}, []), normalizer=library.normalizers.NFC()),
            "ee\u0301",  # each has a token, composed they have none
            [],
        ),
        (lambda: library.Tokenizer(library.models.WordLevel({"a": 0}, "[UNK]")), "b", ["b"]),
        (lambda: library.Tokenizer(library.models.Unigram([("a", -1.0)])), "aab", ["b"]),
    ):
        tokenizer = TextTokenizer(make())
        for _ in range(2):  # the library remembers words
            with pytest.raises(ValueError, match="characters that the tokenizer has no") as error:
                tokenizer.encode(text)
            assert all(repr(letter) in str(error.value) for letter in lost)


def test_text_that_a_tokenizer_changes_on_purpose_is_encoded_as_the_library_does():
    for make, text, tokens in (
        (lambda: pairs(unk_token="é"), "abzb", [2, 3, 1]),
        (lambda: pairs(ENTRIES | BYTES, byte_fallback=True), "abç", [2, 4 + 0xC3, 4 + 0xA7]),
        (lambda: with_(pairs(), normalizer=library.normalizers.NFKC()), "\uff41be\u0301", [2, 3]),
        (lambda: with_(pairs(), normalizer=library.normalizers.Strip()), " ab ", [2]),
        (
            lambda: with_(pairs(), pre_tokenizer=library.pre_tokenizers.Whitespace()),
            "a  b\n",
            [0, 1],
        ),
        (lambda: with_end(pairs()), f"a{END}b", [0, 4, 1]),
        (lambda: pairs({"a": 0, "##b": 1}, [], continuing_subword_prefix="##"), "ab", [0, 1]),
        (lambda: pairs({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>"), "ab", [0, 1]),
        (lambda: pairs({"abc": 0}, [], ignore_merges=True), "abc", [0]),
        (pairs, "", []),
    ):
        assert make().encode(text).ids == tokens
        assert TextTokenizer(make()).encode(text) == tokens


def test_what_is_no_text_is_an_error_of_its_type():
    for text in (5, ["ab"], None):
        with pytest.raises(TypeError, match="str"):
            TextTokenizer(pairs()).encode(text)


def test_a_token_that_its_network_has_no_id_for_is_an_error_only_in_a_text_with_it():
    tokenizer = TextTokenizer(pairs(), vocab=3)
    assert tokenizer.pieces == ("a", "b", "ab")
    assert tokenizer.encode("aab") == [0, 2]
    with pytest.raises(ValueError, match=r"contains 'é', token 3, but .* vocabulary of 3"):
        tokenizer.encode("aé")
    with pytest.raises(ValueError, match="token 0 is 3, must be from 0 to 2"):
        tokenizer.decode([3])
    for options in ({"stop_tokens": [3]}, {"start_tokens": [0, -1]}):
        with pytest.raises(ValueError, match=r"st\w+ token [01] is (3|-1), must be from 0 to 2"):
            TextTokenizer(pairs(), vocab=3, **options)


def test_an_id_without_a_token_is_no_text_and_one_beyond_the_vocabulary_is_rejected():
    tokenizer = TextTokenizer(pairs({"a": 0, "b": 2}, []), vocab=4)
    assert tokenizer.pieces == ("a", "", "b")
    assert tokenizer.decode([0, 1, 2, 3]) == tokenizer.decode([0, 2])
    for token in (-1, 4):
        with pytest.raises(ValueError, match=f"token 1 is {token}, must be from 0 to 3"):
            tokenizer.decode([0, token])


def framed(before="", after=""):
    """Pairs with two special tokens, which the file puts around a text."""
    tokenizer = pairs()
    tokenizer.add_special_tokens([library.AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=[("<s>", 4), ("</s>", 5)]
    )
    return tokenizer


def test_a_start_token_is_put_before_a_text_once_and_only_if_asked_for():
    for tokenizer in (
        TextTokenizer(framed("<s>")),
        TextTokenizer(framed(), start_tokens=(4,)),
        TextTokenizer(framed("<s>"), start_tokens=(4,)),
    ):
        assert tokenizer.encode("ab") == [4, 2]
        assert tokenizer.encode("<s>ab") == [4, 2]
        assert tokenizer.encode("<s><s>ab") == [4, 4, 2]  # as it is written
        assert tokenizer.encode("ab<s>ab") == [4, 2, 4, 2]
        assert tokenizer.encode("") == [4]
        assert tokenizer.encode("ab", add_special_tokens=False) == [2]
        assert tokenizer.encode("<s>ab", add_special_tokens=False) == [4, 2]


def test_what_a_file_puts_after_a_text_stays_there():
    tokenizer = TextTokenizer(framed("<s>", "</s>"), start_tokens=(4,))
    assert tokenizer.encode("ab") == tokenizer.encode("<s>ab") == [4, 2, 5]
    assert TextTokenizer(framed("", "</s>"), start_tokens=(4,)).encode("ab") == [4, 2, 5]


def test_the_given_tokenizer_is_not_changed_and_the_copy_cuts_and_drops_nothing():
    given = with_end(pairs(dropout=0.9))
    given.enable_truncation(2)
    given.enable_padding(length=50)
    before = given.to_str()
    copy = TextTokenizer(given)
    assert {tuple(copy.encode(f"ababab{END}")) for _ in range(30)} == {(2, 2, 2, 4)}
    with pytest.raises(ValueError, match="no token for"):
        copy.encode("z")
    assert given.to_str() == before
    given.add_tokens(["later"])
    assert "later" not in copy.pieces


def test_unigrams_are_not_sampled():
    options = {"alpha": 0.2, "nbest_size": 4}
    model = library.models.Unigram([("a", -1.0), ("aa", -1.1), ("?", -9.0)], 2, False, **options)
    tokenizer = TextTokenizer(library.Tokenizer(model))
    assert {tuple(tokenizer.encode("aaaa")) for _ in range(30)} == {(1, 1)}


class InPython:
    def pre_tokenize(self, text):
        del text


def test_what_cannot_be_copied_is_rejected_with_what_to_give():
    in_python = library.pre_tokenizers.PreTokenizer.custom(InPython())
    for given in ("tokenizer.json", None, with_(pairs(), pre_tokenizer=in_python)):
        with pytest.raises(ValueError, match=r"must be a tokenizers\.Tokenizer without"):
            TextTokenizer(given)


def test_entries_that_the_library_cannot_take_are_rejected():
    with pytest.raises(CheckpointError, match=r"here: not a pair encoding: ."):
        byte_level(["a", "\ud800"])
