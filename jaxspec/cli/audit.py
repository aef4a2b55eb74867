"""Check every rule exactly, through the public jitted verifiers.

Counts outcomes over grids of draws, and computes the exact law of one round of every rule, draft
draws included, in small instances. A rule is proved in an instance if the law's total variation from
the target's is at most 1e-6, no text of target probability 0 occurs, no input is flagged, replays
agree with every cell of the law, and the mean number of accepted tokens is the known one where one
is known.
"""

import argparse
import json
import time

from jaxspec.audit import AuditReport, audit_rules
from jaxspec.audit.report import KNOWN_COUNTS
from jaxspec.cli.terminal import Progress, mark, print_line, print_table, wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.epilog = (
        "exit status: 0 if every rule is proved, 1 if not, 2 for bad arguments or output that cannot "
        "be written"
    )


def run(args: argparse.Namespace) -> int:
    """Audit every rule and print the report."""
    start = time.perf_counter()
    report = audit_rules(Progress())
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report)
        print_result(report, seconds=time.perf_counter() - start)
    return 0 if report.is_proved else 1


def print_report(report: AuditReport) -> None:
    """Print grids and laws, one per line."""
    jaxspec_version, *others = (f"{name} {number}" for name, number in report.versions.items())
    print_line(f"{jaxspec_version} on {report.device}, with {', '.join(others)}")
    print()
    print_line("COUNTS of outcomes over grids of 10000 draws, through the jitted verifiers")
    grids = (
        (name.replace("_", " "), str(list(counts)), mark(counts == KNOWN_COUNTS[name]))
        for name, counts in report.grids.items()
    )
    print_table({":": "<20", "counts:": "<67", "as known:": ">5"}, grids, "  ")
    print()
    print_line(
        "EXACT LAWS of one round, draft draws included, compared with the target's joint law"
    )
    laws = (
        (law.rule, law.case, law.tv, law.expected_accepted, law.known_accepted, mark(law.is_proved))
        for law in report.laws
    )
    columns = {"rule": "<20", "case": "<40", "tv": ">7.1e", "accepted": ">9.6f", "known": ">9.6f"}
    print_table({**columns, "proved:": ">4"}, laws, "  ")
    note = (
        "tv: total variation from the target's law, at most 1e-6. accepted: mean number of accepted "
        "tokens; known: what theory says."
    )
    print(wrapped(note, "  ", "  "))
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
                f"NOT PROVED: {law.rule}, {law.case}: tv {law.tv:.1e}, probability of impossible "
                f"text {law.impossible:.1e}, flagged {law.flagged:.1e}, cells missed "
                f"{law.cells.misses}"
            )
    if report.is_proved:
        rules = len({law.rule for law in report.laws})
        print_line(
            f"PROVED in {seconds:.0f} s: {rules} rules in {len(report.laws)} cases, total variation "
            f"at most {report.greatest_tv:.1e}"
        )
