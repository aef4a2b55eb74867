"""How the texts of a batch are sampled: one record of settings, for target, draft and plain steps."""

import jax

from jaxspec.checks import struct
from jaxspec.logits import Logits
from jaxspec.slabs import AdjustedLogits, Penalties
from jaxspec.slabs.base import AnySlab


@struct
class Sampling:
    """Settings of the texts of a batch, applied in the order of `AdjustedLogits` and `Logits`.

    Attributes:
      temperature: float32 [B].
      top_k: int32 [B]; V keeps all.
      top_p: float32 [B].
      min_p: float32 [B].
      bias: float32 [B, V], -inf for a token that is not allowed. None for none.
      penalties: `Penalties` of the B texts; their counts are of the output up to each root. None for
        none.
    """

    temperature: jax.Array  # [B]
    top_k: jax.Array  # [B]
    top_p: jax.Array  # [B]
    min_p: jax.Array  # [B]
    bias: jax.Array | None = None  # [B, V]
    penalties: Penalties | None = None

    def logits(self, values: AnySlab, above: jax.Array | None = None) -> Logits:
        """Return logits of one text as rows; the leading B of this record is mapped over.

        Args:
          values: [N, V], the logits.
          above: int32 [N, D], the tokens drafted above each row, then -1; None for none.
        """
        adjusted = values
        if self.bias is not None or self.penalties is not None:
            bias, penalties = jax.tree.map(lambda x: x[None], (self.bias, self.penalties))
            above = None if penalties is None else above
            adjusted = AdjustedLogits(values=values, bias=bias, penalties=penalties, above=above)
        return Logits(
            values=adjusted,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )
