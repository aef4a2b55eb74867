"""One call for a batch of trees: each sequence as if it were alone, with shared or own topologies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.random_rounds import BATCH, random_rounds

import jaxspec as js
from jaxspec import layouts

each_rule = pytest.mark.parametrize("rule", js.RULES.values(), ids=js.RULES)


@each_rule
@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_a_sequence_of_a_batch_of_trees_is_verified_as_if_it_were_alone(
    rule: js.Rule, is_shared: bool
) -> None:
    rounds = random_rounds(rule, 30)
    rounds.bonus[:] = True
    if is_shared:  # the topology of the largest; tokens that are then padding are drawn by nobody
        largest = int(np.argmax(rounds.level_sizes.sum(axis=1)))
        for name in ("parents", "children", "level_sizes"):
            getattr(rounds, name)[:] = getattr(rounds, name)[largest]
    with np.errstate(divide="ignore"):
        logits = np.log(rounds.target).reshape(-1, rounds.target.shape[-1])
    temperature = np.random.default_rng(3).choice([0.0, 0.5, 1.0], BATCH).astype(np.float32)
    draws, proposal, _, _ = rounds.arguments(rule.proposal)
    sampled = rule.proposal is not js.PointMass
    draft = jnp.asarray(rounds.draft.reshape(logits.shape)) if sampled else None
    target = js.Logits(values=jnp.asarray(logits), temperature=jnp.asarray(temperature))
    trees = proposal.tree
    if is_shared:
        names = ("parents", "children", "level_sizes")
        trees = dataclasses.replace(trees, **{name: getattr(trees, name)[0] for name in names})
    output = layouts.verify_trees(trees, draft, target, draws, rule)

    rows = js.Logits(
        values=jnp.asarray(logits.reshape(rounds.target.shape)), temperature=target.temperature
    )
    wanted = jax.vmap(rule.verify)(draws, proposal, rows, jnp.ones(BATCH, bool))
    for name in ("tokens", "num_tokens", "num_accepted", "status"):
        np.testing.assert_array_equal(getattr(output, name), getattr(wanted, name), err_msg=name)
    nodes = rounds.tokens.shape[1]
    first = np.arange(BATCH)[:, None] * nodes
    path = np.asarray(wanted.path)
    np.testing.assert_array_equal(output.slots, np.where(path >= 0, first + path, -1))
    assert np.asarray(output.num_accepted).any()


def test_what_does_not_fit_a_batch_of_trees_is_an_error_that_says_what_does() -> None:
    tree = js.make_tree([-1, 0], [-1, 0])
    draws = js.Draws(accept=jnp.zeros((1, 2)), final=jnp.zeros((1, 2)))
    rows = jnp.full((2, 2), 0.5)
    with pytest.raises(ValueError, match="draft_rows do not fit rule 'point_mass': it takes none"):
        layouts.verify_trees(tree, rows, rows, draws)
    with pytest.raises(ValueError, match="it takes the rows that candidates were drawn from"):
        layouts.verify_trees(tree, None, rows, draws, js.RULES["without_replacement"])
    with pytest.raises(ValueError, match="trees is of type PointMass: must be a Tree"):
        layouts.verify_trees(js.PointMass(tree=tree), None, rows, draws)
