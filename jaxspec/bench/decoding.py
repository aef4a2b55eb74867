"""What drafting saves: the compiled loop with a drafter against the same loop without.

A pair of runs, plain and drafted, decodes the same prompt to the same length, one after the other;
what is compared is the time of their rounds. Reading the prompt and compiling are not counted. Ratios
are medians over pairs, so that a machine whose speed drifts does not matter.
"""

import dataclasses
import functools
import importlib.resources
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import models
from jaxspec.decode import CachedNetwork, CompiledDecoder, DecodedText, Decoder
from jaxspec.draft import (
    BestFirstTree,
    Drafter,
    FixedTree,
    Lookup,
    NGramTree,
    NoDraft,
    SampledPath,
)
from jaxspec.models.llama import in_panels
from jaxspec.models.load.smollm2 import STOP_TOKENS
from jaxspec.models.network import LanguageModel
from jaxspec.models.provider import Softmax
from jaxspec.verify import RULES

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Speed:
    """One way of decoding.

    Attributes:
      group: what was decoded.
      name: how.
      tokens_per_call: new tokens per target call, over all runs.
      tokens_per_second: median over runs.
      ratio: median over pairs of this one's speed over that of the fused plain loop.
    """

    group: str
    name: str
    tokens_per_call: float
    tokens_per_second: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class Request:
    """What one run decodes.

    Attributes:
      prompt: token ids.
      key: of its draws.
      options: of `CompiledDecoder.start`.
    """

    prompt: Sequence[int]
    key: jax.Array
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run took.

    Attributes:
      seconds: of its rounds.
      tokens: new ones.
      calls: of the target.
    """

    seconds: float
    tokens: int
    calls: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class FusedRun(Run):
    """A run of the compiled loop.

    Attributes:
      text: what was decoded.
    """

    text: DecodedText


@dataclasses.dataclass(frozen=True)
class Spread:
    """Several measurements of one thing.

    Attributes:
      median: of them.
      least: of them.
      greatest: of them.

    >>> print(f"{Spread.of([1.25, 0.5, 1.0]):.2f}")
    1.00 (0.50 to 1.25)
    """

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Sum measurements up, at least one."""
        return cls(float(np.median(values)), min(values), max(values))

    def __format__(self, form: str) -> str:
        """Write the median, and the least and greatest behind it in brackets."""
        median, least, greatest = (
            format(value, form) for value in (self.median, self.least, self.greatest)
        )
        return f"{median} ({least} to {greatest})"


@functools.lru_cache(maxsize=1)
def _smollm2() -> LanguageModel:
    """Load SmolLM2 once, to ask for its room and to time it."""
    return models.load_smollm2()


def pair_room() -> int:
    """Return how many tokens a run of the shipped pair may have, after the longest prompt."""
    target, _ = models.bundled_pair()
    return _room(target, _pair_prompts(target))


def smollm2_room() -> int:
    """Return how many tokens a run of SmolLM2 may have, after the longest prompt.

    Raises:
      ImportError: SmolLM2 is not installed.
    """
    target = _smollm2()
    return _room(target, list(_smollm2_prompts(target).values()))


def _room(target: LanguageModel, prompts: Sequence[Sequence[int]]) -> int:
    assert target.max_context is not None
    return target.max_context - max(map(len, prompts))


def _pair_prompts(target: LanguageModel) -> list[list[int]]:
    """Return lines that the pair has not seen, from all over the held-out text."""
    assert target.tokenizer is not None
    text = models.split_text(models.bundled_text(), held_out=True)
    lines = [line + "\n" for line in text.splitlines()[1:] if 30 <= len(line) <= 60]
    return [target.tokenizer.encode(line) for line in lines[::7]]


def _smollm2_prompts(target: LanguageModel) -> dict[str, list[int]]:
    """Return the prompts of `prompts.json` by their ids."""
    assert target.tokenizer is not None
    stored = importlib.resources.files("jaxspec.bench") / "prompts.json"
    prompts = json.loads(stored.read_text(encoding="utf-8"))["prompts"]
    return {
        prompt["id"]: target.tokenizer.encode(
            models.chat_prompt(prompt["text"]) if prompt["form"] == "chat" else prompt["text"]
        )
        for prompt in prompts
    }


def measure_pair(
    *, repeats: int, new_tokens: int, temperatures: Sequence[float], seed: int
) -> list[Speed]:
    """Decode held-out lines with the shipped pair by every drafter, and plainly on the host.

    Args:
      repeats: pairs of runs for every drafter and temperature, each of the next prompt and with draws
        of its own; after the last prompt comes the first again.
      new_tokens: characters of a run.
      temperatures: each a group of runs, of the same prompts and draws.
      seed: of all draws.
    """
    target, draft = models.bundled_pair()
    target = in_panels(target)
    ngram, _ = models.bundled_ngrams()
    keys = jax.random.split(jax.random.key(seed), repeats)
    prompts = list(itertools.islice(itertools.cycle(_pair_prompts(target)), repeats))
    groups = {
        f"shipped pair, temperature {temperature:g}": [
            Request(prompt, key, {"new_tokens": new_tokens, "temperature": temperature})
            for prompt, key in zip(prompts, keys, strict=True)
        ]
        for temperature in temperatures
    }
    drafters: dict[str, Drafter] = {
        "path of 4, draft network": SampledPath(draft, 4),
        "block of 4, draft network": SampledPath(draft, 4, RULES["block"]),
        "sampled tree (2, 2, 1, 1)": FixedTree(draft, (2, 2, 1, 1), RULES["without_replacement"]),
        "top-k path of 4": FixedTree(draft, (1,) * 4),
        "top-k tree (2, 2, 1, 1)": FixedTree(draft, (2, 2, 1, 1)),
        "best-first tree of 16": BestFirstTree(draft, max_nodes=16, beam=4, depth=4),
        "path of 4, 5-gram": NGramTree(ngram, (1,) * 4),
        "tree (2, 2, 1, 1), 5-gram": NGramTree(ngram, (2, 2, 1, 1)),
        "lookup": Lookup({16: 15, 10: 8, 6: 4}),
    }
    length = max(map(len, prompts)) + new_tokens
    host = _host_plain(target, length)
    return _measure(target, drafters, groups, length, {"plain, host loop": host})


def measure_smollm2(*, repeats: int, new_tokens: int) -> list[Speed]:
    """Decode the prompts of `prompts.json` greedily with SmolLM2, plainly and by lookup.

    Args:
      repeats: pairs of runs for each prompt.
      new_tokens: tokens of a run at most.

    Raises:
      ImportError: SmolLM2 is not installed.
    """
    target = _smollm2()
    options = {"new_tokens": new_tokens, "temperature": 0.0, "stop_tokens": STOP_TOKENS}
    requests = {
        f"SmolLM2, {name}": [Request(prompt, jax.random.key(0), options)] * repeats
        for name, prompt in _smollm2_prompts(target).items()
    }
    length = new_tokens + max(len(each[0].prompt) for each in requests.values())
    return _measure(target, {"lookup": Lookup()}, requests, length, {})


def _measure(
    target: LanguageModel,
    drafters: Mapping[str, Drafter],
    requests: Mapping[str, Sequence[Request]],
    length: int,
    others: Mapping[str, Callable[[Request], Run]],
) -> list[Speed]:
    """Run every request of each group by every drafter, each time paired with the plain loop."""
    plain = timed(CompiledDecoder(target, max_context=length))
    ways: dict[str, Callable[[Request], Run]] = {
        name: timed(CompiledDecoder(target, drafter, max_context=length))
        for name, drafter in drafters.items()
    }
    ways |= others
    for run in (plain, *ways.values()):
        run(next(iter(requests.values()))[0])  # compile
    found: list[Speed] = []
    for group, of_group in requests.items():
        pairs: dict[str, list[tuple[Run, Run]]] = {name: [] for name in (PLAIN, *ways)}
        for request in of_group:
            for name, run in ways.items():
                before = plain(request)
                pairs[PLAIN].append((before, before))
                pairs[name].append((before, run(request)))
        found += [_speed(group, name, of_way) for name, of_way in pairs.items()]
    return found


def _speed(group: str, name: str, pairs: Sequence[tuple[Run, Run]]) -> Speed:
    """Sum up the pairs of runs, plain and this one, of one way of decoding."""
    runs = [run for _, run in pairs]
    return Speed(
        group=group,
        name=name,
        tokens_per_call=sum(run.tokens for run in runs) / sum(run.calls for run in runs),
        tokens_per_second=float(np.median([run.rate for run in runs])),
        ratio=float(np.median([run.rate / plain.rate for plain, run in pairs])),
    )


def time_pairs(
    plain: CompiledDecoder,
    drafted: CompiledDecoder,
    request: Request,
    pairs: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[tuple[FusedRun, FusedRun]]:
    """Decode one request by two loops in turn.

    Args:
      plain: one loop.
      drafted: the other.
      request: what to decode.
      pairs: how often, after one run of each that is not counted.
      progress: called as progress(what, runs done, runs in all).

    Returns:
      The runs (plain, drafted) of each pair.
    """
    ways = [timed(plain), timed(drafted)]
    runs = []
    for turn in range(2 * (pairs + 1)):
        progress("measuring", turn, 2 * (pairs + 1))
        runs.append(ways[turn % 2](request))
    progress("measuring", len(runs), len(runs))
    return list(zip(runs[2::2], runs[3::2], strict=True))


def timed(decoder: CompiledDecoder) -> Callable[[Request], FusedRun]:
    """Return a function that decodes a request by the compiled loop and takes the time."""

    def run(request: Request) -> FusedRun:
        state = decoder.start([request.prompt], request.key, **request.options)
        state = jax.block_until_ready(decoder.advance(state, max_rounds=0))
        start = time.perf_counter()
        state = jax.block_until_ready(decoder.advance(state))
        seconds = time.perf_counter() - start
        (text,) = state.texts()
        tokens = len(text.new_tokens)
        return FusedRun(seconds=seconds, tokens=tokens, calls=text.rounds, text=text)

    return run


def _host_plain(target: LanguageModel, length: int) -> Callable[[Request], Run]:
    """Return a run of the host loop, with a cache and one compiled forward for each token."""

    @functools.cache
    def attention_at(temperature: float) -> CachedNetwork:
        return CachedNetwork(target, slots=length, transform=Softmax(temperature), chunk=1)

    def run(request: Request) -> Run:
        attention = attention_at(request.options["temperature"])
        decoder = Decoder(attention, NoDraft())
        budget = request.options["new_tokens"]
        state = decoder.start(request.prompt, request.key, new_tokens=budget)
        state, _ = decoder.step(state)
        start = time.perf_counter()
        state = decoder.resume(state)
        seconds = time.perf_counter() - start
        count = len(state.new_tokens) - 1  # the first also read the prompt
        return Run(seconds=seconds, tokens=count, calls=count)

    return run
