"""The checking twin of a verifier."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from jaxspec.checks import check_all, functionalize, raise_if
from jaxspec.draws import Draws
from jaxspec.proposals import Proposal
from jaxspec.rows import RowsLike, RowSource, vocab_of
from jaxspec.tiles import is_uniform
from jaxspec.transfers import moves_data
from jaxspec.trees import ROOT, check_tree
from jaxspec.verify.arguments import Arguments, arguments
from jaxspec.verify.verdict import Verdict

Verifier = Callable[..., Verdict]


def checked(verify: Verifier) -> Callable[..., tuple[checkify.Error, Verdict]]:
    """Make the checking twin of a verifier, for use under `jit` and `vmap`.

    It checks every input, including those after the first rejection: rows (finite, non-negative, of
    unit mass within 1e-5 for float32, 1e-3 for float16, 1e-2 for bfloat16; logits finite or -inf),
    draws (finite, in [0, 1)), tokens in range, parents before children, consistent padding, distinct
    siblings where the kind of proposal needs them. Rows that no verifier reads are not checked: those
    of padding, the draft rows of leaves, and without `bonus` the target rows of leaves.

    Args:
      verify: `verify_tree`, `verify_path`, `verify_block` or another with their arguments.

    Returns:
      A function of the same arguments that returns `(error, verdict)`. `error.get()` is None or names
      the invalid value and its place; `raise_if(error)` raises it on the host. Put `vmap` outside, so
      that the message names the sequence.

    >>> import jax, jax.numpy as jnp
    >>> import jaxspec as js
    >>> rows = jnp.array([[0.5, 0.5], [jnp.nan, 0.5]])
    >>> path = js.sampled_path(jnp.array([0]), draft_rows=jnp.array([[0.5, 0.5]]))
    >>> draws = js.round_draws(jax.random.key(0), 2).verify
    >>> error, verdict = jax.jit(js.checked(js.verify_path))(draws, path, rows, True)
    >>> error.get().split(" (")[0]
    'target row 1: entry 0 is nan'
    """
    find = jax.jit(functionalize(_check))
    # A partial application may have fixed `bonus` already.
    default = getattr(verify, "keywords", {}).get("bonus", False)

    def verify_and_check(
        draws: Draws,
        proposal: Proposal,
        target_rows: RowsLike,
        bonus: jax.Array | bool | None = None,
    ) -> tuple[checkify.Error, Verdict]:
        bonus = default if bonus is None else bonus
        error = find(arguments(draws, proposal, target_rows, bonus))
        return error, verify(draws, proposal, target_rows, bonus=bonus)

    return verify_and_check


def strict(verify: Verifier) -> Verifier:
    """Make the eager entry: a verifier that raises on the host instead of setting a flag.

    Args:
      verify: as for `checked`.

    Returns:
      A function of the same arguments, not to be used under `jit` or `vmap`.

    Raises (the function returned):
      AssertionError: a shape or dtype is wrong.
      ValueError: naming the place and value of an invalid input.
    """
    twin = jax.jit(checked(verify))

    @moves_data
    def verify_or_raise(
        draws: Draws,
        proposal: Proposal,
        target_rows: RowsLike,
        bonus: jax.Array | bool | None = None,
    ) -> Verdict:
        arguments(draws, proposal, target_rows, False if bonus is None else bonus)
        error, verdict = twin(draws, proposal, target_rows, bonus)
        raise_if(error)
        return verdict

    return verify_or_raise


def _check(given: Arguments) -> None:
    """Check the values of a verifier's arguments under a trace."""
    draws, tree = given.draws, given.tree
    message = " {value} is outside [0, 1)"
    check_all(is_uniform(draws.accept), "accept draw of node {i0}:" + message, value=draws.accept)
    check_all(is_uniform(draws.final), "final draw, number {i0}:" + message, value=draws.final)
    vocab = vocab_of(given.target, given.target.values)
    check_tree(tree, vocab, distinct_siblings=given.kind.distinct_siblings)
    nodes = jnp.arange(tree.max_nodes, dtype=jnp.int32)
    has_children = tree.children[:, 0] >= 0
    is_read = (nodes < tree.num_nodes) & (has_children | given.bonus | (nodes == ROOT))
    _check_rows("target", given.target, is_read)
    if given.draft is not None:
        _check_rows("draft", given.draft, (has_children & (nodes < tree.num_nodes))[:-1])


def _check_rows(name: str, source: RowSource, is_read: jax.Array) -> None:
    """Check the rows that are read: that they lie inside the slab, and their values."""
    if source.first is not None and is_read.shape[0]:
        count = jnp.max(jnp.where(is_read, jnp.arange(1, is_read.shape[0] + 1, dtype=jnp.int32), 0))
        slab = source.values.shape[0]
        last = slab - count
        check_all(
            (count == 0) | ((source.first >= 0) & (source.first <= last)),
            name
            + " rows: first is {first}: {count} rows of a slab of "
            + str(slab)
            + " start at 0 to {last}",
            first=source.first,
            count=count,
            last=last,
        )
    source.check(name, is_read)
