"""Runs as files: written and read back, imported from elsewhere, refused where malformed."""

import copy
import dataclasses
import json

import pytest

from jaxspec import experiments
from jaxspec.decode import Metrics, Rate
from jaxspec.storage import RecordError

ELSEWHERE = {
    "schema": "jaxspec/1",
    "kind": "experiment",
    "content": [
        {
            "name": "lookup of 5 in another engine",
            "decoder": {"target": "kjv 5-gram", "engine": "other", "version": [1, 2]},
            "prompt": [3, 1],
            "text": [4, 1, 5],
            "metrics": {
                "rounds": 2,
                "new_tokens": 3,
                "drafted": 10,
                "accepted": 1,
                "target_queries": 12,
                "target_calls": 2,
                "target_batches": 2,
                "draft_queries": 0,
                "draft_calls": 0,
                "draft_batches": 0,
                "by_depth": [{"hits": 1, "chances": 2}, {"hits": 0, "chances": 1}],
            },
        }
    ],
}


def here() -> experiments.Run:
    metrics = Metrics(3, 3, 0, 0, 3, 3, 3, 0, 0, 0, by_depth=(), by_rank=(Rate(1, 4),))
    return experiments.Run(
        name="plain",
        decoder={"target": "kjv 5-gram", "drafter": "none", "stop_tokens": []},
        prompt=(3, 1),
        seed=-7,
        text=(4, 4, 4),
        finished="budget",
        metrics=metrics,
    )


def written(tmp_path, content) -> str:
    path = tmp_path / "elsewhere.json"
    path.write_text(json.dumps({**ELSEWHERE, "content": content}))
    return str(path)


@pytest.mark.parametrize("name", ["runs.json", "runs.npz"])
def test_runs_read_back_as_they_were_saved(tmp_path, name):
    runs = [here(), dataclasses.replace(here(), name="again", text=(1, 2, 3), finished="stop")]
    experiments.save_runs(tmp_path / name, runs)
    assert experiments.load_runs(tmp_path / name) == runs


def test_an_experiment_run_elsewhere_is_imported_from_json(tmp_path):
    (run,) = experiments.load_runs(written(tmp_path, ELSEWHERE["content"]))
    assert run.name == "lookup of 5 in another engine"
    assert run.decoder["target"] == "kjv 5-gram"
    assert (run.prompt, run.text, run.seed, run.finished) == ((3, 1), (4, 1, 5), 0, "budget")
    assert run.metrics.by_depth == (Rate(1, 2), Rate(0, 1))
    assert run.metrics.by_rank == ()
    assert run.metrics.acceptance.value == pytest.approx(1 / 3)
    experiments.assert_comparable([here()], [run])
    compared = experiments.Comparison(baseline=here(), speculative=run)
    assert compared.speculative.metrics.tokens_per_target_batch == 1.5


def test_token_ids_may_be_an_array(tmp_path):
    content = copy.deepcopy(ELSEWHERE["content"])
    content[0]["prompt"] = {"$array": "int32", "shape": [2], "data": [3, 1]}
    assert experiments.load_runs(written(tmp_path, content))[0].prompt == (3, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder": {"target": "kjv 4-gram"}}, "target model differs: 'kjv 5-gram' and 'kjv 4-g"),
        ({"prompt": (3, 2)}, r"prompt differs: \[3, 1\] and \[3, 2\]"),
        ({"text": (4, 4)}, "continuation length differs: 3 and 2"),
    ],
)
def test_runs_that_are_not_comparable_are_refused_by_what_differs(change, words):
    other = dataclasses.replace(here(), **change)
    with pytest.raises(experiments.MismatchError, match=f"run 1: {words}"):
        experiments.assert_comparable([here(), here()], [here(), other])
    with pytest.raises(experiments.MismatchError, match=words):
        experiments.Comparison(baseline=here(), speculative=other)


def test_prompts_that_differ_are_shown_in_a_line():
    long = dataclasses.replace(here(), prompt=(3,) * 5000)
    with pytest.raises(experiments.MismatchError, match="prompt differs") as caught:
        experiments.assert_comparable([here()], [long])
    assert len(str(caught.value)) < 200


def test_experiments_of_different_numbers_of_runs_are_refused():
    with pytest.raises(experiments.MismatchError, match="number of runs differs: 1 and 2"):
        experiments.assert_comparable([here()], [here(), here()])


def test_decoder_seed_text_and_costs_may_differ():
    other = dataclasses.replace(
        here(),
        name="tree",
        decoder={"target": "kjv 5-gram", "drafter": "fixed tree"},
        seed=8,
        text=(5, 6, 7),
    )
    experiments.assert_comparable([here()], [other])


def without(name):
    return lambda run: run.pop(name)


def with_value(name, value):
    return lambda run: run.update({name: value})


def with_metric(name, value):
    return lambda run: run["metrics"].update({name: value})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without("name"), "'name' is missing"),
        (without("decoder"), "'decoder' is missing"),
        (without("prompt"), "'prompt' is missing"),
        (without("text"), "'text' is missing"),
        (without("metrics"), "'metrics' is missing"),
        (with_value("decoder", {"engine": "x"}), "names no target model"),
        (with_value("decoder", "target"), "decoder is 'target', wanted an object"),
        (with_value("decoder", {"target": None}), "names no target model"),
        (with_value("name", 3), "name is 3, wanted a string"),
        (with_value("prompt", "31"), "prompt is '31', wanted a list"),
        (with_value("prompt", [3, 1.5]), r"prompt\[1\] is 1.5, wanted an integer"),
        (with_value("text", [4, True, 5]), r"text\[1\] is True"),
        (with_value("text", [4, -1, 5]), r"text\[1\] is -1"),
        (with_value("text", [4, 1]), "count 3 new tokens, its text has 2"),
        (with_value("seed", "0"), "seed is '0'"),
        (with_value("metrics", [1]), "metrics: a list"),
        (
            with_value(
                "decoder", {"target": "a", "w": {"$array": "int8", "shape": [0], "data": []}}
            ),
            r"decoder.w is an array of shape \(0,\), wanted a plain value",
        ),
        (with_value("prompt", [[3]]), r"prompt\[0\] is a list"),
        (with_value("text", [4, 2**31, 5]), r"text\[1\] is 2147483648"),
        (with_value("seed", 10**30), "seed is 1000"),
        (with_value("finished", None), "finished is None"),
        (with_metric("drafted", 2**63), "metrics.drafted is 9223372036854775808"),
        (with_metric("rounds", 2.5), "rounds is 2.5"),
        (with_metric("rounds", -1), "rounds is -1"),
        (with_metric("seconds", 3), "metrics holds an unknown field: 'seconds'"),
        (lambda run: run["metrics"].pop("drafted"), "metrics: 'drafted' is missing"),
        (with_metric("by_rank", [0.5]), r"by_rank\[0\]: a float"),
        (with_metric("by_rank", 0.5), "metrics.by_rank is 0.5, wanted a list"),
        (with_metric("by_depth", [{"hits": 1}]), "'chances' is missing"),
        (
            with_metric("by_depth", [{"hits": 3, "chances": 2}]),
            r"by_depth\[0\] has 3 hits of 2 chances",
        ),
    ],
)
def test_a_malformed_run_is_refused_by_its_number(tmp_path, spoil, words):
    content = [copy.deepcopy(ELSEWHERE["content"][0]) for _ in range(2)]
    spoil(content[1])
    with pytest.raises(RecordError, match=f"elsewhere.json: run 1: .*{words}"):
        experiments.load_runs(written(tmp_path, content))


@pytest.mark.parametrize("run", [None, 3, "run", []])
def test_what_is_no_object_is_no_run(tmp_path, run):
    with pytest.raises(RecordError, match=r"run 0: a .*, wanted an object"):
        experiments.load_runs(written(tmp_path, [run]))


def test_a_file_of_another_kind_or_form_is_refused(tmp_path):
    with pytest.raises(RecordError, match="an experiment is a list of runs"):
        experiments.load_runs(written(tmp_path, {"run": 1}))
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps({**ELSEWHERE, "kind": "rounds"}))
    with pytest.raises(RecordError, match="holds 'rounds', wanted 'experiment'"):
        experiments.load_runs(path)
