"""Streamed text: pieces join to what decoding at once gives, at the cost of a few tokens each."""

import numpy as np
import pytest

from jaxspec.models import CharacterTokenizer, Detokenizer
from jaxspec.models.load.tokenizers import TextTokenizer, byte_level_tokenizer

library = pytest.importorskip("tokenizers")

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "▁cat", "s", ".", "▁,", "é", "日本", "<s>", "\n"]


class Plain:
    """A tokenizer with the three members of the protocol and nothing more."""

    def __init__(self, pieces, decode):
        self.pieces, self._decode = pieces, decode

    def encode(self, text):
        return [self.pieces.index(character) for character in text]

    def decode(self, tokens):
        return self._decode([self.pieces[token] for token in tokens])


class Unable(Plain):
    def encode(self, text):
        raise KeyError(text)


def from_library(model, decoder):
    tokenizer = library.Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    return TextTokenizer(tokenizer)


def numbered(pieces):
    return {piece: token for token, piece in enumerate(pieces)}


def byte_level():
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    of_text = library.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    wholes = ["".join(part for part, _ in of_text(text)) for text in ("é", "日", "🙂", " a")]
    parts = sorted({whole[a:b] for whole in wholes for a in range(4) for b in range(a + 2, 5)})
    pieces = [*alphabet, *(part for part in parts if len(part) > 1), "<|end|>"]
    entries = list(dict.fromkeys(pieces))
    return TextTokenizer(byte_level_tokenizer("here", entries, [], special=["<|end|>"]))


def llama_like():
    decoders = library.decoders
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    model = library.models.BPE(numbered([*WORDS, *BYTES]), [], byte_fallback=True)
    return from_library(model, decoders.Sequence(steps))


def unigram():
    decoders = library.decoders
    pieces = [(piece, -1.0) for piece in ["<unk>", *WORDS, *BYTES]]
    model = library.models.Unigram(pieces, 0, byte_fallback=True)
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    return from_library(model, decoders.Sequence(steps))


def words(decoder, pieces=("a", "##b", "##c", ".", ",", "'", "n't", "do", "ab</w>", "<pad>")):
    return from_library(library.models.WordLevel(numbered(pieces), "a"), decoder)


def cleaned(pieces):
    """As `transformers` does with clean_up_tokenization_spaces."""
    text = "".join(pieces)
    for mark in (".", "?", "!", ","):
        text = text.replace(" " + mark, mark)
    text = text.replace(" ' ", "'")
    for end in ("n't", "'m", "'s", "'ve", "'re"):
        text = text.replace(" " + end, end)
    return text


def without_special(pieces):
    return "".join(piece for piece in pieces if piece not in ("<s>", "</s>"))


def joined_bytes(pieces):
    return bytes(int(piece[3:5], 16) for piece in pieces).decode(errors="replace")


TOKENIZERS = {
    "bytes paired": byte_level,
    "SentencePiece as Llama has it": llama_like,
    "unigrams": unigram,
    "WordPiece": lambda: words(library.decoders.WordPiece(cleanup=False)),
    "WordPiece, cleaned up": lambda: words(library.decoders.WordPiece(cleanup=True)),
    "ends of words": lambda: words(library.decoders.BPEDecoder()),
    "repeats taken out": lambda: words(library.decoders.CTC()),
    "no decoder": lambda: words(None),
    "characters": lambda: CharacterTokenizer(" abé\ufffd"),
    "spaces cleaned up": lambda: Plain([*" .,'natmsvre\n", " n", "'t", " '", "  "], cleaned),
    "spaces cleaned up, without encode": lambda: Unable(
        ["a ", "do", "n't", ".", "b", "'"], cleaned
    ),
    "special tokens left out": lambda: Plain(["a", " b", "<s>", "</s>", "é"], without_special),
    "bytes alone": lambda: Plain(BYTES, joined_bytes),
}


def pieces_of(tokenizer, prompt, tokens):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push([token]) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_pieces_of_random_tokens_join_to_what_decoding_at_once_gives(name):
    tokenizer = TOKENIZERS[name]()
    rng = np.random.default_rng(0)
    vocab, compared = len(tokenizer.pieces), 0
    # Few different tokens in a text make runs and whole characters likely.
    for trial in range(400):
        known = rng.choice(vocab, min(vocab, 2 + trial % 9), replace=False)
        lengths = rng.integers(0, [6, 40] if trial % 20 else [150, 300])
        prompt, new = (rng.choice(known, length).tolist() for length in lengths)
        head, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + new)
        pieces = pieces_of(tokenizer, prompt, new)
        if whole.startswith(head):  # else the text after the prompt is not defined
            assert "".join(pieces) == whole[len(head) :], (prompt, new)
            compared += 1
    assert compared > 200


@pytest.mark.parametrize("name", ["bytes paired", "SentencePiece as Llama has it", "unigrams"])
def test_real_text_joins_too_however_it_is_cut_into_prompt_and_pushes(name):
    tokenizer = TOKENIZERS[name]()
    text = "é日本 🙂 日 a é🙂🙂 n a. 日日" + "🙂" * 30 + " a 日 é"
    if name == "bytes paired":
        tokens = tokenizer.encode(text)
    else:
        tokens = tokenizer.encode(text.replace(" ", "▁"))
    for cut in range(len(tokens) + 1):
        head = tokenizer.decode(tokens[:cut])
        if not text.startswith(head):
            continue
        detokenizer = Detokenizer(tokenizer, tokens[:cut])
        parts = [tokens[at : at + 3] for at in range(cut, len(tokens), 3)]
        assert head + "".join(map(detokenizer.push, parts)) + detokenizer.flush() == text


def test_a_token_that_decoding_leaves_out_does_not_end_a_run_of_bytes():
    shown = llama_like()
    ids = numbered(shown.pieces)
    tokenizer = Plain(shown.pieces, lambda ps: shown.decode([ids[p] for p in ps if p != "<s>"]))
    piece = tokenizer.pieces.index
    prompt, new = [piece("▁the")], [piece(x) for x in ("<0x69>", "<s>", "<0xE4>", "<s>", "s")]
    whole = tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]
    assert whole == "\ufffd\ufffds"
    assert "".join(pieces_of(tokenizer, prompt, new)) == whole


def test_a_clean_up_in_several_steps_joins_too():
    tokenizer = TOKENIZERS["spaces cleaned up"]()
    for text in (
        "a n ' t.",
        "a   ' m a",
        "a  ' ve",
        "a n  't , n't",
        "a ' '  ' mm 'm",
        "a '  ' , 's",
    ):
        tokens = tokenizer.encode(text)
        assert "".join(pieces_of(tokenizer, [], tokens)) == tokenizer.decode(tokens)


def test_a_piece_is_there_as_soon_as_no_later_token_can_change_it():
    characters = TOKENIZERS["characters"]()
    assert pieces_of(characters, [], characters.encode("a bé a")) == [*"a bé a", ""]
    paired = byte_level()
    assert pieces_of(paired, [], [*map(paired.pieces.index, "aÃ©b")]) == ["a", "", "é", "b", ""]
    bytes_alone = TOKENIZERS["bytes alone"]()
    assert pieces_of(bytes_alone, [], "é€b".encode()) == ["", "é", "", "", "€", "b", ""]
    llama = llama_like()
    ids = [llama.pieces.index(piece) for piece in ("▁the", "<0xC3>", "<0xA9>", "▁cat")]
    assert pieces_of(llama, [], ids) == ["the", "", "", "é cat", ""]


def test_an_unfinished_character_at_the_very_end_is_shown_as_decoding_at_once_shows_it():
    for tokenizer, ids in ((byte_level(), "aæĹ"), (llama_like(), ("s", "<0xE6>", "<0x97>"))):
        tokens = [tokenizer.pieces.index(piece) for piece in ids]
        pieces = pieces_of(tokenizer, [], tokens)
        assert "".join(pieces[:-1]) == tokenizer.decode(tokens[:1])
        assert pieces[-1].strip("\ufffd") == "" != pieces[-1]
        assert "".join(pieces) == tokenizer.decode(tokens)


def test_text_that_a_later_token_changes_goes_on_from_the_first_character_that_differs():
    paired = byte_level()
    first, second = map(paired.pieces.index, "Ã©")
    assert paired.decode([first]) == "\ufffd"
    assert pieces_of(paired, [first], [second]) == ["é", ""]
    capital = Plain(["a", "b", "!"], lambda p: "".join(p).upper() if "!" in p else "".join(p))
    assert pieces_of(capital, [], [0, 1, 2, 0]) == ["a", "b", "B!", "A", ""]


def test_many_tokens_cost_no_more_each_than_few():
    for name in ("bytes paired", "SentencePiece as Llama has it", "special tokens left out"):
        tokenizer = TOKENIZERS[name]()
        decoded = 0

        def counting(tokens, decode=tokenizer.decode):
            nonlocal decoded
            decoded += len(tokens)
            return decode(tokens)

        tokenizer.decode = counting
        for token in {0, len(tokenizer.pieces) - 1, 9 % len(tokenizer.pieces), 2}:
            decoded = 0
            pieces_of(tokenizer, [token] * 5000, [token] * 2000)
            assert decoded < 100 * 2000, (name, token)


@pytest.mark.parametrize("bad", [-1, 5, 1.5, "a", None], ids=repr)
def test_a_push_with_a_bad_id_takes_none_of_its_tokens(bad):
    detokenizer = Detokenizer(CharacterTokenizer("abc"))
    assert detokenizer.push([0]) == "a"
    with pytest.raises(ValueError, match="token"):
        detokenizer.push([1, bad])
    assert detokenizer.push([2]) + detokenizer.flush() == "c"


def test_one_id_that_is_no_sequence_and_a_push_after_the_end_are_errors_that_say_what_to_do():
    detokenizer = Detokenizer(CharacterTokenizer("abc"))
    with pytest.raises(ValueError, match=r"tokens is 1: must be a sequence of token ids"):
        detokenizer.push(1)
    with pytest.raises(ValueError, match=r"prompt\[1\] is .*'b'.*: must be a token id"):
        Detokenizer(CharacterTokenizer("abc"), [0, "b"])
    assert detokenizer.push(np.array([0, 1], np.int8)) == "ab"
    assert detokenizer.flush() == detokenizer.flush() == ""
    with pytest.raises(ValueError, match="flushed: make another Detokenizer"):
        detokenizer.push([0])
