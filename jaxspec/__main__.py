"""The command line: `python -m jaxspec`."""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec import experiments, generate
from jaxspec.audit.report import KNOWN_COUNTS, AuditReport, audit_rules
from jaxspec.decode import (
    AdaptiveTree,
    AdaptiveTreePolicy,
    Decoder,
    Drafter,
    FixedTree,
    RoundRecord,
    SampledPath,
    Scorer,
    chances_of,
    differences,
    load_rounds,
    metrics_of,
    save_rounds,
)
from jaxspec.models import decode as text_of
from jaxspec.models import encode, shipped_models, shipped_providers, shipped_text, split_text
from jaxspec.providers import Context, Provider
from jaxspec.records import RecordError
from jaxspec.score import TreeAttention, score_batched

WIDTH = 96
NEW_TOKENS = 180
SHOWN = 250
LAW_TOKENS = 2
MAX_DEVIATION = 5.0
"""Standard errors that acceptance on real text may lie off its mean: one seed in 2 million does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: the arguments; those of the process by default.

    Returns:
      The exit status: 0 if everything that was to be shown holds, else 1; 130 if interrupted.

    Raises:
      SystemExit: after `--help` and `--version` with status 0, for bad arguments with status 2.
    """
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command != "bench":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status = args.run(args, rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on. Without a place to go, what is left would raise again at exit.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return status


def make_parser() -> argparse.ArgumentParser:
    """Describe the commands; each sets `run`, a function of its arguments and of those left over."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.dedent(
            """\
            Verify speculative decoding in JAX: which drafted tokens a target model keeps.

            Without a command: prove every rule on this machine's device by counting, as `audit`
            does, then verify real text, as `compare` does: decode it plainly, by a sampled path,
            a fixed and an adaptive tree, with the pair of networks that comes with the package.
            Takes about a minute on two cores."""
        ),
        epilog="exit status: 0 if everything that was to be shown holds, 1 if not, 2 for bad "
        "arguments",
    )
    parser.add_argument("--version", action="version", version=f"jaxspec {jaxspec.__version__}")
    parser.set_defaults(run=run_everything)
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
        epilog="exit status: 0 if every rule is proved, 1 if not, 2 for bad arguments",
    )
    audit.add_argument("--json", action="store_true", help="print the report as one JSON object")
    audit.set_defaults(run=run_audit)
    compare = commands.add_parser(
        "compare",
        help="decode one prompt plainly, by a path and by trees, and compare",
        description="Decode a prompt with the shipped target, plainly and with its draft: a sampled "
        "path, a fixed tree, an adaptive tree. Prints what each asked of the "
        "models, its acceptance, and a test of whether the first two tokens have the law of plain "
        "decoding. The texts themselves need not agree: the decoders use different draws.",
        epilog="exit status: 0 if no law differs, 1 if one does (by chance, at level 0.001 for each "
        "decoder, or in earnest), 2 for bad arguments",
    )
    compare.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue, at least one of the characters that the shipped text uses "
        "(default: a line of it that the models have not seen)",
    )
    compare.add_argument(
        "--models",
        choices=("pair", "ngram"),
        default="pair",
        help="the networks that come with the package, or a 5-gram target and a 3-gram draft counted "
        "from its text (default %(default)s)",
    )
    compare.add_argument(
        "--new-tokens",
        metavar="N",
        type=int,
        default=NEW_TOKENS,
        help="characters to decode with each decoder (default %(default)s)",
    )
    compare.add_argument(
        "--seed", metavar="S", type=int, default=0, help="of all draws (default %(default)s)"
    )
    compare.add_argument(
        "--law-runs",
        metavar="N",
        type=int,
        default=200,
        help="runs of each decoder for the test of laws, 0 for no test (default %(default)s)",
    )
    compare.add_argument("--json", action="store_true", help="print one JSON object instead")
    compare.add_argument(
        "--plot",
        metavar="FILE.png",
        help="also plot tokens per batch and acceptance; needs the extra plot",
    )
    compare.add_argument(
        "--save",
        metavar="FILE",
        help="also save the rounds of the adaptive tree for `replay`, as .json or .npz",
    )
    compare.set_defaults(run=run_compare)
    generate_text = commands.add_parser(
        "generate",
        help="stream a text from a real network, with and without a draft",
        description="Continue a prompt with a network, drafted and verified in one compiled loop, "
        "and mark the tokens that were drafted and accepted. Ends with tokens per target call, and "
        "tokens per second beside the plain loop of the same run.",
        epilog="exit status: 0 if the text was written, 1 if a round decided on no token, 2 for bad "
        "arguments, models that do not fit each other, or something that is not installed",
    )
    generate.add_arguments(generate_text)
    generate_text.set_defaults(run=lambda args, rest: generate.main(args))
    replay = commands.add_parser(
        "replay",
        help="derive every verdict of a record file again",
        description="Replay the rounds of a file that `compare --save` or "
        "`jaxspec.decode.save_rounds` wrote: draw the candidates again from the draft's draws, "
        "derive each verdict again, and say which round differs.",
        epilog="exit status: 0 if every round is as recorded, 1 if one differs, 2 if the file cannot "
        "be read or is no record of rounds",
    )
    replay.add_argument("file", metavar="FILE", help="a .json or .npz file of rounds")
    replay.set_defaults(run=run_replay)
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
    models = models_of("pair")
    prompt = held_out_line()
    tokens = encode_prompt(prompt, models.alphabet)
    decoded = decode_all(models, tokens, NEW_TOKENS, 0, progress)
    print_decoded(decoded, models)
    is_expected = print_acceptance(decoded)
    print_texts(prompt, decoded, models.alphabet)
    print_result(report, seconds=time.perf_counter() - start)
    if not is_expected:
        print("NOT AS EXPECTED: the acceptance on real text is not what the rows say it must be")
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
    from jaxspec import bench

    return bench.main(list(rest))


def run_compare(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Decode one prompt by each decoder and compare what it cost, and the laws."""
    del rest
    prompt = held_out_line() if args.prompt is None else args.prompt
    try:
        check_compare(args)
        models = models_of(args.models)
        tokens = encode_prompt(prompt, models.alphabet)
        if models.max_context is not None and len(tokens) >= models.max_context:
            raise ValueError(
                f"--prompt has {len(tokens)} characters: {models.target.name} has room for "
                f"{models.max_context} in all"
            )
    except (ImportError, ValueError) as error:
        return refuse(str(error))
    progress = Progress()
    decoded = decode_all(models, tokens, args.new_tokens, args.seed, progress)
    laws = compare_laws(decoded, tokens, args.law_runs, args.seed, progress)
    try:
        write_files(decoded, args)
    except OSError as error:
        return refuse(str(error))
    agrees = all(law.agrees for law in laws.values())
    if args.json:
        runs = [experiments.run_to_json(each.run) for each in decoded]
        found = {name: experiments.law_to_json(law) for name, law in laws.items()}
        print(json.dumps({"prompt": prompt, "runs": runs, "laws": found}, indent=2))
        return 0 if agrees else 1
    print_decoded(decoded, models)
    print_acceptance(decoded)
    for name, law in laws.items():
        words = f"{name} against plain, {experiments.law_in_words(law)}"
        print(textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent="    "))
    if laws:
        print()
    print_texts(prompt, decoded, models.alphabet)
    return 0 if agrees else 1


def check_compare(args: argparse.Namespace) -> None:
    """Refuse arguments of `compare` before the work rather than after it."""
    if args.prompt == "":
        raise ValueError("--prompt is empty: there must be a character to continue from")
    if args.new_tokens < 1:
        raise ValueError(f"--new-tokens is {args.new_tokens}: must be at least 1")
    if args.law_runs < 0:
        raise ValueError(f"--law-runs is {args.law_runs}: must be at least 0")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed is {args.seed}: must be from 0 to {2**31 - 1}")
    if args.plot is not None:
        experiments.assert_plottable(args.plot)
    if args.save is not None and Path(args.save).suffix not in (".json", ".npz"):
        raise ValueError(f"--save {args.save}: the name must end in .json or .npz")
    for name in (args.plot, args.save):
        if name is not None and not Path(name).parent.is_dir():
            raise ValueError(f"{name}: there is no folder {Path(name).parent}")


def write_files(decoded: Sequence["Decoded"], args: argparse.Namespace) -> None:
    """Write what `--save` and `--plot` ask for."""
    if args.save is not None:
        save_rounds(args.save, decoded[-1].records)
        print(f"rounds of the {decoded[-1].run.name} saved to {args.save}", file=sys.stderr)
    if args.plot is not None:
        plain, *others = (each.run for each in decoded)
        experiments.plot([experiments.Comparison(plain, other) for other in others], args.plot)


def run_replay(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Derive every verdict of a file again."""
    del rest
    try:
        rounds = load_rounds(args.file)
    except (OSError, RecordError) as error:
        return refuse(str(error))
    found = differences(rounds)
    for difference in found:
        print(difference)
    differing = len({difference.round for difference in found})
    print(f"{count(len(rounds), 'round')} replayed, {differing} differ")
    return 1 if found else 0


def refuse(why: str) -> int:
    """Say on standard error what is wrong with the arguments; return the exit status for it."""
    print(f"python -m jaxspec: error: {why}", file=sys.stderr)
    return 2


@dataclasses.dataclass(frozen=True)
class Models:
    """A target and a draft for the host loop.

    Attributes:
      target: the target.
      draft: the draft.
      alphabet: the characters that are their tokens.
      score: who asks the target.
      max_context: most characters of a text; None for no limit.
    """

    target: Provider
    draft: Provider
    alphabet: str
    score: Scorer = score_batched
    max_context: int | None = None


def models_of(name: str) -> Models:
    """Return the shipped networks ("pair") or n-gram models ("ngram")."""
    if name == "ngram":
        target, draft, alphabet = shipped_providers()
        return Models(target=target, draft=draft, alphabet=alphabet)
    network, smaller = shipped_models()
    slots = network.max_context
    assert slots is not None and network.tokenizer is not None
    attention = TreeAttention(network, slots=slots + AdaptiveTreePolicy().max_nodes)
    return Models(
        target=attention.provider(),
        draft=TreeAttention(smaller, slots=slots, chunk=4).provider(),
        alphabet="".join(network.tokenizer.pieces),
        score=attention,
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
    progress: "Progress",
) -> list[Decoded]:
    """Decode a prompt plainly and by each drafter."""
    draft = models.draft
    plain = Decoder(
        target=models.target,
        new_tokens=new_tokens,
        score=models.score,
        max_context=models.max_context,
    )
    drafters: dict[str, Drafter] = {
        "path": SampledPath(draft, depth=4),
        "fixed tree": FixedTree(draft, widths=(3, 2, 1, 1)),
        "adaptive tree": AdaptiveTree(draft),
    }
    decoders = {"plain": plain}
    decoders |= {
        name: dataclasses.replace(plain, drafter=drafter) for name, drafter in drafters.items()
    }
    decoded = []
    for name, decoder in decoders.items():
        state = decoder.start(prompt, jax.random.key(seed))
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
            finished=str(state.finished),
            metrics=metrics_of(state.rounds),
        )
        decoded.append(Decoded(run=run, records=tuple(records), decoder=decoder))
    return decoded


def compare_laws(
    decoded: Sequence[Decoded], prompt: Context, runs: int, seed: int, progress: "Progress"
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
    return split_text(shipped_text(), held_out=True).splitlines()[1] + "\n"


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


class Progress:
    """A line on standard error that is written over, if that is a terminal."""

    def __init__(self) -> None:
        """Find out whether anybody watches."""
        self.is_shown = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is being done; wipe the line once all is done."""
        if self.is_shown:
            line = f"{done}/{total}  {what}" if done < total else ""
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{line[:width]:<{width}}\r", end="", file=sys.stderr, flush=True)


def print_audit(report: AuditReport) -> None:
    """Print grids and laws, a line each."""
    jaxspec_version, *others = (f"{name} {number}" for name, number in report.versions.items())
    print(f"{jaxspec_version} on {report.device}, with {', '.join(others)}")
    print()
    print("COUNTS of outcomes over grids of 10000 draws, through the jitted verifiers")
    for name, counts in report.grids.items():
        is_known = mark(counts == KNOWN_COUNTS[name])
        print(f"  {name.replace('_', ' '):<20} {list(counts)!s:<67} {is_known:>5}")
    print()
    print("EXACT LAWS of one round, draft draws included, held against the target's joint law")
    print(f"  {'rule':<20} {'case':<40} {'tv':>7} {'accepted':>9} {'known':>9}")
    above = ""
    for law in report.laws:
        rule, above = law.rule if law.rule != above else "", law.rule
        known = "" if law.known_accepted is None else f"{law.known_accepted:.6f}"
        print(
            f"  {rule:<20} {law.case:<40} {law.tv:7.1e} {law.expected_accepted:9.6f} {known:>9} "
            f"{mark(law.is_proved):>4}"
        )
    print_note(
        "tv: total variation from the target's law, at most 1e-6. accepted: mean number of accepted "
        "tokens; known: what theory says."
    )
    print()


def print_result(report: AuditReport, *, seconds: float) -> None:
    """Print what is proved, or what is not and why."""
    for name, counts in report.grids.items():
        if counts != KNOWN_COUNTS[name]:
            print(f"NOT PROVED: {name}: counted {list(counts)}, wanted {list(KNOWN_COUNTS[name])}")
    for law in report.laws:
        if not law.is_proved:
            print(
                f"NOT PROVED: {law.rule}, {law.case}: tv {law.tv:.1e}, mass of impossible text "
                f"{law.impossible:.1e}, flagged {law.flagged:.1e}, cells missed {law.cells.misses}"
            )
    if report.is_proved:
        rules = len({law.rule for law in report.laws})
        print(
            f"PROVED in {seconds:.0f} s: {rules} rules in {len(report.laws)} cases, total variation "
            f"at most {report.greatest_tv:.1e}"
        )


def print_decoded(decoded: Sequence[Decoded], models: Models) -> None:
    """Print what each decode cost."""
    runs = [each.run for each in decoded]
    length = max(len(run.text) for run in runs)
    names = f"target {models.target.name}, draft {models.draft.name}"
    print(f"REAL TEXT: {count(length, 'character')}, {names}")
    print(textwrap.indent(experiments.table(runs), "  "))
    print_note(
        "queries: contexts scored; calls: invocations of the model; batches: hypothetical, one for "
        "each round of the target and for each level of the draft. No time is claimed here."
    )
    print()


def print_acceptance(decoded: Sequence[Decoded]) -> bool:
    """Print acceptance beside its mean by the rows of the nodes visited.

    Returns:
      Whether each is within `MAX_DEVIATION` standard errors of its mean.
    """
    lines = []
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
    if not lines:  # a budget of one token leaves nothing to draft
        return True
    print(f"  {'':14} {'acceptance':>11} {'expected':>17}", *lines, sep="\n")
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


def count(number: int, thing: str) -> str:
    """Return a number of things in words."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def mark(holds: bool) -> str:
    """Return the word for a line that holds or does not."""
    return "ok" if holds else "FAIL"


def print_note(note: str) -> None:
    """Print a note below a table."""
    print(textwrap.fill(note, WIDTH, initial_indent="  ", subsequent_indent="  "))


def print_text(name: str, text: str) -> None:
    """Print a text with a label, its line feeds as strokes."""
    words = " ".join(text.replace("\n", " / ").split())
    print(textwrap.fill(f"  {name:<14} {words}", WIDTH, subsequent_indent=" " * 17))


if __name__ == "__main__":
    sys.exit(main())
