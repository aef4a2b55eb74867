"""The exact law of a decoded text, through round boundaries, budget caps and depth adaptation.

The loop's own functions run: it proposes, scores and commits. Only its draws are replaced. The draft
draws are cut into boxes of one proposal each, by proposing again and again; the verification of each
proposal is cut into its boxes by `search`; and each verdict is committed to the state that the next
round starts from.

A drafter may choose each candidate's row, and whether to draw one more, by all that was drawn before;
it may not look at a token that it has drawn and then drop it, sort it or merge it with another. The
text of one that does has another law, and `tv` says how far from the target's. To audit such a choice
in one round, without a decoder, use `exact_law(..., draw=, num_drafted=)`.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.audit.boxes import TOLERANCE, UNITS, Cells, search
from jaxspec.audit.compiled_law import Texts, law_of_texts
from jaxspec.audit.reuse import reused_draws
from jaxspec.audit.rounds import causal_nodes, draws_of
from jaxspec.audit.statistics import total_variation
from jaxspec.checks import Progress, assert_whole
from jaxspec.decode import (
    CachedNetwork,
    CompiledDecoder,
    Decoder,
    DecodeState,
    Ending,
    Options,
    Scores,
    Target,
)
from jaxspec.decode.target import as_target
from jaxspec.draft import HostDraft
from jaxspec.models.provider import Context
from jaxspec.proposals import Proposal
from jaxspec.tiles import TILE
from jaxspec.transfers import moves_data
from jaxspec.trees import make_tree
from jaxspec.verify import Verdict, Verifier

_TOGETHER = 32
"""Rounds whose verification is searched in one go."""

_NEAR = 2
"""Units of 2^-24 within which rounding leaves an edge of a draft's draw."""


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


@moves_data
def decoding_law(
    decoder: Decoder | CompiledDecoder,
    prompt: Context,
    *,
    batch: int = 256,
    num_keys: int = 8,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> DecodingLaw:
    """Compute the exact law of all that a decoder of either loop emits after a prompt.

    The work grows as the number of texts, so this is for vocabularies and budgets of a few tokens.
    From each text on, each proposal that the draft can make is asked for some ten times, at about a
    thousandth of a second each, and its verification is searched: V^N proposals for N drawn
    candidates. The draws of a round are taken to be independent of those of all others, as
    `round_draws` makes them; then the decoder decodes with a few keys as it is, and draws that a round
    reads again are reported. The state shown to the host loop holds no key: a decoder that draws
    random numbers of its own fails.

    The compiled loop runs its own program, a round at a time, over all draws of the round at once.
    States are told apart by everything that it reads of them, caches included, so the work grows with
    what rejected candidates leave in the caches: up to V^N states a round.

    Args:
      decoder: vocabularies up to 512 tokens, for which one number draws a token.
      prompt: token ids.
      batch: evaluations in one call of a compiled verification.
      num_keys: keys that the decoder decodes with as it is, to see whether it reads draws twice; at
        least two of them must show it. 0 leaves that out.
      progress: called as progress(what, tokens of the text done, all) after each text whose proposals
        were found, and within and after the searches.
      **options: new_tokens, stop_tokens, temperature and the other settings of
        `jaxspec.decode.Options`.

    Returns:
      The `DecodingLaw`.

    Raises:
      ValueError: the prompt is empty, the vocabulary is larger, or proposals are not a function of
        the context, the depth and the draft draws.
    """
    assert_whole("num_keys", num_keys, 0)
    if decoder.target.vocab > TILE:
        raise ValueError(f"vocab is {decoder.target.vocab}: laws of texts go up to {TILE}")
    if isinstance(decoder, CompiledDecoder):
        return _compiled_law(decoder, prompt, batch, num_keys, progress, options)
    start = decoder.start(prompt, jax.random.key(0), **options)
    # Without its key, a state follows for all draws.
    start = dataclasses.replace(start, request=dataclasses.replace(start.request, key_data=()))
    limits = (decoder.max_context, as_target(decoder.target).max_context)
    room = (limit - len(start.tokens) for limit in limits if limit is not None)
    steps = min([start.request.new_tokens, *room])
    pending: dict[DecodeState, float] = {start: 1.0}
    texts: dict[Context, float] = defaultdict(float)
    searches = misses = done = 0

    def report(what: str, *_: int) -> None:
        if progress:
            progress(what, min(done, steps), steps)

    while pending:
        shortest = min(len(state.tokens) for state in pending)  # all that leads to these is done
        done = shortest - len(start.tokens)
        rounds: list[_Round] = []
        for state in [each for each in pending if len(each.tokens) == shortest]:
            mass = pending.pop(state)
            if state.ending != Ending.NONE:
                texts[state.new_tokens] += mass
                continue
            found, missed = _rounds_from(decoder, state, mass)
            rounds += found
            misses += missed
            report(f"{len(rounds):,} proposals")
        searches += len(rounds)
        for mass, after, missed in _outcomes(decoder, rounds, batch, report):
            pending[after] = pending.get(after, 0.0) + mass
            misses += missed
    done = steps
    report(f"{searches:,} proposals")
    reused = reused_draws(decoder, prompt, num_keys=num_keys, **options)
    target_texts = _target_law(as_target(decoder.target), start, steps)
    return _compared(Texts(dict(texts), searches, misses), target_texts, reused)


def _compared(
    found: Texts, target_texts: dict[Context, float], reused: tuple[str, ...]
) -> DecodingLaw:
    return DecodingLaw(
        texts=found.law,
        target_texts=target_texts,
        tv=total_variation(found.law, target_texts),
        impossible=sum(mass for t, mass in found.law.items() if target_texts.get(t, 0.0) == 0),
        searches=found.searches,
        misses=found.misses,
        reused=reused,
    )


def _compiled_law(
    decoder: CompiledDecoder,
    prompt: Context,
    batch: int,
    num_keys: int,
    progress: Progress | None,
    options: Options,
) -> DecodingLaw:
    """Do as `decoding_law` for the compiled loop."""
    key, most = jax.random.key(0), decoder.max_context
    target = CachedNetwork(decoder.target, slots=most, chunk=1)
    request = Decoder(target, max_context=most).start(prompt, key, **options)
    steps = request.request.limit(most) - len(request.tokens)

    def report(done: int, what: str) -> None:
        if progress:
            progress(what, done, steps)

    start = decoder.start([prompt], key, **options)
    found = law_of_texts(decoder, start, batch=batch, report=report)
    report(steps, f"{found.searches:,} rounds")
    reused = reused_draws(decoder, prompt, num_keys=num_keys, **options)
    return _compared(found, _target_law(target, request, steps), reused)


def _target_law(target: Target, start: DecodeState, length: int) -> dict[Context, float]:
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


class _Round(NamedTuple):
    """One proposal after one text, ready to be verified."""

    mass: float
    state: DecodeState
    draft: HostDraft
    scores: Scores


# --- the draft


def _rounds_from(decoder: Decoder, state: DecodeState, mass: float) -> tuple[list[_Round], int]:
    """Cut the draws that a draft is made with into boxes of one proposal each, and score each.

    Returns:
      (the rounds, the number of replays inside the boxes that led to another proposal).
    """
    nodes = decoder.drafter.capacity.max_nodes
    generator = np.random.default_rng(0)
    drafts: dict[bytes, HostDraft] = {}

    def propose(units: np.ndarray, tile: float = 0.5) -> HostDraft:
        pairs = np.stack([np.full(nodes, tile), units / UNITS], axis=1).astype(np.float32)
        if pairs.tobytes() not in drafts:
            drafts[pairs.tobytes()] = decoder.propose(state, jnp.asarray(pairs))
        return drafts[pairs.tobytes()]

    boxes = [(np.zeros(nodes, np.int64), np.full(nodes, UNITS, np.int64))]
    for node in range(1, nodes):
        cut = functools.partial(_pieces, propose, node, 4 * decoder.target.vocab)
        boxes = list(itertools.chain.from_iterable(itertools.starmap(cut, boxes)))
    rounds, misses = [], 0
    for low, high in boxes:
        draft = propose((low + high) // 2)
        for units in (low, high - 1, generator.integers(low, high)):
            again = propose(units, float(generator.integers(UNITS) / UNITS))
            misses += _content(again) != _content(draft)
        scores = decoder.score(state, draft)
        share = float(np.prod((high - low)[1:] / UNITS))
        rounds.append(_Round(mass=mass * share, state=state, draft=draft, scores=scores))
    return rounds, misses


def _pieces(
    propose: Callable[[np.ndarray], HostDraft],
    node: int,
    most_cuts: int,
    low: np.ndarray,
    high: np.ndarray,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut a box of draft draws along the draw of one node wherever the proposal changes.

    The recorded draft row says where the edges should be, which saves most of the search and decides
    nothing.
    """
    middle = (low + high) // 2

    def at(unit: int) -> bytes:
        point = middle.copy()
        point[node] = unit
        return _content(propose(point))

    cuts: list[int] = []

    def cut(left: int, right: int) -> None:
        if at(left) == at(right):
            return
        if right - left == 1:
            cuts.append(right)
            if len(cuts) > most_cuts:
                raise ValueError(
                    f"the proposal changes more than {most_cuts} times along the draw of node "
                    f"{node}: is the draft a pure function of context, depth and draws?"
                )
            return
        centre = (left + right) // 2
        cut(left, centre)
        cut(centre, right)

    probes = {0, UNITS // 2, UNITS - 1}
    for edge in _expected_edges(propose(middle).proposal, node):
        probes |= {max(edge - _NEAR, 0), min(edge + _NEAR, UNITS - 1)}
    for ends in itertools.pairwise(sorted(probes)):
        cut(*ends)
    for start, stop in itertools.pairwise([0, *cuts, UNITS]):
        piece = low.copy(), high.copy()
        piece[0][node], piece[1][node] = start, stop
        yield piece


def _expected_edges(proposal: Proposal, node: int) -> list[int]:
    """Return where the draw of a node goes from one token to the next by its recorded row.

    If the draft looked at the candidate and dropped it, the node is missing and its row is unknown:
    the edges of all rows are tried.
    """
    if proposal.draft_rows is None:
        return []
    rows = np.asarray(proposal.draft_rows).astype(np.float64)
    parent = int(proposal.tree.parents[node])
    used = rows[[parent]] if parent >= 0 else np.unique(rows[rows.sum(axis=1) > 0], axis=0)
    running = np.cumsum(used, axis=1)[:, :-1] / used.sum(axis=1, keepdims=True)
    return np.unique(np.rint(running * UNITS).astype(np.int64)).tolist()


def _content(draft: HostDraft) -> bytes:
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(draft.proposal))


# --- the verification


def _outcomes(
    decoder: Decoder, rounds: Sequence[_Round], batch: int, report: Callable[[str], None]
) -> Iterator[tuple[float, DecodeState, int]]:
    """Cut the verification of each round into boxes and commit each verdict.

    Yields:
      (mass, state after the round, replays that contradicted a box since the last).
    """

    def progress(what: str, *_: int) -> None:
        report(f"{len(rounds):,} proposals: {what}")

    rule = decoder.drafter.rule
    by_order: dict[tuple[int, ...], list[_Round]] = defaultdict(list)
    for each in rounds:
        tree = each.draft.proposal.tree
        tested = causal_nodes(tree, deepest_first=rule.tests_deepest_first)
        padding = (node for node in range(1, tree.max_nodes) if node not in tested)
        by_order[(*tested, *padding)].append(each)
    for order, alike in by_order.items():
        for first in range(0, len(alike), _TOGETHER):
            some = alike[first : first + _TOGETHER]
            padded = [*some, *[some[-1]] * (_TOGETHER - len(some))]
            stacked = jax.tree.map(
                lambda *leaves: jnp.asarray(np.stack(leaves)),
                *[(jax.device_get(each.draft.proposal), each.scores.rows) for each in padded],
            )
            world = (stacked, jnp.asarray(decoder.bonus), jnp.float32(len(some)))
            play, axes = _verification(rule.verify), len(order) + 2
            causal = (0, *order, axes - 1)  # axis 0 says which round it is
            cells = search(play, world, axes, causal, batch=batch, progress=progress)
            yield from _committed(decoder, some, cells)


def _committed(
    decoder: Decoder, rounds: Sequence[_Round], cells: Cells
) -> Iterator[tuple[float, DecodeState, int]]:
    """Commit each distinct outcome once, with the volume of its boxes."""
    volumes = np.prod((cells.high - cells.low)[:, 1:] / UNITS, axis=1)
    masses: dict[bytes, float] = defaultdict(float)
    first_cell: dict[bytes, int] = {}
    for cell, volume in enumerate(volumes.tolist()):
        outcome = b"".join(leaf[cell].tobytes() for leaf in jax.tree.leaves(cells.outcomes))
        first_cell.setdefault(outcome, cell)
        masses[outcome] += volume
    misses = cells.misses
    for outcome, cell in first_cell.items():
        number, verdict = jax.tree.map(lambda leaf, cell=cell: leaf[cell], cells.outcomes)
        each = rounds[int(number)]
        after = decoder.commit(each.state, each.draft, each.scores, verdict)
        # The history of queries does not decide what comes next.
        yield each.mass * masses[outcome], dataclasses.replace(after, rounds=()), misses
        misses = 0


@functools.lru_cache(maxsize=16)
def _verification(verify: Verifier) -> Callable[[Any, jax.Array], tuple[jax.Array, Verdict]]:
    """Make the function of uniforms that verifies one of several rounds; one object for each rule."""

    def play(world: Any, u: jax.Array) -> tuple[jax.Array, Verdict]:
        stacked, bonus, count = world
        number = jnp.minimum(u[0] * count, count - 1).astype(jnp.int32)
        proposal, rows = jax.tree.map(lambda leaf: leaf[number], stacked)
        return number, verify(draws_of(u[1:-1], u[-1:]), proposal, rows, bonus)

    return play
