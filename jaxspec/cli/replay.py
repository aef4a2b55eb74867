"""Recompute the rounds of a file written by `compare --save` or `jaxspec.decode.save`.

Draws the candidates again from the recorded draft draws, recomputes each verdict, and names the
rounds that differ.
"""

import argparse

from jaxspec.cli.terminal import count, print_line, user_errors
from jaxspec.decode import DecodeState, differences, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("file", metavar="FILE", help="a .json or .npz file of rounds")
    parser.epilog = (
        "exit status: 0 if every round is as recorded, 1 if one differs, 2 if the file cannot be "
        "read or does not hold rounds, or output cannot be written"
    )


def run(args: argparse.Namespace) -> int:
    """Replay the file and print where it differs."""
    with user_errors():
        rounds = load(args.file)
        if isinstance(rounds, DecodeState):
            raise ValueError(f"{args.file}: holds a decode state, not rounds")
    found = differences(rounds)
    for difference in found:
        print_line(str(difference))
    differing = len({difference.round for difference in found})
    print_line(f"{count(len(rounds), 'round')} replayed, {differing} differ")
    return 1 if found else 0
