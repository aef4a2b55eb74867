"""The program `python -m jaxspec`: the table of its commands, and how it ends.

A command `name` is the module `jaxspec.cli.name` with two functions, `add_arguments(parser)` and
`run(args)`, which returns the exit status. It is imported once it is asked for.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jaxspec
from jaxspec.cli.terminal import Parser, UserError, explain, fail, program, reason

COMMANDS = {
    "audit": "check every rule exactly",
    "compare": "decode a prompt with several drafters and compare cost and distribution",
    "replay": "recompute every verdict of a file of rounds",
    "generate": "generate text with a network and show which tokens were drafted",
    "bench": "time the verifiers and the compiled decoding loop",
}

INTERRUPTED = 130
"""Exit status after an interrupt (128 + SIGINT)."""

READER_LEFT = 141
"""Exit status if the reader of the output has left, as `head` does (128 + SIGPIPE)."""

DESCRIPTION = """\
Verify speculative decoding in JAX: decide which draft tokens to keep so that the output
distribution is exactly that of the target model.

Without a command: check every rule exactly on the default device (`audit`), then decode a prompt
with the bundled pair of networks (`compare`), plainly and with a path, a fixed tree and an adaptive
tree. Takes about three minutes on two cores, nearly all of them compilation."""

EPILOG = (
    "exit status: 0 if every check holds, 1 if not, 2 for bad arguments or files or output that "
    "cannot be written, 130 if interrupted, 141 if the reader of the output has left"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status, see `EPILOG`.

    `argv` is None for the arguments of the process, which an interrupt then ends at once. Raises
    SystemExit after `--help` and `--version` with status 0, and for bad arguments with status 2.
    """
    if sys.stderr is None:  # closed: errors would go to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process lives
    if argv is None:
        sys.unraisablehook = end_if_interrupted
    try:
        if sys.stdout is None:
            return fail("standard output is closed: there is nowhere to print to")
        return run(argv)
    except KeyboardInterrupt:
        if argv is None:
            end_interrupted()
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def run(argv: Sequence[str] | None) -> int:
    """Run a command and flush its output."""
    args = argparse.Namespace(command=None)
    try:
        try:
            make_parser().parse_args(argv, args)
            return args.run(args)
        except UserError as error:
            return fail(str(error), args.command or "")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        return READER_LEFT
    except OSError as error:
        discard_output()
        is_output = error.filename is None
        return fail(f"standard output: {reason(error)}" if is_output else explain(error))


def make_parser() -> Parser:
    """Return the parser of all commands; the parsed `run` is a function of the arguments."""
    parser = Parser(prog=program(), description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"jaxspec {jaxspec.__version__}")
    parser.set_defaults(run=run_audit_and_compare)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_CommandParser
    )
    for name, purpose in COMMANDS.items():
        commands.add_parser(name, help=purpose, command=name)
    return parser


class _CommandParser(Parser):
    """The parser of one command, which imports the command when it is first used."""

    def __init__(self, *, command: str, **kwargs: Any) -> None:
        self._command = command
        super().__init__(**kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.description is None:
            module = importlib.import_module(f"jaxspec.cli.{self._command}")
            self.description = module.__doc__ or ""
            self.set_defaults(run=module.run)
            module.add_arguments(self)
        return super().parse_known_args(args, namespace)


def run_audit_and_compare(args: argparse.Namespace) -> int:
    """Audit every rule, then decode real text."""
    from jaxspec.cli import audit, compare
    from jaxspec.cli.terminal import Progress, print_line

    del args
    start = time.perf_counter()
    progress = Progress()
    report = audit.audit_rules(progress)
    audit.print_report(report)
    is_expected = compare.print_defaults(progress)
    audit.print_result(report, seconds=time.perf_counter() - start)
    if not is_expected:
        print_line("NOT AS EXPECTED: the acceptance on real text differs from what the rows imply")
    return 0 if report.is_proved and is_expected else 1


# --- interrupts and broken output


def end_interrupted() -> NoReturn:
    """Report the interrupt and end the process at once.

    A thread that compiles cannot be stopped, and crashes if the interpreter is torn down around it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second interrupt would cut this short
    print("\ninterrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


def end_if_interrupted(unraisable: Any) -> None:
    """End the process for an interrupt that Python cannot raise.

    In a callback of the garbage collector, of which JAX has one, Python would report the interrupt
    and the command would continue.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        end_interrupted()
    sys.__unraisablehook__(unraisable)


def discard_output() -> None:
    """Redirect standard output to the null device: its buffer would raise again at exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
