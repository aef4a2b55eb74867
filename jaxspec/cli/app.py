"""The command line: `python -m jaxspec`."""

import argparse
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jaxspec
from jaxspec.audit import AuditReport, audit_rules
from jaxspec.audit.report import KNOWN_COUNTS
from jaxspec.cli import compare, generate
from jaxspec.cli.terminal import (
    INTERRUPTED,
    NOBODY_READS,
    REFUSED,
    Parser,
    Progress,
    count,
    drop_output,
    explain,
    leave,
    mark,
    print_line,
    print_note,
    print_table,
    program,
    reason,
    refuse,
)
from jaxspec.decode import differences, load
from jaxspec.storage import RecordError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: the arguments. None for those of the process, which an interrupt then ends at once.

    Returns:
      The exit status: 0 if everything that was to be shown holds, else 1; 2 if arguments or files
      are wrong or the output cannot be written; 130 if interrupted; 141 if what reads the output
      has left.

    Raises:
      SystemExit: after `--help` and `--version` with status 0, for bad arguments with status 2.
    """
    if sys.stderr is None:  # closed: errors would go to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process is
    if argv is None:
        sys.unraisablehook = end_if_interrupted
    try:
        if sys.stdout is None:
            return refuse("standard output is closed: there is nowhere to print to")
        return run(argv)
    except KeyboardInterrupt:
        if argv is None:
            end_interrupted()
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def end_interrupted() -> NoReturn:
    """Say that the process was interrupted, and end it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would cut this short
    print("\ninterrupted", file=sys.stderr)
    leave(INTERRUPTED)


def end_if_interrupted(unraisable: Any) -> None:
    """End the process for an interrupt that came where Python cannot raise it.

    Such a place is a callback of the garbage collector, of which JAX has one: the interrupt would be
    reported there, and the command go on.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        end_interrupted()
    sys.__unraisablehook__(unraisable)


def run(argv: Sequence[str] | None) -> int:
    """Run a command and write out what it printed."""
    status = 0
    try:
        try:
            parser = make_parser()
            args, rest = parser.parse_known_args(argv)
            if rest and args.command != "bench":
                args.parser.refuse_unknown(rest)
            status = args.run(args, rest)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return NOBODY_READS
    except OSError as error:
        drop_output()
        if status == REFUSED:  # by the command, which met with the same
            return status
        is_output = error.filename is None
        return refuse(f"standard output: {reason(error)}" if is_output else explain(error))
    return status


def make_parser() -> argparse.ArgumentParser:
    """Describe the commands; each sets `run`, a function of its arguments and of those left over."""
    parser = Parser(
        prog=program(),
        description=textwrap.dedent(
            """\
            Verify speculative decoding in JAX: which drafted tokens a target model keeps.

            Without a command: prove every rule on this machine's device by counting, as `audit`
            does, then verify real text, as `compare` does: decode it plainly, by a sampled path,
            a fixed and an adaptive tree, with the pair of networks that comes with the package.
            Takes about a minute on two cores."""
        ),
        epilog="exit status: 0 if everything that was to be shown holds, 1 if not, 2 for bad "
        "arguments or files, or output that cannot be written, 130 if interrupted, 141 if what reads "
        "the output has left",
    )
    parser.add_argument("--version", action="version", version=f"jaxspec {jaxspec.__version__}")
    parser.set_defaults(run=run_everything, parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="command", title="commands")
    audit = commands.add_parser(
        "audit",
        help="prove every rule by counting",
        description="Count the outcomes of the public jitted verifiers over grids of draws, and "
        "find the exact law of one round of every rule, draft draws included, in small worlds. A "
        "rule is proved in a case if the law's total variation from the target's is at most 1e-6, "
        "no text of target probability 0 comes out, no input was flagged, replays agree with every "
        "cell of the law, and the mean number of accepted tokens is the known one where one is "
        "known.",
        epilog="exit status: 0 if every rule is proved, 1 if not, 2 for bad arguments or output "
        "that cannot be written",
    )
    audit.add_argument("--json", action="store_true", help="print the report as one JSON object")
    audit.set_defaults(run=run_audit, parser=audit)
    compare_texts = commands.add_parser(
        "compare",
        help="decode one prompt plainly, by a path and by trees, and compare",
        description="Decode a prompt with the shipped target, plainly and with its draft: a sampled "
        "path, a fixed tree, an adaptive tree. Prints what each asked of the "
        "models, its acceptance, and a test of whether the first two tokens have the law of plain "
        "decoding. The texts themselves need not agree: the decoders use different draws.",
        epilog="exit status: 0 if no law differs, 1 if one does (by chance, at level 0.001 for each "
        "decoder, or in earnest), 2 for bad arguments or output that cannot be written",
    )
    compare.add_arguments(compare_texts)
    compare_texts.set_defaults(run=lambda args, rest: compare.main(args), parser=compare_texts)
    generate_text = commands.add_parser(
        "generate",
        help="stream a text from a real network",
        description="Continue a prompt with a network, drafted and verified in one compiled loop, "
        "and mark the tokens that were drafted and accepted. Prints the text as it comes, then tokens "
        "per target call and what ends a text.",
        epilog="exit status: 0 if the text was written, 1 if a round decided on no token, 2 for bad "
        "arguments, models that do not fit each other, or something that is not installed",
    )
    generate.add_arguments(generate_text)
    generate_text.set_defaults(run=lambda args, rest: generate.main(args), parser=generate_text)
    replay = commands.add_parser(
        "replay",
        help="derive every verdict of a record file again",
        description="Replay the rounds of a file that `compare --save` or "
        "`jaxspec.decode.save` wrote: draw the candidates again from the draft's draws, "
        "derive each verdict again, and say which round differs.",
        epilog="exit status: 0 if every round is as recorded, 1 if one differs, 2 if the file cannot "
        "be read or is no record of rounds, or output cannot be written",
    )
    replay.add_argument("file", metavar="FILE", help="a .json or .npz file of rounds")
    replay.set_defaults(run=run_replay, parser=replay)
    # The benchmarks read their own arguments, --help among them.
    bench = commands.add_parser(
        "bench", add_help=False, help="time the verifiers against a floor measured in the same run"
    )
    bench.set_defaults(run=run_bench)
    return parser


def run_everything(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Audit every rule, then verify real text."""
    del args, rest
    start = time.perf_counter()
    progress = Progress()
    report = audit_rules(progress)
    print_audit(report)
    models = compare.models_of("pair")
    prompt = compare.held_out_line()
    tokens = compare.encode_prompt(prompt, models.alphabet)
    decoded = compare.decode_all(models, tokens, compare.NEW_TOKENS, 0, progress)
    compare.print_decoded(decoded, models)
    is_expected = compare.print_acceptance(decoded)
    compare.print_texts(prompt, decoded, models.alphabet)
    print_result(report, seconds=time.perf_counter() - start)
    if not is_expected:
        print_line(
            "NOT AS EXPECTED: the acceptance on real text is not what the rows say it must be"
        )
    return 0 if report.is_proved and is_expected else 1


def run_audit(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Audit every rule."""
    del rest
    start = time.perf_counter()
    report = audit_rules(Progress())
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_audit(report)
        print_result(report, seconds=time.perf_counter() - start)
    return 0 if report.is_proved else 1


def run_bench(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Hand over to the benchmarks."""
    del args
    from jaxspec.cli import bench

    return bench.main(list(rest))


def run_replay(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Derive every verdict of a file again."""
    del rest
    try:
        rounds = load(args.file)
        if not isinstance(rounds, list):
            raise RecordError(f"{args.file}: holds a decode state, wanted rounds")
    except (OSError, RecordError) as error:
        return refuse(explain(error), "replay")
    found = differences(rounds)
    for difference in found:
        print_line(str(difference))
    differing = len({difference.round for difference in found})
    print_line(f"{count(len(rounds), 'round')} replayed, {differing} differ")
    return 1 if found else 0


def print_audit(report: AuditReport) -> None:
    """Print grids and laws, a line each."""
    jaxspec_version, *others = (f"{name} {number}" for name, number in report.versions.items())
    print_line(f"{jaxspec_version} on {report.device}, with {', '.join(others)}")
    print()
    print_line("COUNTS of outcomes over grids of 10000 draws, through the jitted verifiers")
    lines, rows = [], []
    for grid, counts in report.grids.items():
        name, is_known = grid.replace("_", " "), mark(counts == KNOWN_COUNTS[grid])
        lines.append(f"  {name:<20} {list(counts)!s:<67} {is_known:>5}")
        rows.append((name, {"counts": str(list(counts)), "as known:": is_known}))
    print_table(lines, rows)
    print()
    print_line("EXACT LAWS of one round, draft draws included, held against the target's joint law")
    lines, rows = [f"  {'rule':<20} {'case':<40} {'tv':>7} {'accepted':>9} {'known':>9}"], []
    above = ""
    for law in report.laws:
        rule, above = law.rule if law.rule != above else "", law.rule
        known = "" if law.known_accepted is None else f"{law.known_accepted:.6f}"
        tv, accepted, is_proved = (
            f"{law.tv:.1e}",
            f"{law.expected_accepted:.6f}",
            mark(law.is_proved),
        )
        lines.append(f"  {rule:<20} {law.case:<40} {tv:>7} {accepted:>9} {known:>9} {is_proved:>4}")
        cells = {"tv": tv, "accepted": accepted, "known": known, "proved:": is_proved}
        rows.append((f"{law.rule}: {law.case}", cells))
    print_table(lines, rows)
    print_note(
        "tv: total variation from the target's law, at most 1e-6. accepted: mean number of accepted "
        "tokens; known: what theory says."
    )
    print()


def print_result(report: AuditReport, *, seconds: float) -> None:
    """Print what is proved, or what is not and why."""
    for name, counts in report.grids.items():
        if counts != KNOWN_COUNTS[name]:
            wanted = list(KNOWN_COUNTS[name])
            print_line(f"NOT PROVED: {name}: counted {list(counts)}, wanted {wanted}")
    for law in report.laws:
        if not law.is_proved:
            print_line(
                f"NOT PROVED: {law.rule}, {law.case}: tv {law.tv:.1e}, mass of impossible text "
                f"{law.impossible:.1e}, flagged {law.flagged:.1e}, cells missed {law.cells.misses}"
            )
    if report.is_proved:
        rules = len({law.rule for law in report.laws})
        print_line(
            f"PROVED in {seconds:.0f} s: {rules} rules in {len(report.laws)} cases, total variation "
            f"at most {report.greatest_tv:.1e}"
        )
