"""One call for a round of trees: a batch of them over flat rows in, an engine's output tokens out."""

import functools

import jax
import jax.numpy as jnp

from jaxspec.checks import assert_kind
from jaxspec.draws import Draws
from jaxspec.layouts.flat import rows_of
from jaxspec.layouts.verify import FlatOutput
from jaxspec.proposals import PointMass
from jaxspec.rows import RowsLike
from jaxspec.trees import NONE, Tree
from jaxspec.verify import RULES, Rule, Verdict
from jaxspec.verify.rules import assert_rule

_RANKS = Tree(tokens=1, parents=1, children=2, level_sizes=1)  # type: ignore[arg-type]


@functools.partial(jax.jit, static_argnames=("rule", "bonus"))
def verify_trees(
    trees: Tree,
    draft_rows: RowsLike | None,
    target_rows: RowsLike,
    draws: Draws,
    rule: Rule = RULES["point_mass"],
    *,
    bonus: bool = True,
) -> FlatOutput:
    """Verify a round of a batch of trees of one capacity (traced), whose rows are flat.

    Rows stay where they are: a sequence is an offset into them. What comes out for a sequence does not
    depend on the others.

    Args:
      trees: the candidates. Each field has a leading B, or is shared by all: with one topology for the
        batch (Medusa, Sequoia) only `tokens` [B, N] has it.
      draft_rows: [B N, V], of each sequence the rows of its nodes in order; None for point masses.
        `Logits` may have settings for each sequence, [B], or for all, [].
      target_rows: [B N, V], as `draft_rows`.
      draws: the uniforms, with a leading axis B, for N nodes; see `request_draws` with
        `max_spec_len` = N - 1.
      rule: any rule; how the candidates were drawn must be what it is for.
      bonus: whether a fully accepted path is followed by one more token.

    Returns:
      The `FlatOutput`: `tokens` [B, D + 1], and `slots` [B, D + 1] of the B N entries of the forward
      pass: the root's and those of the accepted path.

    Raises:
      ValueError: an argument is of another kind, or draft rows do not fit the rule.
      AssertionError: a shape or dtype is wrong.

    Guarantee: that of the rule.

    >>> from jaxspec import make_tree
    >>> from jaxspec.layouts import request_draws, request_keys
    >>> tree = make_tree([-1, 0, 1], [-1, 0, 0])
    >>> trees = Tree(**{**vars(tree), "tokens": jnp.array([[-1, 0, 1], [-1, 1, 2]])})
    >>> draws = request_draws(request_keys([3, 4]), jnp.array([9, 5]), max_spec_len=2)
    >>> rows = jnp.tile(jnp.array([0.0, 0.5, 0.5]), (6, 1))
    >>> output = verify_trees(trees, None, rows, draws)
    >>> output.num_accepted.tolist(), output.slots[:, 0].tolist()
    ([0, 1], [0, 3])
    """
    assert_kind("trees", trees, Tree, "a Tree, whose tokens have a leading B")
    assert_rule("rule", rule)
    if (draft_rows is None) != (rule.proposal is PointMass):
        needed = (
            "none" if rule.proposal is PointMass else "the rows that candidates were drawn from"
        )
        raise ValueError(f"draft_rows do not fit rule {rule.name!r}: it takes {needed}")
    nodes = trees.max_nodes
    axes = jax.tree.map(lambda x, rank: 0 if jnp.ndim(x) > rank else None, trees, _RANKS)

    def one(sequence: jax.Array, draws: Draws, tree: Tree) -> Verdict:
        first = sequence * nodes
        drafted = None
        if draft_rows is not None:
            drafted = rows_of("draft", draft_rows, sequence, first)
        proposal = rule.proposal(tree=tree, draft_rows=drafted)
        return rule.verify(draws, proposal, rows_of("target", target_rows, sequence, first), bonus)

    numbers = jnp.arange(draws.final.shape[0], dtype=jnp.int32)
    verdicts = jax.vmap(one, in_axes=(0, 0, axes))(numbers, draws, trees)
    path = verdicts.path
    return FlatOutput(
        tokens=verdicts.tokens,
        num_tokens=verdicts.num_tokens,
        num_accepted=verdicts.num_accepted,
        slots=jnp.where(path != NONE, numbers[:, None] * nodes + path, NONE),
        status=verdicts.status,
    )
