"""Round records: what is replayed, what a changed record shows, and files that are no rounds."""

import dataclasses
import functools
import io
import json
import tracemalloc
import zipfile
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
from jaxspec.decode import Decoder, RoundRecord, differences, load_rounds, replay_round, save_rounds
from jaxspec.storage import RecordError

PROMPT = (0, 2)
each_drafter = pytest.mark.parametrize("name", DRAFTERS)
each_form = pytest.mark.parametrize("form", ["json", "npz"])


@functools.cache
def rounds_of(name: str, *, seed: int = 0, bonus: bool = True) -> list[RoundRecord]:
    decoder = Decoder(target().provider, DRAFTERS[name](draft().provider), 8, bonus)
    start = decoder.start(PROMPT, jax.random.key(seed))
    return [record for _, record in decoder.rounds(start)]


def leaves(record: RoundRecord) -> list[np.ndarray]:
    trees = (record.draws, record.proposal, record.target_rows, record.verdict)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trees)]


@each_drafter
@each_form
def test_rounds_on_file_come_back_bit_for_bit_and_replay_without_a_difference(
    tmp_path: Path, name: str, form: str
) -> None:
    rounds = rounds_of(name)
    file = tmp_path / f"rounds.{form}"
    save_rounds(file, rounds)
    read = load_rounds(file)
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
    save_rounds(tmp_path / "none.json", [])
    assert load_rounds(tmp_path / "none.json") == []
    assert differences([]) == []


# --- a changed file


def saved(tmp_path: Path, rounds: list[RoundRecord]) -> tuple[Path, list[Any]]:
    save_rounds(tmp_path / "r.json", rounds)
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
    return [(each.round, each.position, each.field) for each in differences(load_rounds(file))]


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
    (found,) = differences(load_rounds(file))
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
def test_other_draft_draws_that_lead_elsewhere_are_refused_and_the_node_named(node: int) -> None:
    record = rounds_of("path by token")[0]
    moved = record.draws.draft.at[node, 1].set((record.draws.draft[node, 1] + 0.5) % 1)
    draws = js.RoundDraws(draft=moved, verify=record.draws.verify)
    with pytest.raises(js.DrawError, match=f"draft draw of node {node} leads to token"):
        replay_round(record, draws)


def test_draws_of_another_kind_or_for_another_tree_are_refused() -> None:
    record = rounds_of("path by token")[0]
    with pytest.raises(js.DrawError, match=r"shapes \(9, 2\) and \(9,\): .* room for 3 nodes"):
        replay_round(record, round_draws(jax.random.key(0), 9))
    other: Any
    for other in (record.draws.verify, jax.random.key(0), 3):
        with pytest.raises(ValueError, match=r"draws is .*: must be RoundDraws"):
            replay_round(record, other)


def test_draft_draws_of_a_tree_that_nobody_drew_do_not_matter() -> None:
    record = rounds_of("adaptive tree")[0]
    moved = js.RoundDraws(draft=1 - record.draws.draft, verify=record.draws.verify)
    _, verdict = replay_round(record, moved)
    jax.tree.map(np.testing.assert_array_equal, verdict, record.verdict)


# --- files that are no rounds


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Make the change that puts a value at a place."""

    def change(plain: Any) -> None:
        for step in path[:-1]:
            plain = plain[step]
        plain[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    def change(plain: Any) -> None:
        for step in path[:-1]:
            plain = plain[step]
        del plain[path[-1]]

    return change


def children_in_a_circle(plain: Any) -> None:
    """The first child's child is itself: a walk over it would not end."""
    width = plain["tree"]["children"]["shape"][1]
    plain["tree"]["children"]["data"][width] = 1


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "no rule": (drop("rule"), "'rule' is missing"),
    "an unknown rule": (put("rule", value="guess"), "rule 'guess' is none of token, block"),
    "a rule that is a list": (put("rule", value=["token"]), "rule is a list, wanted a string"),
    "a rule that needs draft rows": (
        put("rule", value="token"),
        "tree has 5 nodes, 2 child slots and .* for single paths",
    ),
    "no draws": (drop("draws"), "'draws' is missing"),
    "no final draw": (drop("draws", "final"), "draws: 'final' is missing"),
    "a draw of 1": (put("draws", "accept", 1, value=1.0), r"accept\[1\] is 1.0, outside"),
    "draws for another tree": (
        put(
            "draws",
            value={"draft": [[0, 0], [0, 0]], "accept": [0, 0], "final": [0, 0]},
        ),
        r"draws\.draft has shape \(2, 2\), wanted \(5, 2\)",
    ),
    "no tree": (drop("tree"), "'tree' is missing"),
    "a tree that is a word": (put("tree", value="oak"), "tree is 'oak', wanted an object"),
    "no level sizes": (drop("tree", "level_sizes"), "'level_sizes' is missing"),
    "a parent after its child": (put("tree", "parents", "data", 1, value=4), "node 1: parent 4"),
    "siblings of one token": (put("tree", "tokens", "data", value=[2, 1, 1, 0, 0]), "siblings"),
    "children in a circle": (children_in_a_circle, "children do not follow"),
    "level sizes of another tree": (
        put("tree", "level_sizes", "data", value=[1, 3, 1]),
        "level_sizes do not follow",
    ),
    "a token outside the vocabulary": (
        put("tree", "tokens", "data", value=[2, 7, 1, 0, 0]),
        "outside the vocabulary of 3",
    ),
    "half a token": (put("tree", "tokens", value=[2, 0.5, 1, 0, 0]), "wanted 32-bit integers"),
    "no target rows": (drop("target_rows"), "'target_rows' is missing"),
    "target rows of another tree": (
        put("target_rows", value=[[0.5, 0.25, 0.25]] * 4),
        r"target_rows has shape \(4, 3\), wanted \(5, 3\)",
    ),
    "one target row": (put("target_rows", value=[0.5, 0.25, 0.25]), "rank"),
    "words for target rows": (put("target_rows", value=[["a"]]), "wanted numbers"),
    "a target row beyond float32": (
        put("target_rows", value=[[1e300] * 3] * 5),
        r"target_rows\[0\]\[0\] is 1e\+300, wanted a number finite in float32",
    ),
    "ragged target rows": (
        put("target_rows", value=[*[[0.5, 0.25, 0.25]] * 4, [1.0]]),
        "inhomogeneous: 1 items along axis 1",
    ),
    "a position that is a word": (
        put("position", value="3"),
        "position is '3', wanted an integer from 0",
    ),
    "a bonus that is a word": (
        put("bonus", value="false"),
        "bonus is 'false', wanted true or false",
    ),
    "a target that is a number": (put("target", value=3), "target is 3, wanted a string"),
    "a draft that is a number": (put("draft", value=3), "draft is 3, wanted a string"),
    "no verdict": (drop("verdict"), "'verdict' is missing"),
    "a verdict without status": (drop("verdict", "status"), "'status' is missing"),
    "half a token emitted": (put("verdict", "tokens", value=[0.5, 1, 1]), "wanted 32-bit integers"),
    "child slots of another tree": (
        put("tree", "children", value=[[-1] * 20_000]),
        r"tree.children has shape \(1, 20000\)",
    ),
    "child slots for each node of a wider tree": (
        put("tree", "children", value=[[-1] * 9] * 4),
        r"tree.children has shape \(4, 9\), wanted \(5, 9\)",
    ),
    "a tree of no nodes": (put("tree", "tokens", value=[]), r"tree.tokens has shape \(0,\)"),
    "more nodes than there is room for": (
        put("tree", "level_sizes", "data", value=[1, 2, 3]),
        "tree.level_sizes count 6 nodes, wanted 1 to 5",
    ),
    "draft rows of point masses": (
        put("draft_rows", value=[[0.5, 0.25, 0.25]] * 5),
        "draft_rows must be null: candidates of rule 'point_mass' are point masses",
    ),
    "a draw beyond float32": (put("draws", "final", value=[1e300, 0.5]), r"final\[0\] is 1e\+300"),
    "a path through no node": (
        put("verdict", "path", value=[0, 7, -1]),
        r"verdict.path\[1\] is 7, wanted an integer from -1 to 4",
    ),
    "a field too many": (put("mood", value=1), "holds an unknown field: 'mood'"),
    "a long word for a rule": (put("rule", value="x" * 10_000), r"rule 'x+\.\.\.x+' is none of"),
    "a verdict of another depth": (put("verdict", "path", value=[0, 1]), r"path has shape \(2,\)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_malformed_round_is_refused_and_named(tmp_path: Path, change: str) -> None:
    make, message = CHANGES[change]
    file, content = saved(tmp_path, rounds_of("fixed tree")[:2])
    make(content[1])
    rewrite(file, content)
    with pytest.raises(RecordError, match=rf"r\.json: round 1: .*(?s:.*)(?:{message})"):
        load_rounds(file)


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("children", (5, 2 * 10**6)),
        ("children", (10**7, 1)),
        ("tokens", (10**7,)),
        ("level_sizes", (10**7,)),
        ("target_rows", (10**7, 1)),
    ],
)
def test_a_small_file_cannot_ask_for_the_memory_of_a_large_array(
    tmp_path: Path, field: str, shape: tuple[int, ...]
) -> None:
    file = tmp_path / "r.npz"
    save_rounds(file, rounds_of("fixed tree")[:1])
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    (plain,) = json.loads(arrays["header"].tobytes())["content"]
    name = {**plain["tree"], **plain}[field]["$npz"]
    lie = io.BytesIO()
    declared = {"descr": "|i1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(lie, declared)
    del arrays[name]
    np.savez_compressed(file, **arrays)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", lie.getvalue() + bytes(10**7))
    assert file.stat().st_size < 20_000
    tracemalloc.start()
    with pytest.raises(RecordError, match=rf"r\.npz: round 0: .*{field} has shape"):
        load_rounds(file)
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_rows_of_a_path_that_fit_no_path_are_refused(tmp_path: Path) -> None:
    file, content = saved(tmp_path, rounds_of("path by token"))
    content[0]["draft_rows"] = None
    rewrite(file, content)
    with pytest.raises(RecordError, match="round 0: "):
        load_rounds(file)
    content[0]["draft_rows"] = [[0.5, 0.5]] * 2
    rewrite(file, content)
    with pytest.raises(RecordError, match="round 0: "):
        load_rounds(file)


@pytest.mark.parametrize("plain", [None, 3, "round", [1]])
def test_a_round_that_is_no_object_is_refused_and_named(tmp_path: Path, plain: Any) -> None:
    storage.save(tmp_path / "r.json", "rounds", [plain])
    with pytest.raises(RecordError, match=r"round 0: a .*, wanted an object"):
        load_rounds(tmp_path / "r.json")


def test_rounds_that_are_no_list_are_refused(tmp_path: Path) -> None:
    storage.save(tmp_path / "r.json", "rounds", {"rounds": []})
    with pytest.raises(RecordError, match="rounds must be a list"):
        load_rounds(tmp_path / "r.json")


def test_a_snapshot_is_no_rounds(tmp_path: Path) -> None:
    storage.save(tmp_path / "s.json", "snapshot", {})
    with pytest.raises(RecordError, match="holds 'snapshot', wanted 'rounds'"):
        load_rounds(tmp_path / "s.json")


def test_a_round_written_elsewhere_in_plain_lists_is_read(tmp_path: Path) -> None:
    file, content = saved(tmp_path, rounds_of("path by block"))

    def plainly(value: Any) -> Any:
        if isinstance(value, dict) and "$array" in value:
            return np.array(value["data"]).reshape(value["shape"]).tolist()
        if isinstance(value, dict):
            return {name: plainly(item) for name, item in value.items()}
        return value

    rewrite(file, [plainly(each) for each in content])
    assert "$array" not in file.read_text()
    assert differences(load_rounds(file)) == []
