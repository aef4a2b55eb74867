"""Draws that a round reads again after an earlier round has looked at them.

Such noise is not independent of the text that it continues, and no law of one round shows it. Draws
that an earlier round made but did not look at may be read later: token verification stays lossless
with draws keyed by the position of the token, block verification does not. Draws are compared as
values, whatever their role (draft, accept, final), also within a round: one that is changed before it
is used again is not seen.
"""

from collections.abc import Iterator
from typing import Any, Unpack

import jax
import numpy as np

from jaxspec.audit.rounds import looked_at
from jaxspec.decode import CompiledDecoder, Decoder, Ending, Options
from jaxspec.draws import RoundDraws
from jaxspec.models.provider import Context
from jaxspec.proposals import Proposal
from jaxspec.verify import Verdict

_Round = tuple[int, RoundDraws, Proposal, Verdict]
"""A round of one text: position of its root, draws, candidates, verdict."""


def reused_draws(
    decoder: Decoder | CompiledDecoder,
    prompt: Context,
    *,
    num_keys: int,
    **options: Unpack[Options],
) -> tuple[str, ...]:
    """Decode with some keys as the decoder does, and say which draws are read in several rounds.

    Two draws are equal by chance with a probability of 2^-23; a draw that is used again is so with
    every key, hence only what shows with two keys at least is reported.
    """
    found = [_reused(decoder, prompt, key, options) for key in map(jax.random.key, range(num_keys))]
    found = [each for each in found if each]
    if len(found) < 2:
        return ()
    return (
        f"noise is reused with {len(found)} of {num_keys} keys: {found[0][0]}; block and traversal "
        "verification are then biased, and so is every rule whose test it was",
    )


def _reused(
    decoder: Decoder | CompiledDecoder, prompt: Context, key: jax.Array, options: Options
) -> list[str]:
    before: dict[float, str] = {}
    found = []
    for played in _rounds(decoder, prompt, key, options):
        for value, place in _read(played, decoder.drafter.rule.tests_deepest_first):
            if value in before:
                found.append(f"{before[value]}, {value:.6f}, is {place}")
            before[value] = place
    return found


def _rounds(
    decoder: Decoder | CompiledDecoder, prompt: Context, key: jax.Array, options: Options
) -> Iterator[_Round]:
    """Decode one text as the decoder does, round by round."""
    if isinstance(decoder, Decoder):
        for _, record in decoder.rounds(decoder.start(prompt, key, **options)):
            yield record.position, record.draws, record.proposal, record.verdict
        return
    batch = decoder.advance(decoder.start([prompt], key, **options), 0)  # the prompt is read
    while int(batch.ending[0]) == Ending.NONE:
        position = int(batch.length[0]) - 1
        draws, proposal, verdict = jax.tree.map(lambda x: x[0], decoder.decide(batch))
        yield position, draws, proposal, verdict
        batch = decoder.advance(batch, 1)


def _read(played: _Round, deepest_first: bool) -> Iterator[tuple[float, str]]:
    """Yield the draws that a round has looked at, not those of candidates that it did not reach."""
    root, draws, proposal, verdict = jax.device_get(played)
    tree: Any = proposal.tree
    is_read = looked_at(tree, deepest_first=deepest_first)[int(verdict.stop_node)]
    nodes = np.flatnonzero(is_read & (np.arange(tree.max_nodes) < int(tree.num_nodes)))
    for node in nodes.tolist():
        place = f"of node {node} of the round at position {root}"
        yield float(draws.verify.accept[node]), f"the accept draw {place}"
        if proposal.draft_rows is not None:
            yield float(draws.draft[node, 1]), f"the draft draw {place}"
    if verdict.num_tokens > verdict.num_accepted:
        yield float(draws.verify.final[1]), f"the final draw of the round at position {root}"
