"""The checking twin: every fault has its own message with place and value; good input has none."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec as js

VOCAB = 7


def no_verifier(draws: Any, proposal: Any, target_rows: Any, bonus: Any) -> jax.Array:
    """Replace a verifier, on which the checks do not depend, and which takes long to compile."""
    del draws, proposal, target_rows
    return jnp.asarray(bonus)


check_alone = jax.jit(js.checked(no_verifier))


class Round:
    """A tree as arrays to write into: 1 and 2 below the root, 3 below 1, padding 4 and 5."""

    def __init__(self) -> None:
        tree = js.make_tree([-1, 3, 5, 2], [-1, 0, 0, 1], max_nodes=6, max_depth=3)
        self.tokens, self.parents = np.array(tree.tokens), np.array(tree.parents)
        self.children, self.level_sizes = np.array(tree.children), np.array(tree.level_sizes)
        self.accept = np.full(6, 0.5, np.float32)
        self.final = np.full(2, 0.5, np.float32)
        self.target = np.zeros((6, VOCAB), np.float32)
        self.target[:, :4] = 0.25
        self.draft = self.target.copy()
        self.temperature = np.ones(2, np.float32)
        self.bonus = True

    def arguments(self, kind: type = js.WithoutReplacement, *, logits: bool = False) -> tuple:
        tree = js.Tree(
            tokens=jnp.asarray(self.tokens),
            parents=jnp.asarray(self.parents),
            children=jnp.asarray(self.children),
            level_sizes=jnp.asarray(self.level_sizes),
        )
        target, draft = jnp.asarray(self.target), jnp.asarray(self.draft)
        if logits:
            target, draft = (
                js.Logits(values=jnp.log(rows), temperature=jnp.asarray(temperature))
                for rows, temperature in zip((target, draft), self.temperature, strict=True)
            )
        draws = js.Draws(accept=jnp.asarray(self.accept), final=jnp.asarray(self.final))
        proposal = kind(tree=tree, draft_rows=None if kind is js.PointMass else draft)
        return draws, proposal, target, jnp.asarray(self.bonus)

    def message(self, **how: Any) -> str | None:
        found = check_alone(*self.arguments(**how))[0].get()
        return None if found is None else found.split(" (`check` failed)")[0]


def put(name: str, *where: int, value: Any) -> Callable[[Round], None]:
    def change(round_: Round) -> None:
        getattr(round_, name)[where] = value

    return change


def crowd(round_: Round) -> None:
    """Give the root a third child for which it has no slot, all else consistent."""
    round_.parents[3] = 0
    round_.children[1] = -1
    round_.level_sizes[:] = [1, 3, 0, 0]


def chain_of_four(round_: Round) -> None:
    """Hang four candidates below each other, where there are three levels."""
    round_.tokens[:5], round_.parents[:5] = [-1, 3, 5, 2, 1], [-1, 0, 1, 2, 3]
    round_.children[:] = -1
    round_.children[:4, 0] = [1, 2, 3, 4]
    round_.level_sizes[:] = [1, 1, 1, 2]


FAULTS = [
    (put("accept", 3, value=np.nan), "accept draw of node 3: nan is outside [0, 1)"),
    (put("accept", 5, value=1.0), "accept draw of node 5: 1.0 is outside [0, 1)"),
    (put("accept", 0, value=-0.5), "accept draw of node 0: -0.5 is outside [0, 1)"),
    (put("final", 0, value=np.inf), "final draw, number 0: inf is outside [0, 1)"),
    (put("final", 1, value=1.5), "final draw, number 1: 1.5 is outside [0, 1)"),
    (put("tokens", 2, value=VOCAB), "node 2: token 7 is outside the vocabulary of 7"),
    (put("tokens", 1, value=-1), "node 1: token -1 is outside the vocabulary of 7"),
    (put("tokens", 3, value=2**31 - 1), "node 3: token 2147483647 is outside the vocabulary of 7"),
    (put("tokens", 5, value=3), "node 5 is padding: its token must be -1, not 3"),
    (put("tokens", 2, value=3), "nodes 1 and 2: siblings with one token, 3"),
    (put("parents", 3, value=4), "node 3: parent 4 does not come before it"),
    (put("parents", 2, value=2), "node 2: parent 2 does not come before it"),
    (put("parents", 1, value=-1), "node 1: parent -1 does not come before it"),
    (put("parents", 0, value=0), "node 0 is the root or padding: its parent must be -1, not 0"),
    (put("parents", 5, value=0), "node 5 is the root or padding: its parent must be -1, not 0"),
    (put("parents", 3, value=2), "node 1: child slot 0 holds 3, the parents give -1"),
    (put("children", 0, value=[2, 1]), "node 0: child slot 0 holds 2, the parents give 1"),
    (put("children", 0, 1, value=-1), "node 0: child slot 1 holds -1, the parents give 2"),
    (put("children", 5, 0, value=1), "node 5: child slot 0 holds 1, the parents give -1"),
    (crowd, "node 3: its parent 0 has more children than its 2 slots"),
    (put("level_sizes", value=0), "the tree counts 0 nodes: it must be from 1 to 6"),
    (put("level_sizes", 1, value=9), "the tree counts 11 nodes: it must be from 1 to 6"),
    (put("level_sizes", 3, value=1), "node 4: parent -1 does not come before it"),
    (
        put("level_sizes", value=[1, 1, 2, 0]),
        "depth 1: level_sizes has 1 nodes, the parents give 2",
    ),
    (chain_of_four, "node 4 is deeper than the 3 levels of the tree"),
    (put("target", 3, 4, value=np.nan), "target row 3: entry 4 is nan"),
    (put("target", 0, 6, value=-np.inf), "target row 0: entry 6 is -inf"),
    (put("target", 1, 6, value=-0.25), "target row 1: entry 6 is -0.25, below 0"),
    (put("target", 2, 6, value=0.5), "target row 2: mass is 1.5, not 1 within 1e-05"),
    (put("draft", 1, 2, value=np.inf), "draft row 1: entry 2 is inf"),
    (put("draft", 0, 0, value=-0.25), "draft row 0: entry 0 is -0.25, below 0"),
    (put("draft", 0, value=0), "draft row 0: mass is 0.0, not 1 within 1e-05"),
]


def test_every_fault_is_named_with_its_place_and_value() -> None:
    for change, message in FAULTS:
        round_ = Round()
        change(round_)
        assert round_.message() == message


def test_every_fault_of_logits_is_named() -> None:
    for row, entry, value, message in (
        (1, 2, np.nan, "target row 1: logit 2 is nan: only finite logits and -inf are allowed"),
        (3, 6, np.inf, "target row 3: logit 6 is inf: only finite logits and -inf are allowed"),
        (2, slice(None), -np.inf, "target row 2: every logit is -inf, so the row has no mass"),
    ):
        round_ = Round()
        round_.target[row, entry] = np.exp(value)  # the round takes the logarithm
        assert round_.message(logits=True) == message
    for (place, name), value in itertools.product(
        ((0, "target"), (1, "draft")), (-1.0, np.nan, np.inf)
    ):
        round_ = Round()
        round_.temperature[place] = value
        wanted = f"{name} temperature is {value}: it must be finite and at least 0"
        assert round_.message(logits=True) == wanted


def test_valid_input_has_no_error_whatever_the_values_that_are_not_read() -> None:
    round_ = Round()
    assert round_.message() is None
    assert round_.message(logits=True) is None
    round_.target[4:] = np.nan  # padding
    round_.draft[2:] = np.nan  # leaves and padding
    assert round_.message() is None
    assert round_.message(logits=True) is None
    round_.bonus = False
    round_.target[2:] = np.nan  # leaves, whose rows only a bonus is drawn from
    assert round_.message() is None


@pytest.mark.parametrize("kind", [js.PointMass, js.WithReplacement, js.WithoutReplacement])
def test_repeated_siblings_are_a_fault_except_with_replacement(kind: type[js.Proposal]) -> None:
    round_ = Round()
    round_.tokens[2] = round_.tokens[1]
    message = round_.message(kind=kind)
    assert (message is None) == (kind is js.WithReplacement)


def test_how_far_a_mass_may_lie_from_one_depends_on_the_dtype() -> None:
    single, half = Round(), Round()
    half.target, half.draft = half.target.astype(jnp.bfloat16), half.draft.astype(np.float16)
    for round_, rows, fine, off, message in (
        (single, single.target, 0.250005, 0.25002, r"target row 1: mass is 1\.0000\d+, .* 1e-05"),
        (half, half.target, 0.2539, 0.2656, r"target row 1: mass is 1\.01\d+, .* 0\.01"),
        (half, half.draft, 0.25049, 0.2515, r"draft row 1: mass is 1\.001\d+, .* 0\.001"),
    ):
        rows[1, 0] = fine
        assert round_.message() is None
        rows[1, 0] = off
        assert re.fullmatch(message, str(round_.message()))
        rows[1, 0] = 0.25


def two_node_path(token: int) -> js.Proposal:
    return js.PointMass(tree=js.chain(jnp.array([token])))


ROWS = jnp.array([[0.5, 0.5], [0.25, 0.75]])
DRAWS = js.Draws(accept=jnp.array([0.0, 0.25]), final=jnp.array([0.0, 0.5]))


def test_the_twin_gives_the_verdict_and_names_the_sequence_of_a_batch_that_is_at_fault() -> None:
    # A bonus fixed beforehand counts: without it the last row, which is at fault, is not read.
    verify = functools.partial(js.verify_path, bonus=True)
    axes = (None, None, 0)
    twin = jax.jit(jax.vmap(js.checked(verify), in_axes=axes))
    rows = jnp.stack([ROWS, ROWS[:, ::-1], ROWS])
    error, verdict = twin(DRAWS, two_node_path(0), rows)
    assert error.get() is None
    js.raise_if(error)
    wanted = jax.vmap(verify, in_axes=axes)(DRAWS, two_node_path(0), rows)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, verdict, wanted))
    error, _ = twin(DRAWS, two_node_path(0), rows.at[1:, 1, 0].set(jnp.nan))
    message = "at mapped index 1: target row 1: entry 0 is nan"
    assert error.get().startswith(message)
    with pytest.raises(ValueError, match=message):
        js.raise_if(error)


def test_strict_returns_the_verdict_or_raises_at_once() -> None:
    verify = js.strict(js.verify_path)
    assert verify(DRAWS, two_node_path(0), ROWS, True).tokens.tolist() == [0, 1]
    for token, rows, message in (
        (2, ROWS, "node 1: token 2 is outside the vocabulary of 2"),
        (0, ROWS.at[0, 0].set(1.0), r"target row 0: mass is 1\.5, not 1 within 1e-05"),
    ):
        with pytest.raises(ValueError, match=message):
            verify(DRAWS, two_node_path(token), rows, True)
    for draws, rows, message in (
        (DRAWS, ROWS.at[1, 0].set(jnp.nan), "target row 1: entry 0 is nan"),
        (
            dataclasses.replace(DRAWS, final=jnp.array([jnp.inf, 0.5])),
            ROWS,
            "final draw, number 0: inf",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            verify(draws, two_node_path(0), rows, True)


def test_strict_names_the_place_of_a_bad_draft_entry_as_checked_does() -> None:
    path = js.sampled_path(jnp.array([0]), jnp.array([[jnp.nan, 0.5]]))
    with pytest.raises(ValueError, match="draft row 0: entry 0 is nan"):
        js.strict(js.verify_path)(DRAWS, path, ROWS)


@pytest.mark.parametrize("first", [-1, 2, 2**31 - 1, -(2**31)])
def test_rows_that_start_outside_their_slab_are_named_and_flagged(first: int) -> None:
    path = js.sampled_path(jnp.array([0]), jnp.array([[0.5, 0.5]]))
    rows = js.Probabilities(values=jnp.full((3, 2), 0.5), first=jnp.int32(first))
    bonus = jnp.asarray(True)
    error, _ = check_alone(DRAWS, path, rows, bonus)
    assert f"target rows: first is {first}: 2 rows of a slab of 3 start at 0 to 1" in error.get()
    verdict = js.verify_path(DRAWS, path, rows, bonus)
    assert verdict.status & js.Status.OUTSIDE_SLAB
    assert int(verdict.num_tokens) == int(verdict.num_accepted)
    assert int(verdict.num_accepted) == (1 if first == 2 else 0)


def test_a_slab_may_end_before_rows_that_are_not_read() -> None:
    lengths, first = jnp.array([2, 0, 1]), jnp.array([0, 3, 4])
    rows = js.Probabilities(values=jnp.full((6, 2), 0.5), first=first)
    drafts = js.Probabilities(values=jnp.full((3, 2), 0.5), first=jnp.array([0, 2, 2]))
    draws = jax.tree.map(
        lambda x: jnp.tile(x, (3, 1)), js.Draws(accept=jnp.zeros(3), final=jnp.zeros(2))
    )

    def verify(draws: js.Draws, length: jax.Array, rows: Any, drafts: Any) -> Any:
        path = js.sampled_path(jnp.array([0, 1]), drafts, length)
        return js.checked(js.verify_path)(draws, path, rows, True)

    axes = (0, 0, js.Probabilities(values=None, first=0), js.Probabilities(values=None, first=0))
    error, verdict = jax.jit(jax.vmap(verify, in_axes=axes))(draws, lengths, rows, drafts)
    assert error.get() is None
    assert verdict.num_tokens.tolist() == [3, 1, 2]
    assert not verdict.status.any()


@pytest.mark.parametrize("length", [3, -1, -(2**31)])
def test_a_length_out_of_range_is_named_flagged_and_rejected_on_the_host(length: int) -> None:
    rows, drafts = jnp.full((3, 2), 0.5), jnp.full((2, 2), 0.5)
    draws = js.Draws(accept=jnp.zeros(3), final=jnp.zeros(2))

    @jax.jit
    def verify(length: jax.Array) -> Any:
        path = js.sampled_path(jnp.array([0, 1]), drafts, length)
        return js.checked(js.verify_path)(draws, path, rows, True)

    error, verdict = verify(jnp.int32(length))
    assert "the tree counts" in error.get()
    assert int(verdict.status) == js.Status.BAD_TREE
    assert int(verdict.num_tokens) == 0
    with pytest.raises(js.TreeError, match=f"num_drafted is {length}: must be 0 to 2"):
        js.sampled_path(jnp.array([0, 1]), drafts, length)


WRONG_CALLS = [
    ((jax.random.key(0),), {}, "draws is of type .*: must be a Draws"),
    ((js.round_draws(jax.random.key(0), 2),), {}, "draws is a RoundDraws.*`.verify`"),
    ((DRAWS, js.chain(jnp.array([0]))), {}, "proposal is a bare Tree"),
    ((DRAWS, jnp.zeros(3)), {}, "proposal is of type .*: must be one of PointMass"),
    ((DRAWS, two_node_path(0), DRAWS), {}, "target_rows is of type Draws: must be an array"),
    (
        (DRAWS, js.WithReplacement(tree=js.chain(jnp.array([0])), draft_rows=None)),
        {},
        "proposal.draft_rows is None: sampled candidates need the rows",
    ),
    ((DRAWS, js.PointMass(tree=None)), {}, "proposal.tree is None: must be a Tree"),
    (
        (DRAWS, two_node_path(0), js.Logits(values=ROWS, temperature=None)),
        {},
        "target rows: temperature is None: must be an array",
    ),
]


@pytest.mark.parametrize(("given", "options", "message"), WRONG_CALLS)
def test_an_argument_of_another_kind_is_named(given: tuple, options: dict, message: str) -> None:
    arguments = (*given, *(DRAWS, two_node_path(0), ROWS)[len(given) :])
    for verify in (
        js.verify_path,
        js.verify_tree,
        js.checked(js.verify_path),
        js.strict(js.verify_path),
    ):
        with pytest.raises(ValueError, match=message):
            verify(*arguments, **options)


def test_no_bonus_is_false_and_not_none() -> None:
    with pytest.raises(ValueError, match="bonus is None: must be a bool"):
        js.verify_path(DRAWS, two_node_path(0), ROWS, None)


def test_shapes_that_do_not_fit_are_named_with_what_to_do() -> None:
    path = two_node_path(0)
    wide = js.sampled_path(jnp.array([0]), jnp.full((1, 3), 1 / 3))
    many = jax.tree.map(lambda x: jnp.stack([x, x]), (DRAWS, path, ROWS))
    for arguments, message in (
        (many, r"tree.parents has shape \[2, 2\]: one sequence .* jax.vmap"),
        ((many[0], path, ROWS), r"draws.accept has shape \[2, 2\]: one sequence .* jax.vmap"),
        ((DRAWS, path, many[2]), r"target rows has shape \[2, 2, 2\]: one sequence .* jax.vmap"),
        ((DRAWS, path, ROWS, jnp.array([True, False])), r"bonus has shape \[2\]: .* jax.vmap"),
        ((DRAWS, wide, ROWS), "draft rows have 3 entries, target rows 2: .* probability 0"),
        ((DRAWS, path, ROWS[:1]), "target rows: 1 given, must be 2"),
        (
            (DRAWS, path, ROWS.astype(jnp.int32)),
            "target rows have dtype int32: must be a float dtype",
        ),
        ((DRAWS, path, ROWS, 1), "bonus has dtype int32: must be bool"),
        ((DRAWS, path, ROWS[:, :0]), "target rows have no entries"),
        (
            (DRAWS, path, js.Probabilities(values=ROWS[:0], first=jnp.int32(0))),
            "target rows: the slab is empty",
        ),
    ):
        with pytest.raises(AssertionError, match=message):
            js.verify_path(*arguments)


def test_rows_of_a_dtype_without_a_tolerance_are_rejected() -> None:
    path = js.sampled_path(jnp.array([0]), jnp.array([[0.5, 0.5]]))
    rows = jnp.full((2, 2), 0.5, jnp.float8_e4m3fn)
    draws = js.round_draws(jax.random.key(0), 2).verify
    with pytest.raises(AssertionError, match="float8_e4m3fn: must be a float dtype, one of"):
        js.checked(js.verify_path)(draws, path, rows)
