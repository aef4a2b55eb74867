"""Candidates for each prefix of a tree: the most probable tokens, as many as a width says.

The builders differ in where a parent's row comes from and in who says its width. What they choose
follows from the past alone and takes no draw: the candidates are point masses (`PointMass`),
lossless whatever the draft. (What sampled candidates may depend on: `jaxspec.decode.Drafter`.)

In the shape descriptions D denotes a depth, V the vocabulary.
"""

import math
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from jaxspec.checks import RowError, assert_between, assert_kind, assert_whole
from jaxspec.draft.growth import (
    MAX_NODES,
    Answers,
    Drafted,
    Plan,
    Sizes,
    checked_width,
    checked_widths,
    grow,
    make_plan,
)
from jaxspec.draft.likely import TINY, normalised_entropy, numbers
from jaxspec.models.provider import Context, Provider, Usage
from jaxspec.transfers import moves_data


@moves_data
def build_top_k(
    draft: Provider,
    context: Sequence[int],
    *,
    widths: Sequence[int],
    max_nodes: int | None = None,
    capacity: Sizes | None = None,
    stop_tokens: Collection[int] = (),
) -> Drafted:
    """Draft the most probable tokens after each prefix, a fixed number at each depth.

    The tree is grown level by level, parents in node order, siblings by falling probability, until
    the budget is spent. Each parent's own context is asked about, and only if it will have
    children: no node of the last depth, none that comes after the budget is spent. A level is one
    call of a batched provider. (Under a budget it takes another where rows with fewer tokens of
    positive probability than the width leave room for parents beyond those first asked.)

    Args:
      draft: the model.
      context: prompt and committed tokens, at least one; the last is the tree's root.
      widths: candidates below each node of depth 0, 1, ...; fewer where fewer tokens have positive
        probability. The tree ends at the first 0; of a 0 at the root, and of no widths, comes a
        tree of the root alone, and nothing is asked.
      max_nodes: node budget, the root counted; default the capacity's, without one `MAX_NODES`.
      capacity: sizes to pad the tree to; default its own.
      stop_tokens: tokens that end a text: such a candidate has no candidates below it, and the draft
        is not asked about it.

    Returns:
      `Drafted`.

    Raises:
      ValueError: a token outside the vocabulary, an empty context, a negative width, or a width,
        budget or number of widths that does not fit the capacity. Nothing was asked.
      RowError: the draft's answer is bad.

    >>> draft = Provider("toy", vocab=3, ask=lambda context: [0.25, 0.75, 0.0])
    >>> drafted = build_top_k(draft, [2], widths=[2, 1])
    >>> drafted.tree.tokens.tolist(), drafted.tree.parents.tolist()
    ([2, 1, 0, 1, 1], [-1, 0, 0, 1, 2])
    >>> drafted.usage
    Usage(queries=3, calls=3)
    """
    _assert_draft(draft, stop_tokens)
    plan = _fixed_plan(widths, draft.vocab, max_nodes, capacity)
    plan = plan._replace(stop_tokens=frozenset(stop_tokens))

    def ask(depth: int, nodes: Sequence[int], contexts: list[Context]) -> Answers:
        del nodes
        rows, usage = draft.rows(contexts)
        candidates = [top_k(row, plan.expected[depth]) for row in rows]
        return Answers(candidates, usage, [normalised_entropy(row) for row in rows])

    return grow(draft.check_context(context), plan, ask)


@moves_data
def build_adaptive(
    draft: Provider,
    context: Sequence[int],
    *,
    depth: int,
    width_of: Callable[[float], int],
    max_nodes: int | None = None,
    capacity: Sizes | None = None,
    stop_tokens: Collection[int] = (),
) -> Drafted:
    """Draft the most probable tokens after each prefix, more where the draft is less sure.

    As `build_top_k`, but the width below a parent follows from its own row, so it is known only
    after asking: asked are as many parents of a level as there would be room for with one child
    each, in one call of a batched provider. (It takes another where widths of 0 leave room for
    parents beyond those.)

    Args:
      draft: the model.
      context: prompt and committed tokens, at least one; the last is the tree's root.
      depth: levels below the root, at least 0; at 0 nothing is asked.
      width_of: maps the normalised entropy of a parent's row, in [0, 1], to its width, an integer
        of at least 0. Beside that it may depend on the past, on no draw of this round.
      max_nodes: node budget, the root counted; default the capacity's, without one `MAX_NODES`.
      capacity: sizes to pad the tree to; default its own.
      stop_tokens: tokens that end a text: such a candidate has no candidates below it, and the draft
        is not asked about it.

    Returns:
      `Drafted`.

    Raises:
      ValueError: as for `build_top_k`; or `width_of` gave something that is not a width or does not
        fit the capacity, the message names the node.
      RowError: the draft's answer is bad.

    >>> draft = Provider("toy", vocab=2, ask=lambda c: [0.5, 0.5] if c[-1] else [0.0, 1.0])
    >>> drafted = build_adaptive(draft, [0], depth=2, width_of=lambda entropy: 1 + round(entropy))
    >>> drafted.tree.parents.tolist(), drafted.entropies.tolist()
    ([-1, 0, 1, 1], [0.0, 1.0, nan, nan])
    """
    _assert_draft(draft, stop_tokens)
    assert_between("depth", depth, 0, MAX_NODES)
    if not callable(width_of):
        raise ValueError(f"width_of is {width_of!r}: must be a function of a row's entropy")
    plan = make_plan([1] * depth, max_nodes, capacity)
    plan = plan._replace(stop_tokens=frozenset(stop_tokens))

    def ask(depth: int, nodes: Sequence[int], contexts: list[Context]) -> Answers:
        del depth
        rows, usage = draft.rows(contexts)
        entropies = [normalised_entropy(row) for row in rows]
        candidates = []
        for node, row, entropy in zip(nodes, rows, entropies, strict=True):
            place = f"the width below node {node}, of entropy {entropy},"
            width = checked_width(width_of(entropy), draft.vocab, capacity, place)
            candidates.append(top_k(row, width))
        return Answers(candidates, usage, entropies)

    return grow(draft.check_context(context), plan, ask)


@moves_data
def build_from_depth_logits(
    depth_logits: npt.ArrayLike,
    widths: Sequence[int],
    *,
    root: int = -1,
    max_nodes: int | None = None,
    capacity: Sizes | None = None,
) -> Drafted:
    """Build the tree of a draft that sees nothing but the depth: a fixture, no model is asked.

    Args:
      depth_logits: float [D, V], row d for the candidates below each node of depth d: finite or
        -inf, which is never a candidate.
      widths: as for `build_top_k`, at most D of them.
      root: the last committed token; -1 if it is not known.
      max_nodes: node budget, the root counted; default the capacity's, without one `MAX_NODES`.
      capacity: sizes to pad the tree to; default its own.

    Returns:
      `Drafted`, without usage or entropies.

    Raises:
      ValueError: the shapes do not match, or as for `build_top_k`.
      RowError: a logit is NaN or +inf, or all of a row are -inf.

    >>> build_from_depth_logits([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]], [2, 1]).tree.tokens.tolist()
    [-1, 1, 2, 0, 0]
    """
    widths = checked_widths(widths)
    logits = numbers("depth_logits", depth_logits)
    if logits.ndim != 2 or len(logits) < len(widths) or logits.shape[1] == 0:
        raise ValueError(
            f"depth_logits has shape {logits.shape}, wanted [D, V] with D at least {len(widths)}"
        )
    for depth, row in enumerate(logits):
        bad = np.flatnonzero(np.isnan(row) | (row == np.inf))
        if bad.size:
            raise RowError(f"depth_logits row {depth}: logit {bad[0]} is {row[bad[0]]}")
        if np.all(row == -np.inf):
            raise RowError(f"depth_logits row {depth}: every logit is -inf, so it has no mass")
    vocab = logits.shape[1]
    assert_between("root", root, -1)
    if root >= vocab:
        raise ValueError(f"root is {root}, outside the vocabulary of {vocab}")
    plan = _fixed_plan(widths, vocab, max_nodes, capacity)

    def ask(depth: int, nodes: Sequence[int], contexts: list[Context]) -> Answers:
        del contexts
        candidates = _greatest(logits[depth], logits[depth] > -np.inf, plan.expected[depth])
        return Answers([candidates] * len(nodes), Usage(), [math.nan] * len(nodes))

    return grow((root,), plan, ask)


def top_k(row: npt.ArrayLike, k: int) -> tuple[int, ...]:
    """Return the k most probable tokens, the lowest first among equals.

    Only tokens of positive probability count, so there may be fewer than k.

    Args:
      row: float [V], probabilities.
      k: how many, at least 0; it may exceed V.

    Returns:
      Token ids, by falling probability.

    Raises:
      ValueError: k is negative, or the row is not one row.
      RowError: an entry is not finite.

    >>> top_k([0.25, 0.0, 0.5, 0.25], 2)
    (2, 0)
    >>> top_k([0.25, 0.0, 0.5, 0.25], 9)
    (2, 0, 3)
    """
    exact = numbers("row", row)
    is_count = isinstance(k, int | np.integer) and not isinstance(k, bool)
    if exact.ndim != 1 or not is_count or k < 0:
        raise ValueError(
            f"wanted a row [V] and an integer k of at least 0, not shape {exact.shape}, k={k!r}"
        )
    bad = np.flatnonzero(~np.isfinite(exact))
    if bad.size:
        raise RowError(f"entry {bad[0]} of the row is {exact[bad[0]]}")
    return _greatest(exact, exact >= TINY, k)


def _assert_draft(draft: Provider, stop_tokens: Collection[int]) -> None:
    assert_kind("draft", draft, Provider, "a jaxspec.models.provider.Provider(name, vocab, ask)")
    assert_kind("stop_tokens", stop_tokens, Collection, "a collection of token ids")
    for token in stop_tokens:
        assert_whole("stop_tokens: one of them", token, 0)


def _fixed_plan(
    widths: Sequence[int], vocab: int, max_nodes: int | None, capacity: Sizes | None
) -> Plan:
    """Check widths and cut them off at the first 0."""
    checked = [
        checked_width(width, vocab, capacity, f"the width at depth {depth}")
        for depth, width in enumerate(checked_widths(widths))
    ]
    grown = checked[: checked.index(0)] if 0 in checked else checked
    return make_plan(grown, max_nodes, capacity)


def _greatest(scores: np.ndarray, is_candidate: np.ndarray, k: int) -> tuple[int, ...]:
    """Return the k candidates of greatest score, the lowest first among equals."""
    tokens = np.flatnonzero(is_candidate)
    if 0 < k < tokens.size:  # V may be large: sort only what reaches the k-th score
        least = np.partition(scores[tokens], -k)[-k]
        tokens = tokens[scores[tokens] >= least]
    order = np.argsort(-scores[tokens], kind="stable")[:k]
    return tuple(tokens[order].tolist())
