"""Laws of decoded texts: that of a decoder beside the target's."""

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxspec.audit.boxes import TOLERANCE
from jaxspec.audit.statistics import total_variation
from jaxspec.decode import DecodeState, Target
from jaxspec.models.provider import Context
from jaxspec.trees import make_tree


class Texts(NamedTuple):
    """The law of the texts of a decoder, and how it was found."""

    law: dict[Context, float]
    searches: int
    misses: int


@dataclasses.dataclass(frozen=True)
class DecodingLaw:
    """The exact law of a decoder's text, compared with the target's.

    Attributes:
      texts: probability of each text, without the prompt.
      target_texts: probability of each text by the target alone.
      tv: total variation between the two.
      impossible: mass of texts that the target cannot produce.
      searches: verifications that were cut into boxes.
      misses: replays that contradicted a box, of the draft or of the verification; a law with
        misses proves nothing.
      reused: draws that a round reads again after an earlier one, in words, when the decoder runs with
        its own draws.
    """

    texts: dict[Context, float] = dataclasses.field(repr=False)
    target_texts: dict[Context, float] = dataclasses.field(repr=False)
    tv: float
    impossible: float
    searches: int
    misses: int
    reused: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Say which checks failed and by how much; empty if the decoder is proved here."""
        checks = {
            f"total variation {self.tv:.1e} from the target's law": self.tv > TOLERANCE,
            f"text of target probability 0 with probability {self.impossible:.1e}": (
                self.impossible > 0
            ),
            f"{self.misses} replays are not as their box": self.misses > 0,
        }
        return (*(what for what, is_wrong in checks.items() if is_wrong), *self.reused)

    @property
    def is_proved(self) -> bool:
        """Whether no check failed."""
        return not self.failures


def compared(
    found: Texts, target_texts: dict[Context, float], reused: tuple[str, ...]
) -> DecodingLaw:
    """Compare the law of a decoder's texts with the target's; `reused` as in `DecodingLaw`."""
    return DecodingLaw(
        texts=found.law,
        target_texts=target_texts,
        tv=total_variation(found.law, target_texts),
        impossible=sum(mass for t, mass in found.law.items() if target_texts.get(t, 0.0) == 0),
        searches=found.searches,
        misses=found.misses,
        reused=reused,
    )


def target_law(target: Target, start: DecodeState, length: int) -> dict[Context, float]:
    """Return the law of the target's own text: up to `length` tokens, or to a stop token."""
    law: dict[Context, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Context, float] = {}
        for text, mass in law.items():
            if text and text[-1] in start.request.stop_tokens:
                longer[text] = mass
                continue
            context = (*start.tokens, *text)
            scores = target.rows(make_tree(context[-1:], [-1]), context, bonus=True)
            row = start.request.apply(scores.rows, [context])[0]
            exact = row.astype(np.float64)
            for token, share in enumerate((exact / exact.sum()).tolist()):
                if share > 0:
                    longer[(*text, token)] = mass * share
        law = longer
    return law
