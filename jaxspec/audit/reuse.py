"""Draws that a round reads again after an earlier round has looked at them.

Such noise is not independent of the text that it continues, and no law of one round shows it. Draws
that an earlier round made but did not look at may be read later: token verification stays lossless
with draws keyed by the position of the token, block verification does not. Draws are compared as
values, each with those of its role (draft, accept, final): one that is used again in another role, or
changed, is not seen.
"""

from typing import Unpack

import jax
import numpy as np

from jaxspec.audit.rounds import looked_at
from jaxspec.decode import Decoder, Ending, Options, RoundRecord
from jaxspec.models.provider import Context

_Read = dict[tuple[str, float], str]
"""By role and value of a draw: where it was read."""


def reused_draws(
    decoder: Decoder, prompt: Context, *, num_keys: int, **options: Unpack[Options]
) -> tuple[str, ...]:
    """Decode with some keys as the decoder does, and say which draws are read in several rounds.

    Two draws of different nodes are equal by chance with a probability of 2^-23 each; a draw that is
    used again is so with every key, hence only what shows with two keys at least is reported.
    """
    found = [_reused(decoder, prompt, key, options) for key in map(jax.random.key, range(num_keys))]
    found = [each for each in found if each]
    if len(found) < 2:
        return ()
    return (
        f"noise is reused between rounds with {len(found)} of {num_keys} keys: {found[0][0]}; block "
        "and traversal verification are then biased, and so is every rule whose test it was",
    )


def _reused(decoder: Decoder, prompt: Context, key: jax.Array, options: Options) -> list[str]:
    state, before = decoder.start(prompt, key, **options), _Read()
    found = []
    while state.ending == Ending.NONE:
        state, record = decoder.step(state)
        now = _read(record, decoder.drafter.rule.tests_deepest_first)
        for (role, value), place in now.items():
            if (role, value) in before:
                found.append(
                    f"the {role} draw {value:.6f} of {before[role, value]} is that of {place}"
                )
        before |= now
    return found


def _read(record: RoundRecord, deepest_first: bool) -> _Read:
    """Return the draws that a round has looked at, not those of candidates that it did not reach."""
    tree = record.proposal.tree
    is_read = looked_at(tree, deepest_first=deepest_first)[int(record.verdict.stop_node)]
    nodes = np.flatnonzero(is_read & (np.arange(tree.max_nodes) < int(tree.num_nodes)))
    draws, root = jax.device_get(record.draws), record.position
    read: _Read = {}
    for node in nodes.tolist():
        place = f"node {node} of the round at position {root}"
        read["accept", float(draws.verify.accept[node])] = place
        if record.proposal.draft_rows is not None:
            read["draft", float(draws.draft[node, 1])] = place
    if record.verdict.num_tokens > record.verdict.num_accepted:
        read["final", float(draws.verify.final[1])] = f"the round at position {root}"
    return read
