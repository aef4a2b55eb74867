"""Draws of rounds that are read twice."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxspec as js


def keyed_by_position(key: jax.Array, num_nodes: int, position: jax.Array) -> js.RoundDraws:
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    each = jax.vmap(lambda n: js.round_draws(key, 1, position + n))(nodes)
    # The final draw belongs to the round.
    final = js.round_draws(jax.random.fold_in(key, 1), 1, position).verify.final
    verify = js.Draws(accept=each.verify.accept[:, 0], final=final)
    return js.RoundDraws(draft=each.draft[:, 0], verify=verify)


def the_same_in_every_round(key: jax.Array, num_nodes: int, position: jax.Array) -> js.RoundDraws:
    return js.round_draws(key, num_nodes, 0 * position)


def with_the_final_draw_of_the_draft(
    key: jax.Array, num_nodes: int, position: jax.Array
) -> js.RoundDraws:
    draws = js.round_draws(key, num_nodes, position)
    verify = dataclasses.replace(draws.verify, final=draws.draft[1])
    return dataclasses.replace(draws, verify=verify)
