"""Decode a prompt plainly and with each drafter, and compare cost and distribution.

The drafters are a sampled path, a fixed tree and an adaptive tree. Prints for each the queries to the
models, the acceptance, and a test of whether the first two tokens have the same distribution as in
plain decoding. The texts themselves need not agree: the decoders use different draws.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import experiments, storage
from jaxspec.cli.terminal import (
    BAD_INPUT,
    Progress,
    at_least,
    count,
    explain,
    fail,
    mark,
    option,
    print_line,
    print_rows,
    print_table,
    print_text,
    reason,
    seed,
    user_errors,
    wrapped,
)
from jaxspec.decode import CachedNetwork, Target, save
from jaxspec.decode.metrics import chances_of
from jaxspec.decode.target import as_target
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, Drafter, FixedTree, SampledPath
from jaxspec.experiments.plots import assert_plottable
from jaxspec.experiments.report import cells, plain
from jaxspec.models import Provider, bundled_pair, bundled_providers, bundled_text, split_text
from jaxspec.models.provider import Context
from jaxspec.models.text import decode as text_of
from jaxspec.models.text import encode

NEW_TOKENS = 180
SHOWN = 250
LAW_TOKENS = 2
MAX_DEVIATION = 5.0
"""Standard errors that acceptance on real text may differ from its mean: one seed in 2 million."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    purpose = (
        "text to continue, of the characters of the bundled text (default: a line of it that the "
        "models were not trained on)"
    )
    option(parser, "--prompt TEXT", purpose)
    purpose = (
        "the bundled pair of networks, or a 5-gram target and a 3-gram draft counted from the bundled "
        "text"
    )
    option(parser, "--models", purpose, default="pair", choices=("pair", "ngram"))
    purpose = "characters to decode with each decoder"
    option(parser, "--new-tokens N", purpose, at_least(1), NEW_TOKENS)
    option(parser, "--seed S", "random seed", seed, 0)
    purpose = "runs of each decoder for the test of distributions, 0 for no test"
    option(parser, "--law-runs N", purpose, at_least(0), 200)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    purpose = "also plot tokens per batch and acceptance to an image file; needs the extra `plot`"
    option(parser, "--plot FILE", purpose)
    purpose = "also save the rounds of the adaptive tree for `replay`, as .json or .npz"
    option(parser, "--save FILE", purpose)
    parser.epilog = (
        "exit status: 0 if no distribution differs, 1 if one does (by chance, at level 0.001 for each "
        "decoder, or because it is wrong), 2 for bad arguments or output that cannot be written"
    )


def run(args: argparse.Namespace) -> int:
    """Decode a prompt with each decoder and compare cost and laws."""
    prompt = held_out_line() if args.prompt is None else args.prompt
    with user_errors():
        check_files(args)
        models = load_models(args.models)
        tokens = encode_prompt(prompt, models)
    found = decode(models, tokens, args.new_tokens, args.seed, Progress(), args.law_runs)
    failures = write_files(found, args)
    laws = {each.speculative.name: each.law for each in found if each.law is not None}
    if args.json:
        results = {
            "prompt": prompt,
            "seed": args.seed,
            "runs": [run_to_json(run) for run in runs_of(found)],
            "laws": {name: dataclasses.asdict(law) for name, law in laws.items()},
        }
        print(json.dumps(results, indent=2))
    else:
        print_costs(found, models)
        print_acceptance(found)
        for name, law in laws.items():
            print(wrapped(f"{name} against plain, {law}", "  ", "    "))
        if laws:
            print()
        print_texts(prompt, found, models)
    for failure in failures:
        fail(failure, "compare")
    if failures:
        return BAD_INPUT
    return 0 if all(law.agrees for law in laws.values()) else 1


def print_defaults(progress: Progress) -> bool:
    """Decode the default prompt and print it; return whether acceptance is as expected."""
    models, prompt = load_models("pair"), held_out_line()
    found = decode(models, encode_prompt(prompt, models), NEW_TOKENS, 0, progress)
    print_costs(found, models)
    is_expected = print_acceptance(found)
    print_texts(prompt, found, models)
    return is_expected


# --- what is decoded


class Models(NamedTuple):
    """A target and a draft for the host loop, and the characters that are their tokens."""

    target: Target
    draft: Provider
    alphabet: str


def load_models(name: str) -> Models:
    """Return the bundled networks ("pair") or n-gram models ("ngram")."""
    if name == "ngram":
        target, draft, alphabet = bundled_providers()
        return Models(as_target(target), draft, alphabet)
    network, smaller = bundled_pair()
    slots = network.max_context
    assert slots is not None and network.tokenizer is not None
    return Models(
        target=CachedNetwork(network, slots=slots + AdaptiveTreePolicy().max_nodes),
        draft=CachedNetwork(smaller, slots=slots, chunk=4).provider(),
        alphabet="".join(network.tokenizer.pieces),
    )


def held_out_line() -> str:
    """Return a line of the bundled text that the models were not trained on."""
    return split_text(bundled_text(), held_out=True).splitlines()[1] + "\n"


def encode_prompt(prompt: str, models: Models) -> Context:
    """Return the token ids of a prompt; raise ValueError if it cannot be continued."""
    if unknown := sorted({symbol for symbol in prompt if symbol not in models.alphabet}):
        raise ValueError(
            f"--prompt: {unknown[0]!r} is not among the {len(models.alphabet)} characters of the "
            f"bundled text, {models.alphabet!r}"
        )
    most = models.target.max_context
    if most is not None and len(prompt) >= most:
        raise ValueError(
            f"--prompt has {len(prompt)} characters: {models.target.name} has room for {most} in all"
        )
    return tuple(encode(prompt, models.alphabet).tolist())


def decode(
    models: Models,
    prompt: Context,
    new_tokens: int,
    seed: int,
    progress: Progress,
    law_runs: int = 0,
) -> list[experiments.Comparison]:
    """Decode a prompt once plainly and with each drafter; compare laws if `law_runs` is not 0."""
    draft = models.draft
    drafters: dict[str, Drafter] = {
        "path": SampledPath(draft, depth=4),
        "fixed tree": FixedTree(draft, shape=(3, 2, 1, 1)),
        "adaptive tree": AdaptiveTree(draft),
    }
    found: list[experiments.Comparison] = []
    for number, (name, drafter) in enumerate(drafters.items(), 1):
        comparison = experiments.compare(
            models.target,
            drafter,
            prompt,
            jax.random.key(seed),
            new_tokens=new_tokens,
            name=name,
            baseline=found[0].baseline if found else None,
            law_tokens=LAW_TOKENS if law_runs else 0,
            law_runs=max(law_runs, 1),
            law_key=jax.random.key(seed + number),
            keep_records=True,
            progress=progress,
        )
        found.append(comparison)
    return found


def runs_of(found: Sequence[experiments.Comparison]) -> list[experiments.Run]:
    """Return the plain run and those of the drafters."""
    return [found[0].baseline, *(each.speculative for each in found)]


# --- files


def check_files(args: argparse.Namespace) -> None:
    """Raise before the work if a file cannot be written."""
    if args.plot is not None:
        assert_plottable(args.plot)
    if args.save is not None and Path(args.save).suffix not in (".json", ".npz"):
        raise ValueError(f"--save {args.save}: the name must end in .json or .npz")
    for flag, name in (("--plot", args.plot), ("--save", args.save)):
        try:
            if name is not None:
                storage.destination(name)
        except OSError as error:
            raise ValueError(f"{flag} {storage.shortened(name)}: {reason(error)}") from error


def write_files(found: Sequence[experiments.Comparison], args: argparse.Namespace) -> list[str]:
    """Write the files of `--save` and `--plot`; return why some could not be written."""
    failures = []
    if args.save is not None:
        last = found[-1].speculative
        try:
            save(args.save, last.records)
            print(f"rounds of the {last.name} saved to {args.save}", file=sys.stderr)
        except (OSError, ValueError) as error:
            failures.append(f"--save {args.save}: not written: {explain(error)}")
    if args.plot is not None:
        try:
            experiments.plot(found, args.plot)
        except Exception as error:  # matplotlib raises its own types
            failures.append(f"--plot {args.plot}: not written: {explain(error)}")
    return failures


# --- what is printed


def run_to_json(run: experiments.Run) -> dict[str, Any]:
    """Return a run in plain values, with the rates of its metrics."""
    values, metrics = plain(run), run.metrics
    values["metrics"] |= {
        "acceptance": metrics.acceptance.value,
        "tokens_per_target_batch": metrics.tokens_per_target_batch,
        "block_efficiency": metrics.block_efficiency,
    }
    return values


def print_costs(found: Sequence[experiments.Comparison], models: Models) -> None:
    """Print the cost of each run."""
    runs = runs_of(found)
    length = max(len(run.text) for run in runs)
    names = f"target {models.target.name}, draft {models.draft.name}"
    print_line(f"REAL TEXT: {count(length, 'character')}, {names}")
    lines = [f"  {line}" for line in experiments.table(runs).splitlines()]
    heads = ["", *cells(runs[0])]
    print_rows(heads, [(run.name, *cells(run).values()) for run in runs], lines)
    note = (
        "queries: contexts scored; calls: invocations of the model; batches: hypothetical, one for "
        "each round of the target and for each level of the draft. No time is claimed here."
    )
    print(wrapped(note, "  ", "  "))
    print()


def print_acceptance(found: Sequence[experiments.Comparison]) -> bool:
    """Print acceptance next to its mean by the rows of the nodes visited; return whether all agree."""
    rows = []
    for run in [each.speculative for each in found]:
        chances = np.array([chance for record in run.records for chance in chances_of(record)])
        if chances.size == 0:
            continue
        hits = sum(int(record.verdict.num_accepted) for record in run.records)
        rate, mean = hits / chances.size, float(chances.mean())
        error = float(np.sqrt(np.sum(chances * (1 - chances)))) / chances.size
        holds = mark(abs(rate - mean) <= MAX_DEVIATION * error + 1e-6)
        rows.append((run.name, rate, f"{mean:.3f} +- {error:.3f}", holds))
    if not rows:  # with a budget of one token nothing is drafted
        return True
    columns = {":": "<14", "acceptance": ">11.3f", "expected": ">17", "as expected:": ">5"}
    print_table(columns, rows, "  ")
    note = (
        "acceptance: how often one of a node's candidates was accepted, over the nodes visited. "
        "expected: its mean by the rows of these nodes, with the standard error: sum min(p, q) for "
        "the path, the target's mass on the candidates for the trees."
    )
    print(wrapped(note, "  ", "  "))
    print()
    return all(holds == mark(True) for *_, holds in rows)


def print_texts(prompt: str, found: Sequence[experiments.Comparison], models: Models) -> None:
    """Print the first words of each text."""
    print_text("prompt", prompt)
    for run in runs_of(found):
        text = text_of(run.text, models.alphabet)
        shown = text if len(text) <= SHOWN else text[:SHOWN].rpartition(" ")[0] + " ..."
        print_text(run.name, shown)
    print()
