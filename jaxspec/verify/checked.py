"""The checking twin of a verifier."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from jaxspec.checks import functionalise, raise_if
from jaxspec.draws import Draws, check_draws
from jaxspec.proposals import Proposal, Rows, check_proposal
from jaxspec.transfers import moves_data
from jaxspec.verify.arguments import assert_arguments
from jaxspec.verify.verdict import Verdict

Verifier = Callable[..., Verdict]


def checked(verify: Verifier) -> Callable[..., tuple[checkify.Error, Verdict]]:
    """Make the checking twin of a verifier, for use under `jit` and `vmap`.

    It checks every input, those after the first rejection too: rows (finite, non-negative, of unit
    mass within 1e-5 for float32, 1e-3 for float16, 1e-2 for bfloat16; logits finite or -inf),
    draws (finite, in [0, 1)), tokens in range, parents before children, consistent padding, distinct
    siblings where the kind of proposal needs them. Rows that no verifier may read are not looked at:
    those of padding, the draft rows of leaves, and without `bonus` the target rows of leaves.

    Args:
      verify: `verify_tree`, `verify_path`, `verify_block` or another with their arguments.

    Returns:
      A function of the same arguments that returns `(error, verdict)`. `error.get()` is None or says
      what is wrong where; `raise_if(error)` raises it on the host. Put `vmap` outside, so that the
      message names the sequence.

    >>> import jax, jax.numpy as jnp
    >>> import jaxspec as js
    >>> rows = jnp.array([[0.5, 0.5], [jnp.nan, 0.5]])
    >>> path = js.sampled_path(jnp.array([0]), draft_rows=jnp.array([[0.5, 0.5]]))
    >>> draws = js.round_draws(jax.random.key(0), 2).verify
    >>> error, verdict = jax.jit(js.checked(js.verify_path))(draws, path, rows, True)
    >>> error.get().split(" (")[0]
    'target row 1: entry 0 is nan'
    """

    def check(draws: Draws, proposal: Proposal, target_rows: Rows, bonus: jax.Array) -> None:
        check_draws(draws)
        check_proposal(proposal, target_rows, bonus)

    find = jax.jit(functionalise(check))
    # A partial application may have settled `bonus` already.
    default = getattr(verify, "keywords", {}).get("bonus", False)

    def verify_and_check(
        draws: Draws, proposal: Proposal, target_rows: Rows, bonus: jax.Array | bool | None = None
    ) -> tuple[checkify.Error, Verdict]:
        bonus = default if bonus is None else bonus
        assert_arguments(draws, proposal, target_rows, bonus)
        error = find(draws, proposal, target_rows, jnp.asarray(bonus))
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
      ValueError: naming the place and value of a bad input.
    """
    twin = jax.jit(checked(verify))

    @moves_data
    def verify_or_raise(
        draws: Draws, proposal: Proposal, target_rows: Rows, bonus: jax.Array | bool | None = None
    ) -> Verdict:
        assert_arguments(draws, proposal, target_rows, False if bonus is None else bonus)
        error, verdict = twin(draws, proposal, target_rows, bonus)
        raise_if(error)
        return verdict

    return verify_or_raise
