"""The command `compare`: decode one prompt by the host loop in several ways and say what each cost.

Its parts are the second half of the main job, too.
"""

import argparse
import dataclasses
import functools
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxspec import experiments, storage
from jaxspec.cli.terminal import (
    Progress,
    check_seed,
    count,
    explain,
    mark,
    print_line,
    print_note,
    print_table,
    print_text,
    reason,
    refuse,
    width,
)
from jaxspec.decode import (
    CachedNetwork,
    Decoder,
    RoundRecord,
    Target,
    metrics_of,
    save,
)
from jaxspec.decode.metrics import chances_of
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, Drafter, FixedTree, SampledPath
from jaxspec.models import bundled_pair, bundled_providers, bundled_text, split_text
from jaxspec.models.provider import Context, Provider
from jaxspec.models.text import decode as text_of
from jaxspec.models.text import encode

NEW_TOKENS = 180
SHOWN = 250
LAW_TOKENS = 2
MAX_DEVIATION = 5.0
"""Standard errors that acceptance on real text may lie off its mean: one seed in 2 million does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `compare`."""
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue, at least one of the characters that the shipped text uses "
        "(default: a line of it that the models have not seen)",
    )
    parser.add_argument(
        "--models",
        choices=("pair", "ngram"),
        default="pair",
        help="the networks that come with the package, or a 5-gram target and a 3-gram draft counted "
        "from its text (default %(default)s)",
    )
    parser.add_argument(
        "--new-tokens",
        metavar="N",
        type=int,
        default=NEW_TOKENS,
        help="characters to decode with each decoder (default %(default)s)",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="of all draws (default %(default)s)"
    )
    parser.add_argument(
        "--law-runs",
        metavar="N",
        type=int,
        default=200,
        help="runs of each decoder for the test of laws, 0 for no test (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="also plot tokens per batch and acceptance; needs the extra plot",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="also save the rounds of the adaptive tree for `replay`, as .json or .npz",
    )


def main(args: argparse.Namespace) -> int:
    """Decode one prompt by each decoder and compare what it cost, and the laws."""
    prompt = held_out_line() if args.prompt is None else args.prompt
    try:
        check(args)
        models = models_of(args.models)
        tokens = encode_prompt(prompt, models.alphabet)
        if models.max_context is not None and len(tokens) >= models.max_context:
            raise ValueError(
                f"--prompt has {len(tokens)} characters: {models.target.name} has room for "
                f"{models.max_context} in all"
            )
    except (ImportError, OSError, ValueError) as error:
        return refuse(explain(error), "compare")
    progress = Progress()
    decoded = decode_all(models, tokens, args.new_tokens, args.seed, progress)
    laws = compare_laws(decoded, tokens, args.law_runs, args.seed, progress)
    failures = write_files(decoded, args)
    print_results(args, prompt, models, decoded, laws)
    for failure in failures:
        refuse(failure, "compare")
    if failures:
        return 2
    return 0 if all(law.agrees for law in laws.values()) else 1


def print_results(
    args: argparse.Namespace,
    prompt: str,
    models: "Models",
    decoded: Sequence["Decoded"],
    laws: Mapping[str, experiments.LawComparison],
) -> None:
    """Print what was found, in words or as one JSON object."""
    if args.json:
        runs = [experiments.run_to_json(each.run) for each in decoded]
        found = {name: experiments.law_to_json(law) for name, law in laws.items()}
        print(json.dumps({"prompt": prompt, "runs": runs, "laws": found}, indent=2))
        return
    print_decoded(decoded, models)
    print_acceptance(decoded)
    for name, law in laws.items():
        words = f"{name} against plain, {experiments.law_in_words(law)}"
        print(textwrap.fill(words, width(), initial_indent="  ", subsequent_indent="    "))
    if laws:
        print()
    print_texts(prompt, decoded, models.alphabet)


def check(args: argparse.Namespace) -> None:
    """Refuse arguments before the work rather than after it."""
    if args.prompt == "":
        raise ValueError("--prompt is empty: there must be a character to continue from")
    if args.new_tokens < 1:
        raise ValueError(f"--new-tokens is {args.new_tokens}: must be at least 1")
    if args.law_runs < 0:
        raise ValueError(f"--law-runs is {args.law_runs}: must be at least 0")
    check_seed(args.seed)
    if args.plot is not None:
        experiments.assert_plottable(args.plot)
    if args.save is not None and Path(args.save).suffix not in (".json", ".npz"):
        raise ValueError(f"--save {args.save}: the name must end in .json or .npz")
    for option, name in (("--plot", args.plot), ("--save", args.save)):
        if name is None:
            continue
        try:
            storage.destination(name)
        except OSError as error:
            raise ValueError(f"{option} {storage.shortened(name)}: {reason(error)}") from error


def write_files(decoded: Sequence["Decoded"], args: argparse.Namespace) -> list[str]:
    """Write what `--save` and `--plot` ask for.

    Returns:
      What could not be written and why: by now there are results, which are not to be lost with it.
    """
    failures = []
    if args.save is not None:
        try:
            save(args.save, decoded[-1].records)
        except (OSError, ValueError) as error:
            failures.append(f"--save {args.save}: not written: {explain(error)}")
        else:
            print(f"rounds of the {decoded[-1].run.name} saved to {args.save}", file=sys.stderr)
    if args.plot is not None:
        plain, *others = (each.run for each in decoded)
        try:
            experiments.plot([experiments.Comparison(plain, other) for other in others], args.plot)
        except Exception as error:  # matplotlib has errors of its own
            failures.append(f"--plot {args.plot}: not written: {explain(error)}")
    return failures


@dataclasses.dataclass(frozen=True)
class Models:
    """A target and a draft for the host loop.

    Attributes:
      target: the target.
      draft: the draft.
      alphabet: the characters that are their tokens.
      max_context: most characters of a text; None for no limit.
    """

    target: Target | Provider
    draft: Provider
    alphabet: str
    max_context: int | None = None


def models_of(name: str) -> Models:
    """Return the shipped networks ("pair") or n-gram models ("ngram")."""
    if name == "ngram":
        target, draft, alphabet = bundled_providers()
        return Models(target=target, draft=draft, alphabet=alphabet)
    network, smaller = bundled_pair()
    slots = network.max_context
    assert slots is not None and network.tokenizer is not None
    attention = CachedNetwork(network, slots=slots + AdaptiveTreePolicy().max_nodes)
    return Models(
        target=attention,
        draft=CachedNetwork(smaller, slots=slots, chunk=4).provider(),
        alphabet="".join(network.tokenizer.pieces),
        max_context=slots,
    )


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A decode with the records of its rounds."""

    run: experiments.Run
    records: tuple[RoundRecord, ...]
    decoder: Decoder


def decode_all(
    models: Models,
    prompt: Context,
    new_tokens: int,
    seed: int,
    progress: Progress,
) -> list[Decoded]:
    """Decode a prompt plainly and by each drafter."""
    draft = models.draft
    plain = Decoder(
        models.target,
        max_context=models.max_context,
    )
    drafters: dict[str, Drafter] = {
        "path": SampledPath(draft, depth=4),
        "fixed tree": FixedTree(draft, shape=(3, 2, 1, 1)),
        "adaptive tree": AdaptiveTree(draft),
    }
    decoders = {"plain": plain}
    decoders |= {
        name: dataclasses.replace(plain, drafter=drafter) for name, drafter in drafters.items()
    }
    decoded = []
    for name, decoder in decoders.items():
        state = decoder.start(prompt, jax.random.key(seed), new_tokens=new_tokens)
        records = []
        for after, record in decoder.rounds(state):
            state = after
            records.append(record)
            progress(f"decoding: {name}", len(state.new_tokens), new_tokens)
        run = experiments.Run(
            name=name,
            decoder=decoder.describe(),
            prompt=prompt,
            seed=seed,
            text=state.new_tokens,
            finished=state.ending.name.lower(),
            metrics=metrics_of(state.rounds),
        )
        decoded.append(Decoded(run=run, records=tuple(records), decoder=decoder))
    return decoded


def compare_laws(
    decoded: Sequence[Decoded], prompt: Context, runs: int, seed: int, progress: Progress
) -> dict[str, experiments.LawComparison]:
    """Compare the law of the first two tokens of each decoder with that of plain decoding."""
    plain = decoded[0].decoder
    laws = {}
    for place, each in enumerate(decoded[1:] if runs else (), 1):
        name = each.run.name
        laws[name] = experiments.compare_laws(
            plain,
            each.decoder,
            prompt,
            tokens=LAW_TOKENS,
            runs=runs,
            seed=seed + place,
            progress=functools.partial(progress, f"runs for the law: {name}"),
        )
    return laws


def held_out_line() -> str:
    """Return a line of the shipped text that the models have not seen."""
    return split_text(bundled_text(), held_out=True).splitlines()[1] + "\n"


def encode_prompt(prompt: str, alphabet: str) -> Context:
    """Return the token ids of a prompt.

    Raises:
      ValueError: a character is not in the alphabet.
    """
    if strange := sorted({symbol for symbol in prompt if symbol not in alphabet}):
        raise ValueError(
            f"--prompt: {strange[0]!r} is not among the {len(alphabet)} characters of the shipped "
            f"text, {alphabet!r}"
        )
    return tuple(encode(prompt, alphabet).tolist())


def print_decoded(decoded: Sequence[Decoded], models: Models) -> None:
    """Print what each decode cost."""
    runs = [each.run for each in decoded]
    length = max(len(run.text) for run in runs)
    names = f"target {models.target.name}, draft {models.draft.name}"
    print_line(f"REAL TEXT: {count(length, 'character')}, {names}")
    lines = textwrap.indent(experiments.table(runs), "  ").splitlines()
    print_table(lines, [(run.name, costs_of(run)) for run in runs])
    print_note(
        "queries: contexts scored; calls: invocations of the model; batches: hypothetical, one for "
        "each round of the target and for each level of the draft. No time is claimed here."
    )
    print()


def costs_of(run: experiments.Run) -> dict[str, str]:
    """Return the cells of a run's row by their heads."""
    metrics = run.metrics
    rates = {
        "tokens/batch": metrics.tokens_per_target_batch,
        "acceptance": metrics.acceptance.value,
    }
    return {
        "rounds": str(metrics.rounds),
        **{name: "-" if value is None else f"{value:.2f}" for name, value in rates.items()},
        **{
            f"{model} {what}": str(getattr(metrics, f"{model}_{what}"))
            for model in ("target", "draft")
            for what in ("queries", "calls", "batches")
        },
    }


def print_acceptance(decoded: Sequence[Decoded]) -> bool:
    """Print acceptance beside its mean by the rows of the nodes visited.

    Returns:
      Whether each is within `MAX_DEVIATION` standard errors of its mean.
    """
    lines, rows = [f"  {'':14} {'acceptance':>11} {'expected':>17}"], []
    is_expected = True
    for each in decoded:
        chances = np.array([c for record in each.records for c in chances_of(record)])
        if chances.size == 0:
            continue
        hits = sum(int(record.verdict.num_accepted) for record in each.records)
        rate, mean = hits / chances.size, float(chances.mean())
        error = float(np.sqrt(np.sum(chances * (1 - chances)))) / chances.size
        holds = abs(rate - mean) <= MAX_DEVIATION * error + 1e-6
        is_expected &= holds
        expected = f"{mean:.3f} +- {error:.3f}"
        lines.append(f"  {each.run.name:14} {rate:11.3f} {expected:>17} {mark(holds):>5}")
        cells = {"acceptance": f"{rate:.3f}", "expected": expected, "as expected:": mark(holds)}
        rows.append((each.run.name, cells))
    if not rows:  # a budget of one token leaves nothing to draft
        return True
    print_table(lines, rows)
    print_note(
        "acceptance: how often one of a node's candidates was accepted, over the nodes visited. "
        "expected: its mean by the rows of these nodes, with the standard error: sum min(p, q) for "
        "the path, the target's mass on the candidates for the trees."
    )
    print()
    return is_expected


def print_texts(prompt: str, decoded: Sequence[Decoded], alphabet: str) -> None:
    """Print the first words of each text."""
    print_text("prompt", prompt)
    for each in decoded:
        text = text_of(each.run.text, alphabet)
        shown = text if len(text) <= SHOWN else text[:SHOWN].rpartition(" ")[0] + " ..."
        print_text(each.run.name, shown)
    print()
