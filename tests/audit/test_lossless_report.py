"""The report of `check_lossless`, its progress and its errors."""

import json
import re

import numpy as np
import pytest
from helpers import foreign
from helpers.foreign import batch_of, variant

from jaxspec import audit
from jaxspec.audit import settings
from jaxspec.testing import assert_lossless

SMALL = 14_000
"""Calls in which every strong fault is seen."""


def test_a_failing_assertion_is_a_page_with_the_law_and_the_diagnosis():
    wrong = variant(foreign.token, "residual p")
    with pytest.raises(AssertionError) as failure:
        assert_lossless(wrong, kind="path", randomness="numpy", budget=SMALL)
    page = str(failure.value)
    lines = page.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 96
    assert lines[0].startswith("BIASED")
    assert "Looks like residual: replacement drawn from p instead of the residual" in page
    place = r"position 0, token \d: expected 0\.\d{3}, observed 0\.\d{3}"
    assert re.search(place, " ".join(page.split()))
    table = lines.index("Law of the first token in 'a path of one', the smallest failing instance:")
    assert lines[table + 1].split() == ["tokens", "expected", "observed"]
    assert {line.split()[0] for line in lines[table + 2 : table + 6]} == set("0123")
    assert_lossless(foreign.token, kind="path", randomness="uniforms", rule="token", budget=100_000)


def test_the_report_is_json_and_repeats_with_its_seed():
    def check(seed):
        wrong = variant(foreign.token, "reused")
        return audit.check_lossless(
            wrong, kind="path", randomness="numpy", budget=SMALL, seed=seed
        ).to_json()

    first = json.loads(json.dumps(check(1), allow_nan=False))
    assert first["lossless"] is False
    assert first["suspects"] == [
        "reused noise: the uniform of the rejected candidate draws the replacement too"
    ]
    assert first["failures"][0].startswith("law (p ")
    assert first == json.loads(json.dumps(check(1)))
    assert first["results"] != json.loads(json.dumps(check(2)))["results"]


def test_progress_is_called_from_the_start_to_the_end():
    calls = []
    audit.check_lossless(
        foreign.token,
        kind="path",
        randomness="uniforms",
        budget=100_000,
        progress=lambda *step: calls.append(step),
    )
    steps = len(settings.instances_of_kind("path")) + 1
    assert [done for _, done, _ in calls] == list(range(steps + 1))
    assert {total for _, _, total in calls} == {steps}


ERRORS = {
    "kind": ({"kind": "tree"}, "kind is 'tree': must be one of path, "),
    "randomness": ({"randomness": "cuda"}, "randomness is 'cuda': must be one of uniforms, "),
    "rule": ({"rule": "traversal"}, "for kind 'path' must be one of token, block"),
    "budget": ({"budget": 0}, "budget is 0: must be an integer >= 1"),
    "instances": ({"instances": []}, "instances is empty"),
    "num_uniforms": ({"num_uniforms": 0}, "num_uniforms is 0"),
    "batched": ({"batched": 1}, "batched is 1: must be True or False"),
    "verify": ({"verify": "token"}, "verify is 'token', of type str: must be a verifier"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_raise_with_their_value(name):
    given, message = ERRORS[name]
    arguments = {"verify": foreign.token, "kind": "path", "randomness": "numpy", **given}
    with pytest.raises(ValueError, match=re.escape(message)):
        audit.check_lossless(**arguments)


def test_instances_that_do_not_suit_the_kind_raise():
    tree = settings.instances_of_kind("with_replacement")[0]
    given = settings.instances_of_kind("point_mass")[0]
    for kind, instance, message in (
        ("path", tree, "is a tree: kind 'path' needs one candidate at each depth"),
        ("path", given, "has no draft rows or no branching"),
        ("point_mass", tree, "has no candidates"),
    ):
        with pytest.raises(ValueError, match=message):
            audit.check_lossless(foreign.token, kind=kind, randomness="numpy", instances=[instance])


def test_a_verifier_that_raises_is_reported_with_its_instance_and_arguments():
    def broken(draft_tokens, draft_rows, target_rows, source):
        raise RuntimeError("no such row")

    message = r"the verifier raised RuntimeError: no such row; in instance '.*draft_tokens \["
    with pytest.raises(ValueError, match=message) as failure:
        audit.check_lossless(broken, kind="path", randomness="numpy")
    assert isinstance(failure.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "a NoneType, None"),
        (np.zeros((2, 2), np.int32), r"a ndarray of shape \(2, 2\) and dtype int32"),
        (np.zeros(2), r"a ndarray of shape \(2,\) and dtype float64"),
        (3, "a int, 3"),
    ],
    ids=["none", "matrix", "floats", "number"],
)
def test_a_wrong_result_is_described(returned, shown):
    with pytest.raises(ValueError, match=f"returned for the emitted tokens {shown}"):
        audit.check_lossless(lambda *args: returned, kind="path", randomness="numpy")


def test_a_batch_of_a_wrong_size_and_missing_slots_are_described():
    def one_too_few(*args):
        return batch_of(foreign.token)(*args)[1:]

    with pytest.raises(ValueError, match="the batch had 12 sequences"):
        audit.check_lossless(one_too_few, kind="path", randomness="numpy", batched=True)

    def sometimes(*args):
        emitted, slots = foreign.tree(*args)
        return (emitted, slots) if slots else emitted

    with pytest.raises(ValueError, match=r"slots in .* of .* calls"):
        audit.check_lossless(sometimes, kind="without_replacement", randomness="numpy")


def test_torch_that_is_not_installed_names_the_extra():
    try:
        import torch  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"randomness='torch' needs torch: .*\[parity\]"):
            audit.check_lossless(foreign.token, kind="path", randomness="torch")
    else:
        pytest.skip("torch is installed")
