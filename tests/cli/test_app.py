"""The program as a whole: help, bad arguments, broken output, interrupts, exit statuses."""

import importlib
import io
import json
import os
import subprocess
import sys

import pytest

import jaxspec as js
from jaxspec.audit import AuditReport
from jaxspec.cli import app, audit
from jaxspec.cli.terminal import Progress


@pytest.fixture(autouse=True)
def nothing_proved(monkeypatch):
    """Replace the audit by the report of one that proved nothing."""
    grids = {"single_path": (2500, 7500), "two_level_tree": (2000, 500, 3000, 4500)}
    report = AuditReport(grids=grids, laws=(), device="cpu", versions={"jaxspec": js.__version__})
    monkeypatch.setattr(audit, "audit_rules", lambda progress: report)


def failed(arguments, capsys):
    """Run with bad arguments; return what standard error got."""
    with pytest.raises(SystemExit) as stop:
        app.main(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_every_command_is_a_module_with_arguments_and_a_body_and_describes_itself(capsys):
    for name, purpose in app.COMMANDS.items():
        module = importlib.import_module(f"jaxspec.cli.{name}")
        assert callable(module.add_arguments)
        assert callable(module.run)
        with pytest.raises(SystemExit) as stop:
            app.main([name, "--help"])
        assert stop.value.code == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: python -m jaxspec {name} [-h] ")
        assert module.__doc__.partition(".")[0].split()[:4] == out.partition("\n\n")[2].split()[:4]
        assert "\nexit status: 0 if " in out
        with pytest.raises(SystemExit):
            app.main(["--help"])
        assert f"{name} " in (out := capsys.readouterr().out)
        assert purpose.split()[0] in out


def test_the_help_of_the_program_imports_no_command():
    script = (
        "import sys; from jaxspec.cli import app\n"
        "try: app.main(['--help'])\n"
        "finally: print([name for name in ('jaxspec.models', 'jaxspec.audit', 'jaxspec.decode') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adit"], "invalid choice: 'adit' (choose from"),
        (["adit"], "; did you mean 'audit'?"),
        (["audit", "--jsn"], "unrecognized arguments: --jsn; did you mean '--json'?"),
        (["audit", "x"], "unrecognized arguments: x"),
        (["--json"], "unrecognized arguments: --json"),
        (["compare", "--modles=ngram"], "; did you mean '--models'?"),
        (["compare", "--models", "ngrm"], "; did you mean 'ngram'?"),
        (["generate", "--promt", "x"], "is required; did you mean '--prompt'?"),
        (["bench", "--vocba", "5"], "; did you mean '--vocab'?"),
    ],
)
def test_an_unknown_word_is_named_and_gets_the_nearest_known_one(arguments, words, capsys):
    assert words in failed(arguments, capsys)


@pytest.mark.parametrize("arguments", [["nonsense"], ["--zzz"], ["audit", "--js", "x"]])
def test_nothing_is_suggested_where_nothing_is_near(arguments, capsys):
    assert "did you mean" not in failed(arguments, capsys)


@pytest.mark.parametrize(
    ("path", "name"), [("/usr/bin/jaxspec", "jaxspec"), ("/x/__main__.py", "python -m jaxspec")]
)
def test_help_and_errors_call_the_program_what_the_user_calls_it(path, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path])
    with pytest.raises(SystemExit):
        app.main(["compare", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} compare ")
    assert app.main(["replay", "none.json"]) == 2
    assert capsys.readouterr().err.startswith(f"{name} replay: error: none.json: ")


def test_version_in_a_separate_process(tmp_path):
    command = [sys.executable, "-m", "jaxspec", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxspec {js.__version__}\n", "")


def test_progress_shows_on_a_terminal_and_leaves_an_empty_line(monkeypatch):
    err = io.StringIO()
    err.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "30")
    progress = Progress()
    progress("token: contract single path and more", 3, 29)
    progress("traversal: draft support exhausted", 29, 29)
    first, last = err.getvalue().strip("\r").split("\r\r")
    assert first == "3/29  token: contract single "
    assert last == " " * 29


# --- output that fails


def test_a_reader_that_leaves_ends_the_run_without_a_traceback(monkeypatch, capfd):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert app.main(["audit", "--json"]) == 141
    assert capfd.readouterr().err == ""


FULL = "/dev/full"


@pytest.mark.skipif(not os.path.exists(FULL), reason=f"there is no {FULL}")
@pytest.mark.parametrize(
    "arguments",
    [
        ["audit"],
        ["audit", "--json"],
        ["--help"],
        ["replay", "rounds.json"],
        ["generate", "--prompt", "a", "--new-tokens", "1", "--draft", "none"],
    ],
    ids=["audit", "json", "help", "replay", "generate"],
)
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_full_disk_is_one_line_and_the_exit_status_2(
    arguments, buffering, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    empty = {"schema": "jaxspec/1", "kind": "rounds", "content": []}
    (tmp_path / "rounds.json").write_text(json.dumps(empty))
    with open(FULL, "w", buffering) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert app.main(arguments) == 2
    why = "standard output: there is no space left on the device"
    assert capsys.readouterr().err == f"python -m jaxspec: error: {why}\n"


def test_a_closed_standard_output_is_one_line_and_the_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    for arguments in (["compare"], ["replay", "none.json"], ["--help"]):
        assert app.main(arguments) == 2
        assert capsys.readouterr().err == (
            "python -m jaxspec: error: standard output is closed: there is nowhere to print to\n"
        )


def test_a_closed_standard_error_takes_nothing_away(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    try:
        assert app.main(["audit"]) == 1
        assert app.main(["replay", "none.json"]) == 2
    finally:
        sys.stderr.close()
    assert "EXACT LAWS" in capsys.readouterr().out


# --- interrupts


def test_an_interrupt_ends_the_run_without_a_traceback(monkeypatch, capsys):
    def interrupted(progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(audit, "audit_rules", interrupted)
    assert app.main(["audit"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def process(script, environment):
    """Run a script with the argument `audit`; return its exit status, output and errors."""
    done = subprocess.run(
        [sys.executable, "-c", script, "audit"],
        env={**environment, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


INTERRUPTED = {
    "while a thread compiles": """
import threading
from jaxspec.cli import app, audit
def interrupted(progress):
    print("printed before")
    threading.Thread(target=threading.Event().wait).start()  # ends with the process only
    raise KeyboardInterrupt
audit.audit_rules = interrupted
app.main()
""",
    # Python only reports what is raised in a callback of its garbage collector, and continues.
    "where nothing can be raised": """
import gc
from jaxspec.cli import app, audit
def interrupted(progress):
    print("printed before")
    def interrupt(*arguments):
        raise KeyboardInterrupt
    gc.callbacks.append(interrupt)
    gc.collect()
    print("continued")
audit.audit_rules = interrupted
app.main()
""",
    "while a command is imported": """
import sys
from jaxspec.__main__ import main
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "jaxspec.cli.audit":
            print("printed before")
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
main()
""",
    "while the program is imported": """
import sys
from jaxspec.__main__ import main
class Interrupts:
    def find_spec(self, name, *rest):
        if name == "jaxspec.cli":
            print("printed before")
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
raise SystemExit(main())
""",
}


@pytest.mark.parametrize("where", INTERRUPTED)
def test_an_interrupted_process_ends_at_once_with_status_130(where, users_environment):
    found = process(INTERRUPTED[where], users_environment)
    assert found == (130, "printed before\n", "\ninterrupted\n")
