"""The command `bench`: its tables, what it measures, and what it rejects before timing anything."""

import dataclasses
import io
import json

import jax
import pytest

from jaxspec.bench import decoding, sweeps
from jaxspec.bench.decoding import Speed
from jaxspec.bench.timing import Spread
from jaxspec.bench.verifiers import UNITS, Measurement
from jaxspec.bench.workloads import ALL, ALONE, SETTINGS, Case
from jaxspec.cli import app, bench
from jaxspec.verify import RULES

SPEEDS = [
    Speed("pair", "plain", 1.0, 1234.5, 1.0),
    Speed("pair", "sampled tree (2, 2, 1, 1)", 2.5, 999.9, 0.81),
    Speed("other", "lookup", 3.25, 10.0, 2.0),
]


def measurement(case: Case, time: float = 12.34) -> Measurement:
    spreads = {
        field.name: Spread(time, time, time)
        for field in dataclasses.fields(Measurement)
        if field.type is Spread
    }
    return Measurement(
        case=case, calls=7, dense_batch=1, loop_batch=1, trace_seconds=0.5, compile_seconds=1.0,
        temporary_bytes=400, temporary_rows=1.0, dense_temporary_bytes=800, **spreads,
    )  # fmt: skip


WIDE = """\
cpu, pair; B = 1, float32
                                  tokens/call   tokens/s  of plain
plain                                    1.00     1234.5      1.00
sampled tree (2, 2, 1, 1)                2.50      999.9      0.81

cpu, other; B = 1, float32
                                  tokens/call   tokens/s  of plain
lookup                                   3.25       10.0      2.00

rule                setting               V size  B  time us /floor dense/  loop/ cpu s  rows
without_replacement top_p, flat rows 151936 N 64 64     12.3  12.34   12.3   12.3   1.5   1.0
token               probabilities       100  T 4  1     12.3  12.34   12.3   12.3   1.5   1.0
"""


def printed(monkeypatch, *, is_terminal, columns):
    class Out(io.StringIO):
        def isatty(self):
            return is_terminal

    out = Out()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", out)
    bench.print_speeds("cpu", SPEEDS)
    wide = Case("without_replacement", "top_p, flat rows", 151936, 64, 64)
    bench.print_verifier(measurement(wide), with_heads=True)
    bench.print_verifier(measurement(Case("token", "probabilities", 100, 5, 1)), with_heads=False)
    return out.getvalue()


@pytest.mark.parametrize(("is_terminal", "columns"), [(False, 40), (True, 97)])
def test_tables_are_laid_out_in_columns_where_there_is_room(is_terminal, columns, monkeypatch):
    assert printed(monkeypatch, is_terminal=is_terminal, columns=columns) == WIDE


def test_on_a_narrow_terminal_every_number_is_there_and_no_line_is_too_long(monkeypatch):
    text = printed(monkeypatch, is_terminal=True, columns=40)
    assert max(map(len, text.splitlines())) <= 40
    for word in WIDE.split():
        assert word.rstrip(",;") in text or word == "rule"


@pytest.fixture
def no_timing(monkeypatch):
    """Benchmarks that must not start, and SmolLM2 as if it were installed."""
    for name in ("measure", "measure_pair", "measure_smollm2"):
        monkeypatch.setattr(bench, name, lambda *_, **__: pytest.fail("timed"))
    monkeypatch.setattr(bench, "find_smollm2", lambda: "a file")
    monkeypatch.setattr(bench, "smollm2_room", lambda: 8000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--parts", "pair", "--new-tokens", "600"],
            "--new-tokens is 600: after its longest prompt, pair",
        ),
        (["--parts", "pair", "--new-tokens", "196"], "pair has room for 195"),
        (["--parts", "smollm2", "--new-tokens", "8001"], "smollm2 has room for 8000"),
        (["--vocab", "2"], "--vocab is 2: must be at least 3"),
        (["--growth", "--batch", "2"], "--growth has fixed cases"),
        (["--plot", "times.doc"], "times.doc: its suffix must be one of"),
        (["--save", "no/such/times.json"], "no/such/times.json: there is no folder no/such"),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_is_timed(
    arguments, words, no_timing, capsys
):
    assert app.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m jaxspec bench: error: ")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--new-tokens", "1"], "--new-tokens: must be an integer >= 2, got '1'"),
        (["--batch", "1", "0"], "--batch: must be an integer >= 1, got '0'"),
        (["--temperature", "0.5", "-2"], "--temperature: must be 0 (greedy), or a number from"),
        (["--seed", "-1"], "--seed: must be an integer from 0 to 2147483647, got '-1'"),
        (["--parts", "pairs"], "--parts: invalid choice: 'pairs'"),
        (["--settings", "top_q"], "--settings: invalid choice: 'top_q'"),
        (["--full", "--growth"], "--growth: not allowed with argument --full"),
    ],
)
def test_bad_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        app.main(["bench", *arguments])
    assert stop.value.code == 2
    assert f"python -m jaxspec bench: error: argument {words}" in capsys.readouterr().err


def test_what_smollm2_lacks_is_an_error_before_anything_is_timed(no_timing, monkeypatch, capsys):
    def missing():
        raise ImportError("pip install gguf")

    monkeypatch.setattr(bench, "smollm2_room", missing)
    assert app.main(["bench", "--parts", "verifiers", "smollm2"]) == 2
    assert "error: --parts smollm2: pip install gguf" in capsys.readouterr().err


@pytest.mark.parametrize(("part", "room"), [("pair", 195), ("smollm2", 8000)])
def test_what_just_has_room_is_timed(part, room, no_timing, monkeypatch, capsys):
    timed = []
    monkeypatch.setattr(bench, f"measure_{part}", lambda **sizes: timed.append(sizes) or [])
    assert app.main(["bench", "--parts", part, "--new-tokens", str(room), "--pairs", "9"]) == 0
    assert [(sizes["new_tokens"], sizes["repeats"]) for sizes in timed] == [(room, 9)]


@pytest.mark.parametrize("repeats", [3, 25])
def test_each_pair_has_its_prompt_and_key_and_all_temperatures_share_them(repeats, monkeypatch):
    monkeypatch.setattr(decoding, "_measure", lambda target, drafters, requests, *_: requests)
    groups = decoding.measure_pair(repeats=repeats, new_tokens=8, temperatures=[0, 0.5], seed=0)
    assert list(groups) == ["bundled pair, temperature 0", "bundled pair, temperature 0.5"]
    cold, warm = groups.values()
    assert [each.options["temperature"] for each in warm] == [0.5] * repeats
    assert [each.prompt for each in warm] == [each.prompt for each in cold]
    keys = {tuple(jax.random.key_data(each.key).tolist()) for each in cold}
    assert len(cold) == len(keys) == repeats
    assert len({tuple(each.prompt) for each in cold}) == min(repeats, 10)


# --- sweeps


def test_the_sweeps_have_the_cases_that_they_promise():
    full = sweeps.product(**sweeps.WIDE)
    assert len(set(full)) == len(full)
    assert {(case.vocab, case.batch) for case in full} == {
        (V, B) for V in (32000, 151936) for B in (1, 8, 64)
    }
    for name, rule in RULES.items():
        of_rule = [case for case in full if case.rule == name]
        sizes = {case.drafted if rule.is_path else case.nodes for case in of_rule}
        assert sizes == ({1, 4, 8} if rule.is_path else {16, 64})
        assert {case.setting for case in of_rule} == set(SETTINGS)
    assert {"temperature", "top_k", "top_p", "min_p", "bias", "allowed"} <= set(ALONE)
    assert set(SETTINGS[ALL]) == set(ALONE)
    assert {case.rule for case in sweeps.quick()} == set(RULES)
    assert len(sweeps.quick()) <= 10


def test_what_is_chosen_replaces_that_of_the_sweep():
    def cases(*arguments):
        return bench.cases_of(app.make_parser().parse_args(["bench", *arguments]))

    assert cases() == sweeps.quick()
    one = cases("--rules", "block", "--batch", "2", "3", "2", "--drafted", "7")
    assert one == [Case("block", "logits", 151936, 8, B) for B in (2, 3)]
    assert cases("--full", "--vocab", "99") == [
        dataclasses.replace(case, vocab=99)
        for case in sweeps.product(**sweeps.WIDE)
        if case.vocab == 32000
    ]


def test_the_growth_table_has_a_cell_for_every_case_of_the_sweep():
    cases = sweeps.growth()
    assert len(set(cases)) == len(cases)
    measured = [measurement(case, 1000 + number) for number, case in enumerate(cases)]
    table = sweeps.growth_table(measured)
    for number, case in enumerate(cases):
        assert table.count(f" {1000 + number} ({1000 + number}.0) ") == 1, case
    # Blank lines apart, two tables of equal rows.
    _, first, second = table.split("\n\n")
    for part in (first, second):
        assert len({line.count("|") for line in part.splitlines()}) == 1


# --- files


ARGUMENTS = ["bench", "--rules", "token", "block", "--settings", "logits", "--vocab", "100"]


@pytest.fixture
def timed(monkeypatch):
    """Cases that are timed, in microseconds that count up; `stop_at` ends one with an error."""

    class Timed(list):
        stop_at, error = None, KeyboardInterrupt

    cases = Timed()

    def measure(case, **_):
        if case.rule == cases.stop_at:
            raise cases.error
        cases.append(case)
        return measurement(case, float(len(cases)))

    monkeypatch.setattr(bench, "measure", measure)
    return cases


@pytest.mark.parametrize("is_json", [False, True])
def test_an_interrupted_run_keeps_its_results_and_is_resumed(is_json, timed, tmp_path, capsys):
    arguments = [*ARGUMENTS, "--save", str(tmp_path / "times.json")]
    arguments += ["--json"] if is_json else []
    timed.stop_at = "block"
    assert app.main(arguments) == 130
    out = capsys.readouterr().out
    if is_json:
        results = json.loads(out)
        assert not results["is_complete"]
        assert [each["case"]["rule"] for each in results["verifiers"]] == ["token"]
    else:
        assert "token " in out and "block " not in out
    timed.stop_at = None
    assert app.main(arguments) == 0
    assert [case.rule for case in timed] == ["token", "block"]
    out = capsys.readouterr().out
    if is_json:
        results = json.loads(out)
        assert results["is_complete"]
        assert [each["time"]["median"] for each in results["verifiers"]] == [1.0, 2.0]
    # What else the file holds is kept.
    assert app.main([*arguments, "--rules", "traversal"]) == 0
    kept = sweeps.load(tmp_path / "times.json", 0)
    assert [each.case.rule for each in kept] == ["token", "block", "traversal"]
    assert kept[0] == measurement(timed[0], 1.0)


def test_a_case_that_does_not_fit_into_memory_is_left_out(timed, capsys):
    timed.stop_at, timed.error = "token", MemoryError("8 GB")
    assert app.main(ARGUMENTS) == 1
    out, err = capsys.readouterr()
    assert "token, logits, V 100, T 4, B 1: not timed: 8 GB" in err
    _, heads, row, *_ = out.splitlines()
    assert heads.startswith("rule ")
    assert row.startswith("block ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "not results of bench"),
        ("{}", "not results of bench"),
        (None, "was measured with seed 0, this run has 1"),
    ],
)
def test_a_file_of_other_results_is_not_overwritten(text, words, timed, tmp_path, capsys):
    file = tmp_path / "times.json"
    if text is None:
        assert app.main([*ARGUMENTS, "--save", str(file)]) == 0
    else:
        file.write_text(text)
    before = file.read_bytes()
    timed.clear()
    capsys.readouterr()
    assert app.main([*ARGUMENTS, "--save", str(file), "--seed", "1"]) == 2
    assert words in capsys.readouterr().err
    assert file.read_bytes() == before
    assert timed == []


def test_json_has_a_unit_for_every_quantity(timed, capsys):
    assert app.main([*ARGUMENTS, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {"device", "cores", "versions", "seed", "decoding"} <= set(results)
    assert results["units"] == UNITS
    for each in results["verifiers"]:
        assert set(each) - {"case", "drafted"} == set(UNITS)
        assert set(each["case"]) == {"rule", "setting", "vocab", "nodes", "batch"}


def test_a_plot_is_written(timed, tmp_path):
    file = tmp_path / "times.png"
    assert app.main([*ARGUMENTS, "--batch", "1", "2", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
