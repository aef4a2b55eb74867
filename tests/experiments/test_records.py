"""Runs as files: written and read back, imported from elsewhere, rejected where malformed."""

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
        request={"key_data": [0, 7], "new_tokens": 3},
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
    experiments.save(tmp_path / name, runs)
    assert experiments.load(tmp_path / name) == runs


def test_an_experiment_run_elsewhere_is_imported_from_json(tmp_path):
    (run,) = experiments.load(written(tmp_path, ELSEWHERE["content"]))
    assert run.name == "lookup of 5 in another engine"
    assert run.decoder["target"] == "kjv 5-gram"
    assert (run.prompt, run.text, run.request, run.finished) == ((3, 1), (4, 1, 5), {}, "budget")
    assert run.metrics.by_depth == (Rate(1, 2), Rate(0, 1))
    assert run.metrics.by_rank == ()
    assert run.metrics.acceptance.value == pytest.approx(1 / 3)
    compared = experiments.Comparison(baseline=here(), speculative=run)
    assert compared.speculative.metrics.tokens_per_target_batch == 1.5


def test_token_ids_may_be_an_array(tmp_path):
    content = copy.deepcopy(ELSEWHERE["content"])
    content[0]["prompt"] = {"$array": "int32", "shape": [2], "data": [3, 1]}
    assert experiments.load(written(tmp_path, content))[0].prompt == (3, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder": {"target": "kjv 4-gram"}}, "target model differs: 'kjv 5-gram' and 'kjv 4-g"),
        ({"prompt": (3, 2)}, r"prompt differs: \[3, 1\] and \[3, 2\]"),
        ({"text": (4, 4)}, "continuation length differs: 3 and 2"),
    ],
)
def test_the_error_of_runs_that_are_not_comparable_names_what_differs(change, words):
    other = dataclasses.replace(here(), name="other", **change)
    with pytest.raises(experiments.MismatchError, match=f"runs 'plain' and 'other': {words}"):
        experiments.Comparison(baseline=here(), speculative=other)


def test_prompts_that_differ_are_shown_in_a_line():
    long = dataclasses.replace(here(), prompt=(3,) * 5000)
    with pytest.raises(experiments.MismatchError, match="prompt differs") as caught:
        experiments.Comparison(baseline=here(), speculative=long)
    assert len(str(caught.value)) < 200


def test_decoder_request_text_and_costs_may_differ():
    decoder = {"target": "kjv 5-gram", "drafter": "fixed tree"}
    other = dataclasses.replace(here(), name="tree", decoder=decoder, request={}, text=(5, 6, 7))
    assert experiments.Comparison(baseline=here(), speculative=other).law is None


def without(name):
    return lambda run: run.pop(name)


def with_value(name, value):
    return lambda run: run.update({name: value})


def with_metric(name, value):
    return lambda run: run["metrics"].update({name: value})


# What a field must be is decided by its annotation; `tests/test_records.py` covers the reader.
@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (without("name"), "'name' is missing"),
        (without("metrics"), "'metrics' is missing"),
        (with_value("decoder", {"engine": "x"}), "names no target model"),
        (with_value("decoder", "target"), "decoder is 'target', wanted an object"),
        (with_value("prompt", [3, 1.5]), r"prompt\[1\] is 1.5, wanted"),
        (with_value("text", [4, 2**31, 5]), r"text\[1\] is 2147483648"),
        (with_value("text", [4, 1]), "count 3 new tokens, but the text has 2"),
        (with_value("request", [0]), "request is a list, wanted an object"),
        (with_metric("rounds", 2.5), "rounds is 2.5"),
        (with_metric("seconds", 3), "metrics holds .*'seconds'"),
        (lambda run: run["metrics"].pop("drafted"), "metrics: 'drafted' is missing"),
        (with_metric("by_depth", [{"hits": 1}]), "'chances' is missing"),
        (with_metric("by_depth", [{"hits": 3, "chances": 2}]), r"by_depth\[0\] has 3 hits of 2 ch"),
    ],
)
def test_the_error_of_a_malformed_run_names_its_number_and_field(tmp_path, corrupt, words):
    content = [copy.deepcopy(ELSEWHERE["content"][0]) for _ in range(2)]
    corrupt(content[1])
    with pytest.raises(RecordError, match=f"elsewhere.json: run 1: .*{words}"):
        experiments.load(written(tmp_path, content))


def test_a_file_of_another_kind_or_form_is_an_error(tmp_path):
    with pytest.raises(RecordError, match="an experiment is a list of runs"):
        experiments.load(written(tmp_path, {"run": 1}))
    with pytest.raises(RecordError, match=r"run 0: a .*, wanted an object"):
        experiments.load(written(tmp_path, ["run"]))
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps({**ELSEWHERE, "kind": "rounds"}))
    with pytest.raises(RecordError, match="holds 'rounds', wanted 'experiment'"):
        experiments.load(path)
