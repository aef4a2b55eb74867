"""What drafting saves: the compiled loop with a drafter against the same loop without.

A pair of runs, plain and drafted, decodes the same prompt to the same length, one after the other;
the time of their rounds is compared. Reading the prompt and compiling are not counted. Ratios are
medians over pairs, so that a drift in the speed of the machine does not matter.
"""

import dataclasses
import functools
import importlib.resources
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import models
from jaxspec.decode import (
    BatchState,
    CachedNetwork,
    CompiledDecoder,
    DecodedText,
    Decoder,
    Ending,
)
from jaxspec.draft import BestFirstTree, Drafter, FixedTree, Lookup, NGramTree, SampledPath
from jaxspec.models import LanguageModel, Softmax
from jaxspec.models.llama import in_panels
from jaxspec.models.load.smollm2 import STOP_TOKENS
from jaxspec.verify import RULES

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, the key of its draws, and the options of `CompiledDecoder.start`."""

    prompt: Sequence[int]
    key: jax.Array
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One run: time of its rounds, number of new tokens and of target calls."""

    seconds: float
    tokens: int
    calls: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class TextTiming(Timing):
    """One run of the compiled loop, with its text."""

    text: DecodedText


@dataclasses.dataclass(frozen=True)
class Speed:
    """One way of decoding.

    Attributes:
      group: what was decoded.
      name: how.
      tokens_per_call: new tokens per target call, over all runs.
      tokens_per_second: median over runs.
      ratio: median over pairs of its speed over that of the compiled plain loop.
    """

    group: str
    name: str
    tokens_per_call: float
    tokens_per_second: float
    ratio: float

    @classmethod
    def of(cls, group: str, name: str, pairs: Sequence[tuple[Timing, Timing]]) -> "Speed":
        """Summarise pairs of runs, plain and this one."""
        runs = [run for _, run in pairs]
        return cls(
            group=group,
            name=name,
            tokens_per_call=sum(run.tokens for run in runs) / sum(run.calls for run in runs),
            tokens_per_second=float(np.median([run.rate for run in runs])),
            ratio=float(np.median([run.rate / plain.rate for plain, run in pairs])),
        )


# --- one run


def start(decoder: CompiledDecoder, request: Request) -> BatchState:
    """Compile the loop and read the prompt."""
    state = decoder.start([request.prompt], request.key, **request.options)
    return jax.block_until_ready(decoder.advance(state, max_rounds=0))


def finish(
    decoder: CompiledDecoder,
    state: BatchState,
    *,
    max_rounds: int | None = None,
    show: Callable[[DecodedText], bool] = lambda text: False,
) -> TextTiming:
    """Decode a text whose prompt was read, timing the rounds alone.

    `show` is called with the text so far before the first and after each `max_rounds` rounds; it stops
    the decode by returning True.
    """
    seconds = 0.0
    while True:
        (text,) = state.texts()
        if show(text) or text.ending != Ending.NONE:
            return TextTiming(seconds, len(text.new_tokens), text.rounds, text)
        begin = time.perf_counter()
        state = jax.block_until_ready(decoder.advance(state, max_rounds=max_rounds))
        seconds += time.perf_counter() - begin


def timed(decoder: CompiledDecoder) -> Callable[[Request], TextTiming]:
    """Return a function that decodes a request and times its rounds."""
    return lambda request: finish(decoder, start(decoder, request))


def time_pairs(
    plain: CompiledDecoder,
    drafted: CompiledDecoder,
    request: Request,
    pairs: int,
    progress: Callable[[str, int, int], None],
) -> list[tuple[TextTiming, TextTiming]]:
    """Decode a request by two loops in turn; return (plain, drafted) of each pair.

    A first pair is not counted. `progress` is called as progress("measuring", runs done, all runs).
    """
    runs = []
    for number in range(2 * (pairs + 1)):
        progress("measuring", number, 2 * (pairs + 1))
        runs.append(timed(drafted if number % 2 else plain)(request))
    progress("measuring", len(runs), len(runs))
    return list(zip(runs[2::2], runs[3::2], strict=True))


# --- what is measured


def measure_pair(
    *, repeats: int, new_tokens: int, temperatures: Sequence[float], seed: int
) -> list[Speed]:
    """Decode held-out lines with the bundled pair by every drafter, and plainly on the host.

    Each of `repeats` pairs of runs has the next prompt and a separate key; all temperatures, a group
    each, and all drafters share them.
    """
    target, draft = models.bundled_pair()
    target = in_panels(target)
    ngram, _ = models.bundled_ngrams()
    keys = jax.random.split(jax.random.key(seed), repeats)
    prompts = list(itertools.islice(itertools.cycle(_pair_prompts(target)), repeats))
    groups = {
        f"bundled pair, temperature {temperature:g}": [
            Request(prompt, key, {"new_tokens": new_tokens, "temperature": temperature})
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        for temperature in temperatures
    }
    tree = (2, 2, 1, 1)
    drafters: dict[str, Drafter] = {
        "path of 4, draft network": SampledPath(draft, 4),
        "block of 4, draft network": SampledPath(draft, 4, RULES["block"]),
        "sampled tree (2, 2, 1, 1)": FixedTree(draft, tree, RULES["without_replacement"]),
        "top-k path of 4": FixedTree(draft, (1,) * 4),
        "top-k tree (2, 2, 1, 1)": FixedTree(draft, tree),
        "best-first tree of 16": BestFirstTree(draft, max_nodes=16, beam=4, depth=4),
        "path of 4, 5-gram": NGramTree(ngram, (1,) * 4),
        "tree (2, 2, 1, 1), 5-gram": NGramTree(ngram, tree),
        "lookup": Lookup({16: 15, 10: 8, 6: 4}),
    }
    length = max(map(len, prompts)) + new_tokens
    host = _host_plain(target, length)
    return _measure(target, drafters, groups, length, {"plain, host loop": host})


def measure_smollm2(*, repeats: int, new_tokens: int) -> list[Speed]:
    """Decode the prompts of `prompts.json` greedily with SmolLM2, plainly and by lookup."""
    target = _smollm2()
    options = {"new_tokens": new_tokens, "temperature": 0.0, "stop_tokens": STOP_TOKENS}
    groups = {
        f"SmolLM2, {name}": [Request(prompt, jax.random.key(0), options)] * repeats
        for name, prompt in _smollm2_prompts(target).items()
    }
    length = new_tokens + max(len(requests[0].prompt) for requests in groups.values())
    return _measure(target, {"lookup": Lookup()}, groups, length, {})


def pair_room() -> int:
    """Return how many tokens a run of the bundled pair may have after its longest prompt."""
    target, _ = models.bundled_pair()
    return _room(target, _pair_prompts(target))


def smollm2_room() -> int:
    """Return how many tokens a run of SmolLM2 may have after its longest prompt."""
    return _room(_smollm2(), _smollm2_prompts(_smollm2()).values())


def _measure(
    target: LanguageModel,
    drafters: Mapping[str, Drafter],
    groups: Mapping[str, Sequence[Request]],
    length: int,
    others: Mapping[str, Callable[[Request], Timing]],
) -> list[Speed]:
    """Decode every request of each group by every drafter, each paired with a plain run."""
    plain = timed(CompiledDecoder(target, max_context=length))
    ways: dict[str, Callable[[Request], Timing]] = {
        name: timed(CompiledDecoder(target, drafter, max_context=length))
        for name, drafter in drafters.items()
    }
    ways |= others
    for run in (plain, *ways.values()):
        run(next(iter(groups.values()))[0])  # compile
    speeds: list[Speed] = []
    for group, requests in groups.items():
        pairs: dict[str, list[tuple[Timing, Timing]]] = {name: [] for name in (PLAIN, *ways)}
        for request, (name, run) in itertools.product(requests, ways.items()):
            before = plain(request)
            pairs[PLAIN].append((before, before))
            pairs[name].append((before, run(request)))
        speeds += [Speed.of(group, name, runs) for name, runs in pairs.items()]
    return speeds


def _host_plain(target: LanguageModel, length: int) -> Callable[[Request], Timing]:
    """Return the plain host loop, with a cache and one compiled forward for each token."""

    @functools.cache
    def network(temperature: float) -> CachedNetwork:
        return CachedNetwork(target, slots=length, transform=Softmax(temperature), chunk=1)

    def run(request: Request) -> Timing:
        cached = network(request.options["temperature"])
        decoder, budget = Decoder(cached), request.options["new_tokens"]
        state, _ = decoder.step(decoder.start(request.prompt, request.key, new_tokens=budget))
        begin = time.perf_counter()
        state = decoder.resume(state)
        seconds = time.perf_counter() - begin
        count = len(state.new_tokens) - 1  # the first step also read the prompt
        return Timing(seconds, count, count)

    return run


_smollm2 = functools.cache(models.load_smollm2)


def _room(target: LanguageModel, prompts: Iterable[Sequence[int]]) -> int:
    assert target.max_context is not None
    return target.max_context - max(map(len, prompts))


def _pair_prompts(target: LanguageModel) -> list[list[int]]:
    """Return lines from all over the held-out text."""
    assert target.tokenizer is not None
    text = models.split_text(models.bundled_text(), held_out=True)
    lines = [line + "\n" for line in text.splitlines()[1:] if 30 <= len(line) <= 60]
    return [target.tokenizer.encode(line) for line in lines[::7]]


def _smollm2_prompts(target: LanguageModel) -> dict[str, list[int]]:
    """Return the prompts of `prompts.json` by their ids."""
    assert target.tokenizer is not None
    stored = importlib.resources.files("jaxspec.bench") / "prompts.json"
    return {
        prompt["id"]: target.tokenizer.encode(
            models.chat_prompt(prompt["text"]) if prompt["form"] == "chat" else prompt["text"]
        )
        for prompt in json.loads(stored.read_text(encoding="utf-8"))["prompts"]
    }
