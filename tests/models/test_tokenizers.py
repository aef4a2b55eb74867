"""Tokenizers of the `tokenizers` library: none loses a character in silence or is read broken."""

import json
import re

import pytest

from jaxspec.models.load.tensors import CheckpointError
from jaxspec.models.load.tokenizers import TextTokenizer, byte_level_tokenizer, read_tokenizer

library = pytest.importorskip("tokenizers")

PIECES = {"a": 0, "b": 1, "ab": 2, "é": 3}
BYTES = {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
SPELT = "<end>"  # none of its characters has a token


def pairs(vocab=PIECES, merges=(("a", "b"),), **options):
    return library.Tokenizer(library.models.BPE(dict(vocab), list(merges), **options))


def with_(tokenizer, **parts):
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def with_spelt(tokenizer, **options):
    tokenizer.add_special_tokens([library.AddedToken(SPELT, special=True, **options)])
    return tokenizer


def byte_level(pieces):
    return byte_level_tokenizer(pieces, [])


def without(vocab, piece):
    return {name: token for name, token in vocab.items() if name != piece}


@pytest.mark.parametrize(
    ("tokenizer", "text", "at"),
    [
        (lambda: TextTokenizer(pairs()), "abzab", 2),
        (lambda: TextTokenizer(pairs()), "zzz", 0),
        (lambda: TextTokenizer(pairs()), "ab\ud800", 2),
        (lambda: TextTokenizer(pairs({**PIECES, "<no token>": 4})), "abz", 2),
        (lambda: TextTokenizer(pairs(without(BYTES, "<0xA7>"), [], byte_fallback=True)), "éaç", 2),
        (lambda: byte_level(["a", "b"]), "ab\x04", 2),
        (lambda: byte_level(["a", "Ã", "©"]), "aéañ", 3),  # ñ is Ã and a byte without a token
        (lambda: TextTokenizer(with_spelt(pairs())), f"ab{SPELT}az", 8),
        (lambda: TextTokenizer(with_spelt(pairs())), f"{SPELT}{SPELT[:-1]}", 5),
        (lambda: TextTokenizer(with_spelt(pairs(), single_word=True)), f"ab{SPELT}", 2),
        (
            lambda: TextTokenizer(
                with_(pairs({"e": 0, "\u0301": 1}, []), normalizer=library.normalizers.NFC())
            ),
            "ee\u0301",
            2,
        ),
        (
            lambda: TextTokenizer(library.Tokenizer(library.models.WordLevel({"a": 0}, "[UNK]"))),
            "b",
            0,
        ),
        (lambda: TextTokenizer(library.Tokenizer(library.models.Unigram([("a", -1.0)]))), "aab", 2),
    ],
    ids=[
        "pairs",
        "nothing known",
        "half of a pair of UTF-16",
        "a piece of the name that stands for none",
        "a byte short",
        "a byte-level vocabulary short of a byte",
        "half of a character",
        "after a token spelt out",
        "a token not spelt to its end",
        "a token spelt out where it does not count",
        "composed",
        "words",
        "unigrams",
    ],
)
def test_a_character_without_a_token_is_refused_with_its_place(tokenizer, text, at):
    wanted = f"text[{at}] is {text[at]!r}, which the tokenizer has no token for; replace it"
    tokenizer = tokenizer()
    for _ in range(2):  # the library remembers words
        with pytest.raises(ValueError, match=re.escape(wanted)):
            tokenizer.encode(text)
    assert tokenizer.encode(text[:at]) is not None


def test_what_is_refused_is_found_in_a_long_text():
    with pytest.raises(ValueError, match=r"text\[70001\] is 'z'"):
        TextTokenizer(with_spelt(pairs())).encode(f"{'ab' * 35_000}azab{SPELT}z")


@pytest.mark.parametrize(
    ("tokenizer", "text", "tokens"),
    [
        (lambda: pairs(unk_token="é"), "abzb", [2, 3, 1]),
        (lambda: pairs(PIECES | BYTES, byte_fallback=True), "abç", [2, 4 + 0xC3, 4 + 0xA7]),
        (lambda: with_(pairs(), normalizer=library.normalizers.Lowercase()), "ABÉ", [2, 3]),
        (lambda: with_(pairs(), normalizer=library.normalizers.NFKC()), "\uff41be\u0301", [2, 3]),
        (lambda: with_(pairs(), normalizer=library.normalizers.Strip()), " ab ", [2]),
        (
            lambda: with_(pairs(), pre_tokenizer=library.pre_tokenizers.Whitespace()),
            "a  b\n",
            [0, 1],
        ),
        (lambda: with_spelt(pairs()), f"a{SPELT}b", [0, 4, 1]),
        (lambda: pairs({"a": 0, "##b": 1}, [], continuing_subword_prefix="##"), "ab", [0, 1]),
        (lambda: pairs({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>"), "ab", [0, 1]),
        (lambda: pairs({"abc": 0}, [], ignore_merges=True), "abc", [0]),
        (pairs, "", []),
    ],
    ids=[
        "a token for unknown ones",
        "bytes",
        "lowercase",
        "compatible forms",
        "stripped",
        "spaces between words",
        "a token spelt out",
        "prefix",
        "suffix",
        "whole words",
        "no text",
    ],
)
def test_text_that_a_tokenizer_changes_on_purpose_is_encoded_as_the_library_does(
    tokenizer, text, tokens
):
    assert tokenizer().encode(text).ids == tokens  # another one: it is taken over
    assert TextTokenizer(tokenizer()).encode(text) == tokens


@pytest.mark.parametrize("text", [5, ["ab"], b"ab", None], ids=repr)
def test_what_is_no_text_is_an_error_of_its_type(text):
    with pytest.raises(TypeError, match="str"):
        TextTokenizer(pairs()).encode(text)


def write(path, **changes):
    """Write a file; changes are of its model, `...` takes a field out."""
    tokenizer = json.loads(pairs().to_str())
    tokenizer["model"] = {
        name: value for name, value in (tokenizer["model"] | changes).items() if value is not ...
    }
    path.write_text(json.dumps(tokenizer))
    return path


def test_a_file_gives_its_tokens_and_refuses_a_character_that_it_has_none_for(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path / "tokenizer.json"), [3])
    assert tokenizer.encode("ababé") == [2, 2, 3]
    assert tokenizer.stop_tokens == frozenset({3})
    assert tokenizer.pieces == ("a", "b", "ab", "é")
    with pytest.raises(ValueError, match=r"text\[1\] is 'z'"):
        tokenizer.encode("az")


@pytest.mark.parametrize(
    "changes",
    [
        {"merges": ...},
        {"merges": None},
        {"merges": ["a"]},
        {"merges": [["a", "b", "é"]]},
        {"merges": [["a", "z"]]},
        {"merges": [["b", "a"]]},
        {"vocab": ...},
        {"vocab": {"a": -1}},
        # The library panics over this one: the second of the pair is shorter than the prefix.
        {"merges": [["a", "b"]], "continuing_subword_prefix": "##"},
    ],
    ids=[
        "no merges",
        "null",
        "one part",
        "three parts",
        "unknown part",
        "unknown whole",
        "no vocabulary",
        "an id below 0",
        "a panic",
    ],
)
def test_merges_and_vocabularies_that_make_no_tokenizer_are_refused_with_the_file(
    tmp_path, changes
):
    path = write(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(CheckpointError, match=rf"{re.escape(str(path))}: not a tokenizer: ."):
        read_tokenizer(path)


def test_what_is_no_fault_of_a_file_is_not_taken_for_one(tmp_path, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        library, "Tokenizer", type("Tokenizer", (), {"from_file": staticmethod(interrupted)})
    )
    with pytest.raises(KeyboardInterrupt):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_file_that_gives_an_id_twice_is_refused(tmp_path):
    path = write(tmp_path / "tokenizer.json", vocab={"a": 0, "b": 0}, merges=[])
    with pytest.raises(CheckpointError, match=r"json: tokens 'a' and 'b' share id 0"):
        read_tokenizer(path)


def test_a_token_that_its_network_has_no_id_for_is_an_error_only_in_a_text_with_it(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path / "tokenizer.json"), vocab=3)
    assert tokenizer.pieces == ("a", "b", "ab")
    assert tokenizer.encode("aab") == [0, 2]
    with pytest.raises(ValueError, match=r"contains 'é', token 3, but .* vocabulary of 3"):
        tokenizer.encode("aé")
    with pytest.raises(ValueError, match="token 0 is 3, must be from 0 to 2"):
        tokenizer.decode([3])
    for options in ({"stop_tokens": [3]}, {"start_tokens": [0, -1]}):
        with pytest.raises(ValueError, match=r"st\w+ token [01] is (3|-1), must be from 0 to 2"):
            read_tokenizer(tmp_path / "tokenizer.json", vocab=3, **options)


def framed(before="", after=""):
    """Pairs with two special tokens, which the file puts around a text."""
    tokenizer = pairs()
    tokenizer.add_special_tokens([library.AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{before} $A {after}".strip(), special_tokens=[("<s>", 4), ("</s>", 5)]
    )
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: TextTokenizer(framed("<s>")),
        lambda: TextTokenizer(framed(), start_tokens=(4,)),
        lambda: TextTokenizer(framed("<s>"), start_tokens=(4,)),
    ],
    ids=["of the file", "given", "both"],
)
def test_a_start_token_is_put_before_a_text_once_and_only_if_asked_for(make):
    tokenizer = make()
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


def test_the_tokenizer_handed_over_stays_as_it_is_and_the_copy_loses_nothing():
    handed = with_spelt(pairs(dropout=0.9))
    handed.enable_truncation(2)
    handed.enable_padding(length=50)
    handed.encode_special_tokens = True
    before = handed.to_str()
    taken = TextTokenizer(handed)
    assert {tuple(taken.encode(f"ababab{SPELT}")) for _ in range(30)} == {(2, 2, 2, 4)}
    with pytest.raises(ValueError, match="no token for"):
        taken.encode("z")
    assert handed.to_str() == before
    assert handed.encode_special_tokens
    handed.add_tokens(["later"])
    assert "later" not in taken.pieces


def test_unigrams_drawn_at_random_are_not_so_in_the_copy():
    options = {"alpha": 0.2, "nbest_size": 4}
    model = library.models.Unigram([("a", -1.0), ("aa", -1.1), ("?", -9.0)], 2, False, **options)
    tokenizer = TextTokenizer(library.Tokenizer(model))
    assert {tuple(tokenizer.encode("aaaa")) for _ in range(30)} == {(1, 1)}


class InPython:
    def pre_tokenize(self, text):
        del text


@pytest.mark.parametrize(
    "given",
    [
        "tokenizer.json",
        None,
        with_(pairs(), pre_tokenizer=library.pre_tokenizers.PreTokenizer.custom(InPython())),
    ],
    ids=["a path", "none", "a part in Python"],
)
def test_what_cannot_be_copied_is_refused_with_what_to_give(given):
    with pytest.raises(
        ValueError, match=r"tokenizer is .*: must be a tokenizers\.Tokenizer without"
    ):
        TextTokenizer(given)


def test_an_id_that_stands_for_no_token_is_no_text_and_one_beyond_them_is_refused():
    tokenizer = TextTokenizer(pairs({"a": 0, "b": 2}, []), vocab=4)
    assert tokenizer.pieces == ("a", "", "b")
    assert tokenizer.decode([0, 1, 2, 3]) == TextTokenizer(pairs({"a": 0, "b": 2}, [])).decode(
        [0, 2]
    )
    for token in (-1, 4):
        with pytest.raises(ValueError, match=f"token 1 is {token}, must be from 0 to 3"):
            tokenizer.decode([0, token])


@pytest.mark.parametrize(
    ("merge", "shown"),
    [
        (("a",), "'a'"),
        (("a", "b", "b"), "'a b b'"),
        (("",), "''"),
        (("a", "z"), "'a z'"),
        (("b", "a"), "'b a'"),
    ],
    ids=["one part", "three parts", "empty", "unknown part", "unknown whole"],
)
def test_a_merge_that_is_not_of_two_pieces_that_make_a_third_is_named(merge, shown):
    wanted = f"merge 1 is {shown}, not two pieces that make a third"
    with pytest.raises(CheckpointError, match=wanted):
        byte_level_tokenizer(["a", "b", "ab"], [("a", "b"), merge])


def test_pieces_that_the_library_cannot_take_are_refused():
    with pytest.raises(CheckpointError, match=r"not a pair encoding: ."):
        byte_level_tokenizer(["a", "\ud800"], [])


def test_a_piece_beyond_the_ids_of_the_network_is_an_error_in_a_text_alone():
    tokenizer = byte_level_tokenizer(["a", "b"], [], vocab=1)
    assert tokenizer.encode("aa") == [0, 0]
    with pytest.raises(ValueError, match="'b', token 1, but the network has a vocabulary of 1"):
        tokenizer.encode("ab")
