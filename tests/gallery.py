"""Run the gallery of faulty verifiers over many seeds: `python tests/gallery.py`.

Every fault of `helpers/gallery.py` must be rejected at each of 20 seeds, and none of the library's
rules, as foreign functions, at any of 200. The suite runs it at one seed; this takes about an hour.
"""

import argparse
import collections
import time

from helpers.gallery import FAULTS, RIGHT, Entry

from jaxspec.audit import check_lossless, lossless


def passes(entry: Entry, seed: int, randomness: str = "") -> bool:
    """Check one verifier."""
    how = {"randomness": randomness or entry.randomness, "seed": seed, **entry.how}
    return check_lossless(entry.verify, kind=entry.kind, **how).passes


def main() -> None:
    """Print what passes of the faults, and what fails of the rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="seeds for every fault")
    parser.add_argument("--rules", type=int, default=200, help="seeds for every rule")
    parser.add_argument("--budget", type=int, default=60_000, help="calls for a rule and seed")
    parser.add_argument("--only", default="", help="faults whose names contain this")
    args = parser.parse_args()
    lossless.fitting_faults = lambda *_: ()  # verdicts only, no names
    start = time.process_time()
    missed = collections.Counter()
    faults = {name: entry for name, entry in FAULTS.items() if args.only in name}
    for name, entry in faults.items():
        for seed in range(args.faults):
            missed[name] += passes(entry, seed)
        print(f"{time.process_time() - start:7.0f} s  {name}: missed {missed[name]}", flush=True)
    print(f"{len(faults)} faults, {args.faults} seeds, missed: {+missed}", flush=True)
    wrong = collections.Counter()
    for seed in range(args.rules):
        for name, entry in RIGHT.items():
            how = {**entry.how, "budget": args.budget}
            wrong[name] += not passes(Entry(entry.verify, entry.kind, how, "numpy"), seed)
        print(f"{time.process_time() - start:7.0f} s  seed {seed}: {+wrong}", flush=True)
    print(f"{len(RIGHT)} rules, {args.rules} seeds, rejected: {+wrong}")


if __name__ == "__main__":
    main()
