"""Baseline against speculation: the same target, prompt, seed and budget of new tokens.

The sampled texts need not match, since the two use different numbers of draws. What must match is
their law, and that is what is compared: exactly, by composing the laws of the rounds, where the
vocabulary is small; else by a G-test over repeated runs that states its power.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Unpack

import jax
import numpy as np

from jaxspec.audit import GTest, decoding_law, g_test
from jaxspec.checks import assert_whole
from jaxspec.decode import Decoder, Ending, Metrics, Options, metrics_of
from jaxspec.draft import AdaptiveTree, AdaptiveTreePolicy, Drafter, FixedTree, SampledPath
from jaxspec.models.provider import Context, Provider
from jaxspec.storage import Range, shown
from jaxspec.verify import RULES

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """One decode and what it cost.

    Attributes:
      name: what the decoder is called in tables.
      decoder: its description in plain values (`Decoder.describe`).
      prompt: token ids.
      seed: of its key.
      text: the new tokens.
      finished: what ended it: "budget", "stop" or "capacity".
      metrics: counts and rates.
    """

    name: str
    decoder: dict[str, Any]
    prompt: Context
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)]
    text: Context
    finished: str
    metrics: Metrics


@dataclasses.dataclass(frozen=True)
class LawComparison:
    """Whether two decoders have one law.

    Attributes:
      tokens: how many first tokens were compared.
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
        """Whether nothing speaks against one law."""
        if self.test is not None:
            return self.test.p_value > self.test.level
        return max(self.tv or 0.0, self.target_tv or 0.0) <= 1e-6


class MismatchError(ValueError):
    """Two experiments are not comparable."""


def assert_comparable(first: Sequence[Run], second: Sequence[Run]) -> None:
    """Refuse to compare experiments that differ in more than the decoder.

    Args:
      first: runs, one for each prompt.
      second: runs for the same prompts in the same order.

    Raises:
      MismatchError: saying which of target model, prompt or continuation length differs, and where.
    """
    if len(first) != len(second):
        raise MismatchError(f"number of runs differs: {len(first)} and {len(second)}")
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        facts = (
            ("target model", a.decoder.get("target"), b.decoder.get("target")),
            ("prompt", list(a.prompt), list(b.prompt)),
            ("continuation length", len(a.text), len(b.text)),
        )
        for fact, here, there in facts:
            if here != there:
                raise MismatchError(
                    f"run {number}: {fact} differs: {shown(here)} and {shown(there)}"
                )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A baseline run and a speculative run.

    Attributes:
      baseline: plain autoregressive decoding.
      speculative: with a drafter.
      law: whether their texts have one law; None if that was not asked.

    Raises:
      MismatchError: the two are not of one target model, prompt and continuation length.
    """

    baseline: Run
    speculative: Run
    law: LawComparison | None = None

    def __post_init__(self) -> None:
        """Refuse runs that are not comparable."""
        assert_comparable([self.baseline], [self.speculative])


def run_decoder(
    name: str, decoder: Decoder, prompt: Sequence[int], seed: int, **options: Unpack[Options]
) -> Run:
    """Decode once and count."""
    state = decoder.run(prompt, jax.random.key(seed), **options)
    return Run(
        name=name,
        decoder=decoder.describe(),
        prompt=state.tokens[: state.prompt_length],
        seed=seed,
        text=state.new_tokens,
        finished=state.ending.name.lower(),
        metrics=metrics_of(state.rounds),
    )


def compare_decoding(
    name: str,
    target: Provider,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    seed: int,
    new_tokens: int,
    bonus: bool = True,
    law_tokens: int = 0,
    law_runs: int = 400,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a drafter with plain decoding of the same target.

    Providers must be pure functions of context; see `jaxspec.models.provider.audit_provider`.

    Args:
      name: what the drafter is called in tables.
      target: the target model, used by both.
      drafter: who drafts.
      prompt: token ids.
      seed: of the key of both.
      new_tokens: exact budget of both.
      bonus: see `Decoder`.
      law_tokens: compare the law of this many first tokens; 0 for not at all. See `compare_laws`.
      law_runs: runs of each decoder where the law must be sampled.
      progress: told what is being done.

    Returns:
      The `Comparison`.

    Raises:
      ValueError: an argument is wrong; raised before anything is decoded.
    """
    assert_whole("law_tokens", law_tokens, 0)
    assert_whole("law_runs", law_runs, 1)
    tell = progress or (lambda _: None)
    plain = Decoder(target, bonus=bonus)
    decoder = dataclasses.replace(plain, drafter=drafter)
    tell("plain decoding")
    baseline = run_decoder("plain", plain, prompt, seed, new_tokens=new_tokens)
    tell(name)
    speculative = run_decoder(name, decoder, prompt, seed, new_tokens=new_tokens)
    law = None
    if law_tokens:
        tell(f"law of the first {law_tokens} tokens")
        law = compare_laws(
            plain,
            decoder,
            prompt,
            tokens=law_tokens,
            runs=law_runs,
            seed=seed,
            new_tokens=new_tokens,
        )
    return Comparison(baseline=baseline, speculative=speculative, law=law)


EXACT_TEXTS = 256
"""Up to this many texts the law of both decoders is computed exactly."""


def compare_laws(
    first: Decoder,
    second: Decoder,
    prompt: Sequence[int],
    *,
    tokens: int,
    runs: int,
    seed: int,
    new_tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> LawComparison:
    """Compare the laws of the first tokens of two decoders of one target.

    With at most `EXACT_TEXTS` texts of that many tokens the laws are exact, those of decodes whose
    budget these tokens are. Else the decoders run as they are, until they have these tokens.

    Args:
      first: a decoder.
      second: another.
      prompt: token ids.
      tokens: how many first tokens, at least 1.
      runs: runs of each, at least 1, if there are more than `EXACT_TEXTS` texts.
      seed: of those runs; no key is used twice.
      new_tokens: budget of those runs.
      progress: told after each run how many are done, of how many.

    Raises:
      MismatchError: the targets are not the same.
      ValueError: tokens or runs is no integer of at least 1.
    """
    if first.target.name != second.target.name:
        raise MismatchError(
            f"target model differs: {first.target.name!r} and {second.target.name!r}"
        )
    assert_whole("tokens", tokens, 1)
    assert_whole("runs", runs, 1)
    decoders = (first, second)
    if tokens * math.log2(first.target.vocab) <= math.log2(EXACT_TEXTS):
        laws = [decoding_law(decoder, tuple(prompt), new_tokens=tokens) for decoder in decoders]
        every = {*laws[0].texts, *laws[1].texts}
        tv = sum(abs(laws[0].texts.get(t, 0.0) - laws[1].texts.get(t, 0.0)) for t in every) / 2
        worst = max(law.tv if law.misses == 0 else 1.0 for law in laws)
        return LawComparison(tokens=tokens, tv=tv, target_tv=worst, test=None)
    keys = jax.random.split(jax.random.key(seed), 2 * runs)
    texts: list[list[Context]] = [[], []]
    for number, key in enumerate(keys):
        which = number // runs
        texts[which].append(_first_tokens(decoders[which], prompt, key, tokens, new_tokens))
        if progress:
            progress(number + 1, 2 * runs)
    every_text = sorted({*texts[0], *texts[1]})
    counts = [np.array([sample.count(text) for text in every_text]) for sample in texts]
    return LawComparison(tokens=tokens, tv=None, target_tv=None, test=g_test(*counts))


def _first_tokens(
    decoder: Decoder, prompt: Sequence[int], key: jax.Array, tokens: int, new_tokens: int
) -> Context:
    """Decode until there are so many tokens, with all the depth that the decoder's budget allows."""
    state = decoder.start(prompt, key, new_tokens=max(new_tokens, tokens))
    while state.ending == Ending.NONE and len(state.new_tokens) < tokens:
        state, _ = decoder.step(state)
    return state.new_tokens[:tokens]


def compare_path_decoding(
    target: Provider,
    draft: Provider,
    prompt: Sequence[int],
    *,
    depth: int = 4,
    rule: str = "token",
    **options: Any,
) -> Comparison:
    """Compare plain decoding with a sampled path; `options` are those of `compare_decoding`."""
    drafter = SampledPath(draft, depth=depth, rule=RULES[rule])
    return compare_decoding("path", target, drafter, prompt, **options)


def compare_tree_decoding(
    target: Provider,
    draft: Provider,
    prompt: Sequence[int],
    *,
    widths: Sequence[int] = (3, 2, 1, 1),
    **options: Any,
) -> Comparison:
    """Compare plain decoding with a fixed tree; `options` are those of `compare_decoding`."""
    drafter = FixedTree(draft, tuple(widths))
    return compare_decoding("fixed tree", target, drafter, prompt, **options)


def compare_adaptive_decoding(
    target: Provider,
    draft: Provider,
    prompt: Sequence[int],
    *,
    policy: AdaptiveTreePolicy | None = None,
    **options: Any,
) -> Comparison:
    """Compare plain decoding with an adaptive tree; `options` are those of `compare_decoding`."""
    drafter = AdaptiveTree(draft, policy=policy or AdaptiveTreePolicy())
    return compare_decoding("adaptive tree", target, drafter, prompt, **options)
