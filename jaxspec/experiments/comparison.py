"""Plain decoding against speculation: the same target, prompt, key and budget of new tokens.

The sampled texts need not match, since the two use different numbers of draws. What must match is
their law, and that is what is compared: exactly, by composing the laws of the rounds, where the
vocabulary is small; otherwise by a G-test over repeated runs that states its power.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast

import jax
import numpy as np

from jaxspec.audit import GTest, decoding_law, g_test
from jaxspec.audit.statistics import total_variation
from jaxspec.checks import Progress, assert_whole
from jaxspec.decode import (
    Decoder,
    Ending,
    Metrics,
    Options,
    RoundRecord,
    Target,
    metrics_of,
)
from jaxspec.decode.target import as_target
from jaxspec.draft import Drafter, FixedTree
from jaxspec.models import Provider
from jaxspec.models.provider import Context
from jaxspec.storage import plain, shown

EXACT_TEXTS = 256
"""Up to this number of texts, the laws of both decoders are computed exactly."""

MAX_TV = 1e-6
"""Greatest total variation of two exact laws that agree: rounding."""


class MismatchError(ValueError):
    """Two experiments are not comparable."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One decode and its cost.

    Attributes:
      name: name of the decoder in tables.
      decoder: its description in plain values (`Decoder.describe`).
      prompt: token ids.
      request: its key and options in plain values (`Request`).
      text: the new tokens.
      finished: what ended it: "budget", "stop" or "capacity".
      metrics: counts and rates.
      records: its rounds, if they were to be kept; not saved.
    """

    name: str
    decoder: dict[str, Any]
    prompt: Context
    request: dict[str, Any]
    text: Context
    finished: str
    metrics: Metrics
    records: tuple[RoundRecord, ...] = dataclasses.field(default=(), repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class LawComparison:
    """Whether two decoders have the same law. Its `str` describes the result and its power.

    Attributes:
      tokens: number of first tokens compared.
      tv: exact total variation between the two laws; None if they were sampled.
      target_tv: the greater of their exact total variations from the target's; None if sampled.
      test: the G-test over repeated runs; None if the laws are exact.
    """

    tokens: int
    tv: float | None
    target_tv: float | None
    test: GTest | None

    @property
    def agrees(self) -> bool:
        """Whether no difference was found."""
        if self.test is not None:
            return self.test.p_value > self.test.level
        return max(self.tv or 0.0, self.target_tv or 0.0) <= MAX_TV

    def __str__(self) -> str:
        """Describe what was found, and what could have been found."""
        test = self.test
        if test is None:
            return (
                f"exact law of the first {self.tokens} tokens: total variation {self.tv:.1e} between "
                f"the two, at most {self.target_tv:.1e} from the target's"
            )
        what = f"G-test on the first {self.tokens} tokens of {test.sizes[0]} + {test.sizes[1]} runs"
        if test.degrees == 0:
            return f"{what}: too few runs to compare"
        power = (
            "too few runs to detect any difference reliably"
            if test.detectable is None
            else f"detects a total variation of {test.detectable:.2f}"
        )
        return (
            f"{what}: G = {test.statistic:.1f}, degrees of freedom {test.degrees}, "
            f"p = {test.p_value:.3g}; "
            f"{power} (power {test.power}, level {test.level})"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A baseline run and a speculative run.

    Attributes:
      baseline: plain autoregressive decoding.
      speculative: decoding with a drafter.
      law: whether their texts have the same law; None if that was not requested.

    Raises:
      MismatchError: the target model, the prompt or the length of the text differs; the message says
        which.
    """

    baseline: Run
    speculative: Run
    law: LawComparison | None = None

    def __post_init__(self) -> None:
        """Raise MismatchError unless the runs differ in the decoder only."""
        a, b = self.baseline, self.speculative
        facts = (
            ("target model", a.decoder.get("target"), b.decoder.get("target")),
            ("prompt", list(a.prompt), list(b.prompt)),
            ("continuation length", len(a.text), len(b.text)),
        )
        for fact, here, there in facts:
            if here != there:
                raise MismatchError(
                    f"runs {shown(a.name)} and {shown(b.name)}: {fact} differs: {shown(here)} and "
                    f"{shown(there)}"
                )


def run(
    decoder: Decoder,
    prompt: Sequence[int],
    key: jax.Array,
    *,
    name: str = "plain",
    keep_records: bool = False,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Run:
    """Decode once and count.

    Args:
      decoder: the decoder.
      prompt: token ids.
      key: the request's typed key.
      name: name of the run in tables.
      keep_records: whether to keep the records of the rounds, each with a float32 [N, V] of rows.
      progress: see `Progress`; called after each round, a step is a token.
      **options: new_tokens, stop_tokens, temperature, top_k, top_p; see `Options`.
    """
    state = decoder.start(prompt, key, **options)
    request = dataclasses.asdict(state.request)
    records = []
    for after, record in decoder.rounds(state):
        state = after
        if keep_records:
            records.append(record)
        if progress:
            progress(f"decoding: {name}", len(state.new_tokens), request["new_tokens"])
    return Run(
        name=name,
        decoder=decoder.describe(),
        prompt=request.pop("prompt"),
        request=plain(request, "request"),
        text=state.new_tokens,
        finished=state.ending.name.lower(),
        metrics=metrics_of(state.rounds),
        records=tuple(records),
    )


def compare(
    target: Target | Provider,
    drafter: Drafter,
    prompt: Sequence[int],
    key: jax.Array,
    *,
    bonus: bool = True,
    name: str = "speculative",
    baseline: Run | None = None,
    law_tokens: int = 0,
    law_runs: int = 400,
    law_key: jax.Array | None = None,
    keep_records: bool = False,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Comparison:
    """Compare a drafter with plain decoding of the same target.

    Providers must be pure functions of the context; see `jaxspec.models.provider.audit_provider`.

    Args:
      target: the target model of both runs.
      drafter: the drafter.
      prompt: token ids.
      key: typed key of both runs.
      bonus: see `Decoder`.
      name: name of the speculative run in tables.
      baseline: an earlier plain run with the same arguments; None to decode plainly first.
      law_tokens: compare the law of this many first tokens, see `compare_laws`; 0 for no comparison.
      law_runs: runs of each decoder where the law must be sampled.
      law_key: typed key of these; None for `key`.
      keep_records: see `run`.
      progress: see `Progress`.
      **options: new_tokens, stop_tokens, temperature, top_k, top_p; see `Options`.

    Raises:
      ValueError: an argument is wrong; raised before anything is decoded.
    """
    assert_whole("law_tokens", law_tokens, 0)
    assert_whole("law_runs", law_runs, 1)
    alone, decoder = Decoder(target, bonus=bonus), Decoder(target, drafter, bonus=bonus)
    start = functools.partial(run, keep_records=keep_records, progress=progress, **options)
    if baseline is None:
        baseline = start(alone, prompt, key)
    comparison = Comparison(baseline, start(decoder, prompt, key, name=name))
    if law_tokens == 0:
        return comparison
    law = compare_laws(
        alone,
        decoder,
        prompt,
        key if law_key is None else law_key,
        tokens=law_tokens,
        runs=law_runs,
        progress=progress and functools.partial(progress, f"law: {name}"),
        **options,
    )
    return dataclasses.replace(comparison, law=law)


def compare_tree_decoding(
    target: Target | Provider,
    draft: Provider,
    prompt: Sequence[int],
    key: jax.Array,
    *,
    shape: Sequence[int] = (3, 2, 1, 1),
    **options: Any,
) -> Comparison:
    """Compare plain decoding with a fixed tree; `options` are those of `compare`."""
    options = {"name": "fixed tree", **options}
    return compare(target, FixedTree(draft, tuple(shape)), prompt, key, **options)


def compare_laws(
    first: Decoder,
    second: Decoder,
    prompt: Sequence[int],
    key: jax.Array,
    *,
    tokens: int,
    runs: int = 400,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[Options],
) -> LawComparison:
    """Compare the laws of the first tokens of two decoders of one target.

    With at most `EXACT_TEXTS` texts of that many tokens the laws are exact, those of decodes with a
    budget of these tokens. Otherwise the decoders run until they have these tokens, with the drafts
    that their whole budget allows.

    Args:
      first: a decoder.
      second: another.
      prompt: token ids.
      tokens: number of first tokens, at least 1.
      runs: runs of each decoder, at least 1, if there are more than `EXACT_TEXTS` texts.
      key: typed key that the keys of these runs are split from.
      progress: called as progress(done, total) after each run.
      **options: see `Options`; a budget below `tokens` is raised to it.

    Raises:
      MismatchError: the targets differ.
      ValueError: `tokens` or `runs` is not an integer >= 1.
    """
    a, b = as_target(first.target), as_target(second.target)
    if a.name != b.name:
        raise MismatchError(f"target model differs: {a.name!r} and {b.name!r}")
    assert_whole("tokens", tokens, 1)
    assert_whole("runs", runs, 1)
    decoders = (first, second)
    if tokens * math.log2(a.vocab) <= math.log2(EXACT_TEXTS):
        options["new_tokens"] = tokens
        laws = [decoding_law(each, tuple(prompt), num_keys=0, **options) for each in decoders]
        tv = total_variation(laws[0].texts, laws[1].texts)
        worst = max(law.tv if law.misses == 0 else 1.0 for law in laws)
        return LawComparison(tokens=tokens, tv=tv, target_tv=worst, test=None)
    options["new_tokens"] = max(cast(int, options.get("new_tokens", 64)), tokens)
    texts: list[list[Context]] = [[], []]
    for number, one in enumerate(jax.random.split(key, 2 * runs)):
        decoder = decoders[number // runs]
        state = decoder.start(prompt, one, **options)
        while state.ending == Ending.NONE and len(state.new_tokens) < tokens:
            state, _ = decoder.step(state)
        texts[number // runs].append(state.new_tokens[:tokens])
        if progress:
            progress(number + 1, 2 * runs)
    every_text = sorted({*texts[0], *texts[1]})
    counts = [np.array([sample.count(text) for text in every_text]) for sample in texts]
    return LawComparison(tokens=tokens, tv=None, target_tv=None, test=g_test(*counts))
