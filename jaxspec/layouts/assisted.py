"""One sequence of logits, as transformers' assisted decoding holds it."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.layouts.arrays import Array, Path, library_of
from jaxspec.layouts.flat import flat_from_paths
from jaxspec.logits import Logits
from jaxspec.proposals import WithReplacement, sampled_path
from jaxspec.transfers import moves_data
from jaxspec.verify import Verdict


def assisted_from_path(path: Path, prompt: Sequence[int] = ()) -> tuple[Array, Array, Array]:
    """Return a sampled path as transformers' assisted decoding holds it (traced).

    Args:
      path: (tokens [T], draft rows [T, V], target rows [T + 1, V]).
      prompt: int [L], the tokens before them.

    Returns:
      (candidate_input_ids int [1, L + T], candidate_logits [1, T, V], new_logits [1, T + 1, V]): the
      logarithms of the rows, -inf for 0.

    Raises:
      ValueError: there are no draft rows, or the rows do not fit the tokens.
    """
    if path[1] is None:
        raise ValueError("draft rows are None: assisted decoding has logits for every candidate")
    batch, library = flat_from_paths([path]), library_of(path[2])
    with np.errstate(divide="ignore"):
        logits = [library.log(rows)[None] for rows in (batch.draft_rows, batch.target_rows)]
    before = library.asarray(prompt, dtype=batch.draft_token_ids.dtype)
    return library.concatenate([before, batch.draft_token_ids])[None], *logits


def path_from_assisted(
    candidate_input_ids: Array, candidate_logits: Array, new_logits: Array
) -> tuple[WithReplacement, Logits]:
    """Return (proposal, target rows) of a round of transformers' assisted decoding (traced).

    Args:
      candidate_input_ids: int [1, L + T], the prompt and the candidates.
      candidate_logits: float [1, T, V], whose softmax is the law that each candidate was drawn from.
      new_logits: float [1, T + 1, V], the target's, as it samples from them.

    Returns:
      (proposal, target rows), to be verified with `bonus=True`.

    Raises:
      ValueError: it is not one sequence, or the shapes do not fit; naming the argument and its shape.
    """
    size, vocab = candidate_logits.shape[-2:]
    length = max(size, candidate_input_ids.shape[-1])
    shapes = {
        "candidate_input_ids": (candidate_input_ids, (1, length)),
        "candidate_logits": (candidate_logits, (1, size, vocab)),
        "new_logits": (new_logits, (1, size + 1, vocab)),
    }
    for name, (value, shape) in shapes.items():
        if value.shape != shape:
            raise ValueError(f"{name} has shape {value.shape}: must be {shape}")
    draft, target = (
        Logits(values=jnp.asarray(logits[0]), temperature=jnp.float32(1))
        for logits in (candidate_logits, new_logits)
    )
    tokens = jnp.asarray(candidate_input_ids[0, length - size :], jnp.int32)
    return sampled_path(tokens, draft), target


@moves_data
def assisted_output(verdict: Verdict) -> tuple[np.ndarray, int]:
    """Return (valid_tokens int [1, n + 1], n_matches n) of a verdict that has a final token.

    Args:
      verdict: of one sequence.

    Returns:
      The tokens and the count, on the host.

    Raises:
      ValueError: the verdict has no final token; naming its counts and status.
    """
    num, accepted = int(verdict.num_tokens), int(verdict.num_accepted)
    if num != accepted + 1:
        facts = f"num_tokens {num}, num_accepted {accepted}, status {int(verdict.status)}"
        raise ValueError(f"the verdict has no final token: {facts}; verify with bonus=True")
    return np.asarray(verdict.tokens)[None, :num], accepted
