"""What comes with the package: a text, and a pair of models counted from it."""

import functools
import importlib.resources
import lzma

from jaxspec.models.ngram import NGram, fit_ngram
from jaxspec.models.provider import Provider
from jaxspec.models.text import split_text


@functools.lru_cache(maxsize=1)
def bundled_text() -> str:
    r"""Return the text that comes with the package: the King James Bible, 1611, public domain.

    4,153,207 ASCII characters, 73 symbols; `data/README.md` says where it is from.

    Returns:
      The text, read once.

    >>> bundled_text()[11:66]
    'In the beginning God created the heaven and the earth.\n'
    """
    packed = importlib.resources.files("jaxspec.models") / "data" / "kjv.txt.xz"
    return lzma.decompress(packed.read_bytes()).decode("ascii")


def bundled_ngrams(target_order: int = 5, draft_order: int = 3) -> tuple[NGram, NGram]:
    """Return a target and a draft counted from the training part of the shipped text.

    They share their tables and one alphabet, that of the whole shipped text, so that held-out text
    can be encoded. Over held-out contexts E sum_x min(p(x), q(x)), the chance that the target keeps
    a token of the draft, is 0.64 for the default pair, 0.45 for a 2-gram draft, 0.82 for a 4-gram.

    Args:
      target_order: order of the target, at least 0.
      draft_order: order of the draft, at least 0; it may exceed the target's.

    Returns:
      The target and the draft; the counting, a second or two, is done once per longest order.

    Raises:
      TextError: a negative order, or one longer than the text.

    >>> target, draft = bundled_ngrams()
    >>> target.order, draft.order, target.alphabet == draft.alphabet
    (5, 3, True)
    """
    model = _shipped_model(max(target_order, draft_order))
    return model.truncated(target_order), model.truncated(draft_order)


def bundled_providers(
    target_order: int = 5, draft_order: int = 3
) -> tuple[Provider, Provider, str]:
    """Return the shipped pair as providers, with the alphabet that encodes prompts for them.

    Args:
      target_order: see `bundled_ngrams`.
      draft_order: see `bundled_ngrams`.

    Returns:
      (target, draft, alphabet).

    >>> target, draft, alphabet = bundled_providers()
    >>> target.name, draft.name, target.vocab
    ('kjv 5-gram', 'kjv 3-gram', 73)
    """
    target, draft = bundled_ngrams(target_order, draft_order)
    return (
        target.provider(f"kjv {target_order}-gram"),
        draft.provider(f"kjv {draft_order}-gram"),
        target.alphabet,
    )


@functools.lru_cache(maxsize=4)
def _shipped_model(order: int) -> NGram:
    """Return the model of the training part of the shipped text, with the whole text's alphabet."""
    text = bundled_text()
    return fit_ngram(split_text(text), order, "".join(sorted(set(text))))
