"""Check every rule exactly, through the public jitted verifiers; or with --verifier any other one.

Counts outcomes over grids of draws, and computes the exact law of one round of every rule, draft
draws included, in small instances. A rule is proved in an instance if the law's total variation from
the target's is at most 1e-6, no text of target probability 0 occurs, no input is flagged, the fields
of the verdicts agree with each other, their law is that of the rule written plainly, and replays
agree with every box of the law. Batches of rounds over a real vocabulary, some of them with bad
rows, draws or trees, must have the verdicts that the plain rule and the documentation say.

With --verifier a Python function is checked as by `jaxspec.audit.check_lossless`, which describes its
arguments and results: its law is exact if it draws from explicit uniforms, else it is sampled.
"""

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from jaxspec.audit import AuditReport, audit_rules, check_lossless, precision
from jaxspec.audit.batches import VOCAB
from jaxspec.audit.foreign import RANDOMNESS
from jaxspec.audit.lossless import BUDGET
from jaxspec.audit.report import KNOWN_COUNTS
from jaxspec.audit.settings import KINDS
from jaxspec.cli.terminal import (
    Progress,
    UserError,
    at_least,
    mark,
    option,
    print_line,
    print_table,
    seed,
    user_errors,
    wrapped,
)
from jaxspec.verify import RULES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--precision", action="store_true",
        help="instead, measure what float32 costs at V up to 262144: a Markdown table",
    )  # fmt: skip
    foreign = parser.add_argument_group("another verifier")
    option(foreign, "--verifier PACKAGE.MODULE:FUNCTION", "function to check instead of the rules")
    option(foreign, "--kind", "what it verifies", choices=KINDS)
    option(foreign, "--randomness", "what it draws from", default="numpy", choices=RANDOMNESS)
    option(foreign, "--rule", "rule whose acceptance it must have", choices=tuple(RULES))
    option(foreign, "--num-uniforms K", "explicit uniforms of a call", at_least(1))
    option(foreign, "--budget CALLS", "most calls", at_least(1), BUDGET)
    option(foreign, "--seed N", "seed of all draws", seed, 0)
    foreign.add_argument("--batched", action="store_true", help="it takes a batch of sequences")
    foreign.add_argument("--no-bonus", action="store_true", help="no token follows a whole path")
    parser.epilog = (
        "exit status: 0 if every rule is proved, or the verifier passes; 1 if not (a verifier also if "
        "its output is invalid, or its acceptance is not that of --rule); 2 for bad arguments or "
        "output that cannot be written"
    )


def run(args: argparse.Namespace) -> int:
    """Audit every rule or one verifier, and print the report."""
    if args.verifier is not None:
        return run_verifier(args)
    if args.kind is not None:
        raise UserError("--kind is for a verifier: name it by --verifier package.module:function")
    if args.precision:
        return run_precision(is_json=args.json)
    start = time.perf_counter()
    report = audit_rules(Progress())
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report)
        print_result(report, seconds=time.perf_counter() - start)
    return 0 if report.is_proved else 1


def run_precision(*, is_json: bool) -> int:
    """Print the distances of float32 laws from the exact ones; return 1 if one is too great."""
    progress, measured = Progress(), []
    total = len(precision.VOCABS) * len(precision.ROWS) * len(precision.FORMS)
    total *= len(precision.DTYPES)
    for each in precision.precisions():
        measured.append(each)
        progress(f"{each.rows}, {each.form}, {each.dtype}", len(measured), total)
    if is_json:
        print(json.dumps([dataclasses.asdict(each) for each in measured], indent=2))
    else:
        print(precision.markdown(measured))
    most = max(max(each.weighed, each.bonus_weighed) for each in measured)
    return 0 if most <= precision.LIMIT else 1


def run_verifier(args: argparse.Namespace) -> int:
    """Check one verifier and print its report."""
    if args.kind is None:
        raise UserError(f"--verifier needs --kind, one of {', '.join(KINDS)}")
    verify = import_function(args.verifier)
    with user_errors():
        report = check_lossless(
            verify,
            kind=args.kind,
            randomness=args.randomness,
            rule=args.rule,
            batched=args.batched,
            bonus=not args.no_bonus,
            num_uniforms=args.num_uniforms,
            budget=args.budget,
            seed=args.seed,
            progress=Progress(),
        )
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        for line in str(report).splitlines():
            print_line(line)
    return 0 if report.passes else 1


def import_function(name: str) -> Callable[..., Any]:
    """Import "package.module:function", also from the working directory."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f"--verifier is {name!r}: must be package.module:function")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UserError(f"--verifier is {name!r}: {error}") from error
    if not callable(found):
        raise UserError(f"--verifier is {name!r}: not a function")
    return found


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
        (law.rule, law.case, law.tv, law.verdict_tv, law.expected_accepted, mark(law.is_proved))
        for law in report.laws
    )
    columns = {"rule": "<20", "case": "<38", "tv": ">7.1e", "verdicts": ">8.1e"}
    print_table({**columns, "accepted": ">9.6f", "proved:": ">4"}, laws, "  ")
    note = (
        "tv: total variation of the text's law from the target's; verdicts: of the law of accepted "
        "nodes and tokens from the plain rule's; both at most 1e-6. accepted: mean number of "
        f"accepted tokens. Up to a chance of 1e-6, no draws of volume {report.uncertified:.0e} have "
        "another outcome than their box."
    )
    print(wrapped(note, "  ", "  "))
    print()
    print_line(f"ROUNDS in batches over {VOCAB} tokens, sound and unsound, by the plain rules")
    batches = ((name, mark(not faults)) for name, faults in report.batches.items())
    print_table({"rule": "<20", "as they must be:": ">4"}, batches, "  ")
    print()


def print_result(report: AuditReport, *, seconds: float) -> None:
    """Print what is proved, or what is not and why."""
    for failure in report.failures:
        print(wrapped(f"NOT PROVED: {failure}", "", "  "))
    if report.is_proved:
        rules = len({law.rule for law in report.laws})
        print_line(
            f"PROVED in {seconds:.0f} s: {rules} rules in {len(report.laws)} cases, total variation "
            f"at most {report.greatest_tv:.1e}"
        )
