"""The exact law of the compiled loop's texts, by its own program; and loops that are changed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.fake_model import fake_model
from helpers.reused import keyed_by_position

import jaxspec as js
from jaxspec import audit
from jaxspec.decode import CompiledDecoder
from jaxspec.draft import Drafter, FixedTree, SampledPath
from jaxspec.models import Block, LanguageModel

VOCAB = 3
TARGET = fake_model(VOCAB, name="target")
DRAFT = fake_model(VOCAB, name="draft", noise=0.5)
PROMPT = (1, 2)

DRAFTERS: dict[str, Drafter] = {
    "path by block": SampledPath(DRAFT, 2, js.RULES["block"]),
    "siblings without replacement": FixedTree(DRAFT, (2,), js.RULES["without_replacement"]),
    "traversal": FixedTree(DRAFT, (2,), js.RULES["traversal"]),
    "point-mass tree": FixedTree(DRAFT, (2, 1)),
}


def decoder(
    name: str, target: LanguageModel = TARGET, drafter: Drafter | None = None, **how: Any
) -> CompiledDecoder:
    sizes = {"max_context": 8, "prefill_width": 2, "max_stop_tokens": 1}
    return CompiledDecoder(target, drafter or DRAFTERS[name], **sizes, **how)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_texts_of_the_compiled_loop_have_exactly_the_targets_law(name: str) -> None:
    law = audit.decoding_law(decoder(name), PROMPT, new_tokens=3, num_keys=0)
    assert law.is_proved, law.failures
    assert law.tv <= 1e-6
    assert {len(text) for text in law.texts} == {3}
    assert sum(law.texts.values()) == pytest.approx(1, abs=1e-9)


def test_settings_stop_tokens_and_a_full_context_are_part_of_the_law() -> None:
    settings: dict[str, Any] = {"temperature": 0.7, "presence_penalty": 0.4, "stop_tokens": [1]}
    loop = decoder("", drafter=SampledPath(DRAFT, 2), token_settings=True)
    loop = dataclasses.replace(loop, max_context=4)
    law = audit.decoding_law(loop, PROMPT, new_tokens=9, num_keys=0, **settings)
    assert law.is_proved, law.failures
    assert {len(text) for text in law.texts} == {1, 2}
    assert all(1 not in text[:-1] for text in law.texts)


@dataclasses.dataclass(frozen=True)
class DropsImprobable(SampledPath):
    """Drops the last token drawn where the draft gave it little: a choice by its own value."""

    def finish(self, state: Any, view: Any) -> Any:
        proposed = super().finish(state, view)
        tree, rows = proposed.proposal.tree, proposed.proposal.draft_rows
        rows = rows if isinstance(rows, jax.Array) else rows.values
        chosen = jnp.take_along_axis(rows, jnp.maximum(tree.tokens[:, 1:, None], 0), axis=2)[..., 0]
        is_kept = jnp.cumprod((chosen >= 0.3).astype(jnp.int32), axis=1) > 0
        is_in = jnp.concatenate([jnp.ones_like(is_kept[:, :1]), is_kept], axis=1)
        return dataclasses.replace(proposed, is_in=is_in)


def sees_what_was_rejected(model: LanguageModel) -> LanguageModel:
    """A network whose rows depend on the last token written beside the text, if any ever was."""

    def forward(params: Any, cache: Any, block: Block) -> Any:
        inner, stale = cache
        logits, inner = model.forward(params, inner, block)
        shift = jnp.where(jnp.arange(VOCAB)[None] == stale, 1.0, 0.0)
        is_root = jnp.arange(logits.shape[0])[:, None] == 0
        return logits + jnp.where(is_root, shift, 0.0), (inner, block.tokens[-1])

    def keep(cache: Any, at: Any, path: Any) -> Any:
        assert model.keep is not None
        return model.keep(cache[0], at, path), cache[1]

    return dataclasses.replace(
        model,
        forward=forward,
        init_cache=lambda slots: (model.init_cache(slots), jnp.int32(-1)),
        keep=keep,
    )


FAULTS = {
    "drops what it drew by its own value": lambda: decoder("", drafter=DropsImprobable(DRAFT, 2)),
    "a later row sees what was rejected": lambda: decoder(
        "", sees_what_was_rejected(TARGET), SampledPath(DRAFT, 2)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_loop_that_is_not_lossless_has_another_law(fault: str) -> None:
    law = audit.decoding_law(FAULTS[fault](), PROMPT, new_tokens=3, num_keys=0)
    assert law.misses == 0
    assert law.tv > 1e-3
    assert not law.is_proved


def test_draws_that_are_read_again_are_seen_through_the_compiled_loop() -> None:
    block = decoder("path by block", draws=keyed_by_position, bonus=False)
    law = audit.decoding_law(block, PROMPT, new_tokens=3, num_keys=12)
    assert law.tv <= 1e-6  # the law of fresh draws
    assert not law.is_proved
    assert "noise is reused with" in law.failures[0]
