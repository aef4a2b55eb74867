"""Round records: what is replayed, and what a changed record shows."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toys import DRAFTERS, draft, round_draws, target

import jaxspec as js
from jaxspec import storage
from jaxspec.decode import Decoder, RoundRecord, differences, load, replay_round, save
from jaxspec.draft import FixedTree

PROMPT = (0, 2)
each_drafter = pytest.mark.parametrize("name", DRAFTERS)
each_form = pytest.mark.parametrize("form", ["json", "npz"])


@functools.cache
def rounds_of(name: str, *, seed: int = 0, bonus: bool = True) -> list[RoundRecord]:
    decoder = Decoder(target().provider, DRAFTERS[name](draft().provider), bonus=bonus)
    start = decoder.start(PROMPT, jax.random.key(seed), new_tokens=8)
    return [record for _, record in decoder.rounds(start)]


def loaded(file: Path) -> list[RoundRecord]:
    rounds = load(file)
    assert isinstance(rounds, list)
    return rounds


def leaves(record: RoundRecord) -> list[np.ndarray]:
    trees = (record.draws, record.proposal, record.target_rows, record.verdict)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


@pytest.mark.parametrize("stop_tokens", [(), (1,)])
@pytest.mark.parametrize("rule", ["with_replacement", "without_replacement", "traversal"])
def test_sampled_trees_replay_without_a_difference(rule: str, stop_tokens: tuple[int, ...]) -> None:
    drafter = FixedTree(draft().provider, (2, 2), js.RULES[rule])
    decoder = Decoder(target().provider, drafter)
    for key in jax.random.split(jax.random.key(0), 8):
        start = decoder.start(PROMPT, key, new_tokens=8, stop_tokens=stop_tokens)
        assert differences([record for _, record in decoder.rounds(start)]) == []


@each_drafter
@each_form
def test_rounds_on_file_come_back_bit_for_bit_and_replay_without_a_difference(
    tmp_path: Path, name: str, form: str
) -> None:
    rounds = rounds_of(name)
    file = tmp_path / f"rounds.{form}"
    save(file, rounds)
    read = loaded(file)
    assert len(read) == len(rounds)
    for mine, theirs in zip(rounds, read, strict=True):
        for field in ("position", "rule", "target", "draft", "bonus"):
            assert getattr(mine, field) == getattr(theirs, field)
        assert type(mine.proposal) is type(theirs.proposal)
        for one, other in zip(leaves(mine), leaves(theirs), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    assert differences(rounds) == differences(read) == []


@each_drafter
def test_a_record_names_its_models_and_its_rule(name: str) -> None:
    for record in rounds_of(name):
        assert record.target == "target"
        assert record.draft == (None if name == "none" else "draft")
        assert record.rule == DRAFTERS[name](draft().provider).rule.name


@each_drafter
def test_a_round_replays_to_its_candidates_and_its_verdict(name: str) -> None:
    for record in rounds_of(name, bonus=False):
        drafted, verdict = replay_round(record)
        assert drafted[0] == -1
        tokens = np.asarray(record.proposal.tree.tokens)
        np.testing.assert_array_equal(drafted[1:], tokens[1:])
        jax.tree.map(np.testing.assert_array_equal, verdict, record.verdict)


def test_no_rounds_are_a_file_too(tmp_path: Path) -> None:
    save(tmp_path / "none.json", [])
    assert loaded(tmp_path / "none.json") == []
    assert differences([]) == []


# --- a changed file


def saved(tmp_path: Path, rounds: list[RoundRecord]) -> tuple[Path, list[Any]]:
    save(tmp_path / "r.json", rounds)
    return tmp_path / "r.json", json.loads((tmp_path / "r.json").read_text())["content"]


def rewrite(file: Path, content: list[Any]) -> None:
    file.write_text(json.dumps({"schema": storage.SCHEMA, "kind": "rounds", "content": content}))


def rounds_with_a_rejection(name: str) -> tuple[list[RoundRecord], int]:
    """Rounds one of which, of full depth, accepted nothing; and the number of that one."""
    return next(
        (rounds, number)
        for seed in range(20)
        for rounds in [rounds_of(name, seed=seed)]
        for number, record in enumerate(rounds)
        if int(record.proposal.tree.level_sizes[2]) > 0 and int(record.verdict.num_accepted) == 0
    )


def found_after(
    tmp_path: Path, rounds: list[RoundRecord], change: Callable[[Any], None], number: int
) -> list[tuple[int, int, str]]:
    file, content = saved(tmp_path, rounds)
    change(content[number])
    rewrite(file, content)
    return [(each.round, each.position, each.field) for each in differences(loaded(file))]


@pytest.mark.parametrize(
    ("name", "node"), [("path by token", 1), ("path by block", 2), ("fixed tree", 1)]
)
def test_a_changed_accept_draw_shows_as_another_verdict_of_that_round(
    tmp_path: Path, name: str, node: int
) -> None:
    rounds, number = rounds_with_a_rejection(name)

    def accept(plain: Any) -> None:
        plain["draws"]["accept"][node] = 0.0  # the node is the first to be tested

    found = found_after(tmp_path, rounds, accept, number)
    assert {each[:2] for each in found} == {(number, rounds[number].position)}
    assert {"num_accepted", "path", "stop_node"} <= {field for _, _, field in found}
    assert "tokens drafted" not in {field for _, _, field in found}


@pytest.mark.parametrize("name", ["path by token", "path by block"])
def test_a_changed_token_of_a_path_shows_as_not_drawn(tmp_path: Path, name: str) -> None:
    rounds = rounds_of(name)

    def change(plain: Any) -> None:
        tokens = plain["tree"]["tokens"]["data"]
        tokens[1] = (tokens[1] + 1) % 3

    found = found_after(tmp_path, rounds, change, 1)
    assert (1, rounds[1].position, "tokens drafted") in found
    assert {number for number, _, _ in found} == {1}


def test_a_changed_draft_draw_shows_as_another_token(tmp_path: Path) -> None:
    rounds = rounds_of("path by token")

    def change(plain: Any) -> None:
        pair = plain["draws"]["draft"][1]
        pair[1] = (pair[1] + 0.5) % 1

    position = rounds[0].position
    assert found_after(tmp_path, rounds, change, 0) == [(0, position, "tokens drafted")]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_changed_target_row_shows_as_another_verdict_of_that_round(
    tmp_path: Path, name: str
) -> None:
    rounds = rounds_of(name)

    def change(plain: Any) -> None:
        # The root's row becomes sure of a token that was not the first to be emitted.
        other = (plain["verdict"]["tokens"]["data"][0] + 1) % 3
        plain["target_rows"]["data"][:3] = np.eye(3)[other].tolist()

    found = found_after(tmp_path, rounds, change, 1)
    assert (1, rounds[1].position, "tokens") in found
    assert {number for number, _, _ in found} == {1}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(js.Verdict)])
def test_a_changed_field_of_a_verdict_shows_as_that_field_of_that_round(
    tmp_path: Path, field: str
) -> None:
    rounds = rounds_of("fixed tree")

    def change(plain: Any) -> None:
        plain["verdict"][field]["data"][0] += 1

    assert found_after(tmp_path, rounds, change, 1) == [(1, rounds[1].position, field)]


def test_a_difference_says_in_a_line_what_was_and_what_is(tmp_path: Path) -> None:
    rounds = rounds_of("fixed tree")
    file, content = saved(tmp_path, rounds)
    was = int(rounds[1].verdict.status)
    content[1]["verdict"]["status"]["data"][0] = 8
    rewrite(file, content)
    (found,) = differences(loaded(file))
    assert str(found) == (
        f"round 1 (root at position {rounds[1].position}): status was 8, is now {was}"
    )


# --- other draws


@pytest.mark.parametrize("name", DRAFTERS)
def test_other_accept_and_final_draws_give_another_verdict_of_the_same_candidates(
    name: str,
) -> None:
    outcomes = []
    for record in rounds_of(name)[:2]:
        outcomes.append(set())
        for seed in range(12):
            verify = round_draws(jax.random.key(seed), record.proposal.tree.max_nodes).verify
            draws = js.RoundDraws(draft=record.draws.draft, verify=verify)
            drafted, verdict = replay_round(record, draws)
            np.testing.assert_array_equal(drafted, replay_round(record)[0])
            expected = js.RULES[record.rule].verify(
                verify, record.proposal, jnp.asarray(record.target_rows), record.bonus
            )
            jax.tree.map(np.testing.assert_array_equal, verdict, jax.device_get(expected))
            assert int(verdict.status) == 0
            outcomes[-1].add(verdict.tokens.tobytes())
    assert max(map(len, outcomes)) > 1


def test_other_draft_draws_that_lead_to_the_same_candidates_are_replayed() -> None:
    record = rounds_of("path by token")[0]
    nearby = jnp.nextafter(record.draws.draft, jnp.float32(0))
    _, verdict = replay_round(record, js.RoundDraws(draft=nearby, verify=record.draws.verify))
    jax.tree.map(np.testing.assert_array_equal, verdict, record.verdict)


@pytest.mark.parametrize("node", [1, 2])
def test_other_draft_draws_that_lead_elsewhere_are_an_error_that_names_the_node(node: int) -> None:
    record = rounds_of("path by token")[0]
    moved = record.draws.draft.at[node, 1].set((record.draws.draft[node, 1] + 0.5) % 1)
    draws = js.RoundDraws(draft=moved, verify=record.draws.verify)
    with pytest.raises(js.DrawError, match=f"draft draw of node {node} leads to token"):
        replay_round(record, draws)


def test_draws_of_another_kind_or_for_another_tree_are_an_error() -> None:
    record = rounds_of("path by token")[0]
    with pytest.raises(js.DrawError, match=r"shapes \(9, 2\) and \(9,\): .* room for 3 nodes"):
        replay_round(record, round_draws(jax.random.key(0), 9))
    other: Any
    for other in (record.draws.verify, jax.random.key(0), 3):
        with pytest.raises(ValueError, match=r"draws is .*: must be RoundDraws"):
            replay_round(record, other)


def test_draft_draws_of_deterministic_candidates_do_not_matter() -> None:
    record = rounds_of("adaptive tree")[0]
    moved = js.RoundDraws(draft=1 - record.draws.draft, verify=record.draws.verify)
    _, verdict = replay_round(record, moved)
    jax.tree.map(np.testing.assert_array_equal, verdict, record.verdict)
