"""The protocol of networks: its records, blocks and errors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec.models.network import (
    Block,
    CacheError,
    LanguageModel,
    Tokenizer,
    TokensDifferError,
    assert_same_tokens,
)


@dataclasses.dataclass(frozen=True)
class Letters:
    """A tokenizer of one letter a token."""

    pieces: Sequence[str]

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in tokens)


def never(*arguments: Any) -> Any:
    raise AssertionError("no network is run here")


def named(name: str, vocab: int = 3, **options: Any) -> LanguageModel:
    given: dict[str, Any] = {"keep": never, "takes_trees": True, **options}
    return LanguageModel(
        name=name, vocab=vocab, params=None, forward=never, init_cache=never, **given
    )


ABC: Tokenizer = Letters("abc")


def test_an_empty_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="tiny: vocab is 0"):
        named("tiny", vocab=0)


@pytest.mark.parametrize("vocab", [2, 4])
def test_a_tokenizer_may_have_fewer_tokens_than_the_vocabulary_and_more(vocab: int) -> None:
    assert named("padded", vocab=vocab, tokenizer=ABC).tokenizer is ABC


def test_networks_are_compared_by_identity_and_cannot_be_changed() -> None:
    one, other = named("same"), named("same")
    assert one != other
    assert len({one, other, one}) == 2
    assert one.guarded == other.guarded != named("another").guarded
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.vocab = 4  # type: ignore[misc]


def test_a_cache_that_cannot_roll_back_is_an_error() -> None:
    named("fine").assert_rolls_back()
    with pytest.raises(CacheError, match="ring: its cache cannot roll back, so rejected tokens"):
        named("ring", rolls_back=False).assert_rolls_back()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"takes_trees": False}, "paths takes no mask, so it verifies paths only: propose a path"),
        ({"takes_trees": False, "keep": None}, "paths takes no mask"),
        ({"keep": None}, "paths has a cache whose slots cannot move, so it verifies paths only"),
    ],
)
def test_a_tree_for_a_network_that_takes_none_is_an_error(
    options: dict[str, Any], why: str
) -> None:
    named("fine").assert_takes_trees()
    with pytest.raises(CacheError, match=why):
        named("paths", **options).assert_takes_trees()


def test_models_with_equal_or_unknown_common_tokens_fit() -> None:
    for target, draft in (
        (named("t"), named("d")),
        (named("t", tokenizer=ABC), named("d")),
        (named("t"), named("d", tokenizer=Letters("xyz"))),
        (named("t", tokenizer=ABC), named("d", tokenizer=Letters(("a", "b", "c")))),
        (named("t", 5, tokenizer=ABC), named("d", 5, tokenizer=ABC)),
        # Padded to different sizes, and tokenizers of which one names more tokens.
        (named("t", 4), named("d", 3)),
        (named("t", 4, tokenizer=ABC), named("d", 9, tokenizer=ABC)),
        (named("t", 4, tokenizer=ABC), named("d", 4, tokenizer=Letters("ab"))),
    ):
        assert_same_tokens(target, draft)


@pytest.mark.parametrize(
    ("target", "draft", "how"),
    [
        (
            lambda: named("big", tokenizer=ABC),
            lambda: named("small", tokenizer=Letters("axx")),
            "token 1 is 'b' to target big, 'x' to draft small: their tokenizers differ",
        ),
        (
            lambda: named("big", 9, tokenizer=Letters("abcdef")),
            lambda: named("small", 3, tokenizer=Letters("abx")),
            "token 2 is 'c' to target big, 'x' to draft small: their tokenizers differ",
        ),
    ],
)
def test_models_with_different_tokens_are_an_error(
    target: Callable[[], LanguageModel], draft: Callable[[], LanguageModel], how: str
) -> None:
    with pytest.raises(TokensDifferError, match=how):
        assert_same_tokens(target(), draft())


def test_padding_is_clipped_to_valid_tokens_and_positions() -> None:
    shown = []

    def forward(params, cache, block):
        shown.append((block.tokens.tolist(), block.positions.tolist()))
        return jnp.zeros((3, 5)), cache

    model = LanguageModel(
        name="shown",
        vocab=5,
        params=(),
        forward=forward,
        init_cache=lambda slots: (),
        keep=None,
        takes_trees=False,
        max_context=8,
    )
    model.guarded((), (), Block.of_text(jnp.array([-1, 4, 9]), 6, slots=8))
    assert shown == [([0, 4, 4], [6, 7, 7])]
