"""Randomness as data: what a round's draws depend on, and draws stored and read back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js


def numbers(draws: js.RoundDraws) -> dict[str, np.ndarray]:
    return {
        "draft": np.asarray(draws.draft),
        "accept": np.asarray(draws.verify.accept),
        "final": np.asarray(draws.verify.final),
    }


def test_draws_do_not_depend_on_how_many_nodes_there_are() -> None:
    few = numbers(js.round_draws(jax.random.key(3), 16, position=9))
    many = numbers(js.round_draws(jax.random.key(3), 64, position=9))
    assert (few["draft"] == many["draft"][:16]).all()
    assert (few["accept"] == many["accept"][:16]).all()
    assert (few["final"] == many["final"]).all()


def test_every_key_position_node_and_role_has_separate_draws() -> None:
    seen = []
    for seed in (0, 1):
        for position in (0, 1, 2, 1000):
            found = numbers(js.round_draws(jax.random.key(seed), 16, position=position))
            seen += [found["draft"].ravel(), found["accept"], found["final"]]
    every = np.concatenate(seen)
    assert len(every) == 8 * (32 + 16 + 2)
    # Each is one of 2^23 numbers, so that 400 of them coincide once in a hundred trials.
    assert len(np.unique(every)) == len(every)


def test_draws_are_float32_multiples_of_two_to_the_minus_23_below_one() -> None:
    draws = js.round_draws(jax.random.key(5), 4096)
    for name, values in numbers(draws).items():
        assert values.dtype == np.float32, name
        assert ((values >= 0) & (values < 1)).all()
        assert (values * 2**23 == np.floor(values * 2**23)).all()
    draft, accept = numbers(draws)["draft"], numbers(draws)["accept"]
    for column in (draft[:, 0], draft[:, 1], accept):
        assert abs(column.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(np.stack([*draft.T, accept])) - np.eye(3)).max() < 0.08


def test_a_batch_of_keys_and_positions_has_the_draws_of_its_members() -> None:
    keys, positions = jax.random.split(jax.random.key(7), 3), jnp.array([0, 5, 2**31 - 1])
    batch = jax.jit(jax.vmap(lambda key, at: js.round_draws(key, 16, at)))(keys, positions)
    for index in range(3):
        one = js.round_draws(keys[index], 16, int(positions[index]))
        for name, values in numbers(one).items():
            assert (values == numbers(batch)[name][index]).all(), name


def test_draws_come_back_from_a_json_record_bit_for_bit() -> None:
    draws = js.round_draws(jax.random.key(11), 64, position=4)
    text = json.dumps(draws.to_plain())
    again = js.RoundDraws.from_plain(json.loads(text))
    for name, values in numbers(draws).items():
        found = numbers(again)[name]
        assert found.dtype == np.float32
        assert (found.view(np.uint32) == values.view(np.uint32)).all(), name
    assert isinstance(again.draft, jax.Array)


def test_the_extremes_of_a_draw_survive_a_record() -> None:
    extremes = np.array([0.0, 2**-24, 1e-38, 1 - 2**-24], np.float32)
    record = {"draft": np.zeros((4, 2)).tolist(), "accept": extremes.tolist(), "final": [0, 0.5]}
    found = js.RoundDraws.from_plain(json.loads(json.dumps(record)))
    assert (np.asarray(found.verify.accept) == extremes).all()


GOOD = {"draft": [[0, 0.5], [0, 0.25]], "accept": [0.0, 0.75], "final": [0.0, 0.5]}


INVALID = (
    ({"final": [0.0, float("nan")]}, r"draws: final\[1\] is nan, outside \[0, 1\)"),
    ({"accept": [0.0, 1.0]}, r"draws: accept\[1\] is 1.0, outside \[0, 1\)"),
    ({"accept": [-1e-300, 0.5]}, r"draws: accept\[0\] is -1e-300, outside \[0, 1\)"),
    # Below 1 as a double, 1 as the float32 it would be rounded to.
    ({"accept": [0.0, 0.99999999]}, r"draws: accept\[1\] is 0.99999999, outside \[0, 1\)"),
    ({"draft": [[0, 0.5], [0, float("inf")]]}, r"draws: draft\[1, 1\] is inf, outside"),
    ({"final": [None, 0.5]}, r"draws: final\[0\] is nan, outside \[0, 1\)"),
    ({"draft": [[0, 0.5]]}, r"draws: draft has shape \(1, 2\), must be \(2, 2\)"),
    ({"accept": [[0.0, 0.5]]}, r"draws: accept has shape|draws: draft has shape"),
    ({"accept": []}, r"draws: draft has shape \(2, 2\), must be \(0, 2\)"),
    ({"final": [0.5]}, r"draws: final has shape \(1,\), must be \(2,\)"),
    ({"draft": [[0, 0.5], [0]]}, "draft"),
    ({"final": ["a", 0.5]}, "final"),
    ({"accept": {"0": 0.5}}, "accept"),
    ({"accept": ["0.25"]}, "accept"),
    ({"accept": [True]}, "accept"),
    ({"accept": [0.25 + 0.5j]}, "accept is not an array of numbers"),
)


def test_an_invalid_record_is_named_with_the_place_and_value() -> None:
    for change, message in INVALID:
        with pytest.raises(js.DrawError, match=message):
            js.RoundDraws.from_plain({**GOOD, **change})
    for name in GOOD:
        record = {key: value for key, value in GOOD.items() if key != name}
        with pytest.raises(js.DrawError, match=f"field '{name}' is missing"):
            js.RoundDraws.from_plain(record)


def test_verifiers_take_draws_in_float32_only() -> None:
    path = js.sampled_path(jnp.array([0]), draft_rows=jnp.array([[0.5, 0.5]]))
    rows = jnp.full((2, 2), 0.5)
    for accept, final in (
        (jnp.zeros(2, jnp.bfloat16), jnp.zeros(2)),
        (jnp.zeros(2), jnp.zeros(2, jnp.float16)),
        (jnp.zeros(2, jnp.int32), jnp.zeros(2)),
        (jnp.zeros(3), jnp.zeros(2)),
        (jnp.zeros(2), jnp.zeros(1)),
    ):
        with pytest.raises(AssertionError):
            js.verify_path(js.Draws(accept=accept, final=final), path, rows)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_under_vmap_a_request_has_its_own_draws_whatever_the_kind_of_key(kind: str) -> None:
    keys = jax.random.split(jax.random.key(7, impl=kind), 3)
    batch = jax.vmap(lambda key: js.round_draws(key, num_nodes=3, position=5))(keys)
    for row in range(3):
        alone = numbers(js.round_draws(keys[row], num_nodes=3, position=5))
        for name, values in numbers(batch).items():
            assert np.array_equal(values[row], alone[name])
    assert np.unique(np.asarray(batch.verify.accept)).size == 9


def test_an_invalid_position_is_named_and_shares_no_draws() -> None:
    for position in (1.9, True, "3", -1, 2**32, np.array([1, 2]), None):
        with pytest.raises(ValueError, match=r"position is .* must be one integer"):
            js.round_draws(jax.random.key(0), 2, position)
    with pytest.raises(ValueError, match=r"position is .* must be one integer"):
        jax.jit(lambda at: js.round_draws(jax.random.key(0), 2, at))(1.9)


def test_an_argument_that_is_not_one_key_is_named() -> None:
    two = jax.random.split(jax.random.key(0))
    for key in (0, None, two, jnp.zeros((3, 2), jnp.uint32), jnp.zeros(2)):
        with pytest.raises(ValueError, match=r"key is .*: must be one PRNG key"):
            js.round_draws(key, 2)
