"""transformers' `_speculative_sampling` as it is: its exact law, through the adapter."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jaxspec as js
from jaxspec import audit
from jaxspec.audit.choices import Choices, exact_outcomes
from jaxspec.audit.instances import floats
from jaxspec.audit.reference import normalise

torch = pytest.importorskip("torch", reason="the extra parity is not installed")
utils = pytest.importorskip(
    "transformers.generation.utils", reason="the extra parity is not installed"
)

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 2
INSTANCE = next(
    case
    for case in audit.instances_for(js.RULES["token"])
    if case.name == "contexts of three tokens"
)
Table = dict[tuple[int, ...], np.ndarray]
TARGET, RAW = (
    {context: np.array(floats(row), np.float32) for context, row in (rows or {}).items()}
    for rows in (INSTANCE.target, INSTANCE.draft)
)
DRAFTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda row: row,
    "temperature 0.5": lambda row: normalise(row**2),
    "top-k 2": lambda row: normalise(np.where(row >= np.sort(row)[-2], row, 0)),
    "greedy": lambda row: np.eye(len(row), dtype=np.float32)[row.argmax()],
}
"""How the draft's rows become the law that its tokens are drawn from."""


def rows(table: Table, tokens: list[int], num: int) -> np.ndarray:
    return np.stack([table.get(tuple(tokens[:n]), table[()]) for n in range(num)])


class OnHand:
    """Answers what the function draws from torch's global generator by a program's choices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choices: Choices | None = None
        monkeypatch.setattr(torch, "rand_like", self.rand_like)
        monkeypatch.setattr(torch, "multinomial", self.multinomial)

    def rand_like(self, ratios: Any) -> Any:
        chances = ratios.reshape(-1).tolist()
        flips = [self.choices.flip(f"accept {t}", min(1.0, x)) for t, x in enumerate(chances)]
        return torch.tensor([0.0 if flip else 1.0 for flip in flips]).reshape(ratios.shape)

    def multinomial(self, row: Any, num_samples: int) -> Any:
        assert num_samples == 1
        return torch.tensor([[self.choices.pick("final", row[0].numpy())]])


def total_variation(sample: Any, law: Table, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the exact distance of the emitted text from the target's law, candidates of `law`."""
    verify, hand = audit.from_transformers(sample, prompt=(0, 1)), OnHand(monkeypatch)

    def play(choices: Choices) -> tuple[int, ...]:
        tokens: list[int] = []
        for n in range(LENGTH):
            tokens.append(choices.pick(f"draft {n}", rows(law, tokens, n + 1)[n]))
        hand.choices = choices
        target = rows(TARGET, tokens, LENGTH + 1)
        draft = rows(law, tokens, LENGTH)
        text = verify(np.array(tokens, np.int32), draft, target, 0).tolist()
        for n in range(len(text), LENGTH + 1):
            text.append(choices.pick(f"text {n}", rows(TARGET, text, n + 1)[n]))
        return tuple(text)

    found = exact_outcomes(play)
    monkeypatch.undo()
    distance = 0.0
    for text in np.ndindex(*[INSTANCE.vocab] * (LENGTH + 1)):
        p = rows(TARGET, list(text), LENGTH + 1)[range(LENGTH + 1), list(text)]
        distance += abs(found.get(text, 0.0) - float(np.prod(p, dtype=np.float64)))
    return distance / 2


def handing_over(table: Table) -> Any:
    """The function, given the logarithms of other rows than those that candidates were drawn from."""

    def sample(
        candidate_input_ids: Any, candidate_logits: Any, candidate_length: int, new_logits: Any
    ) -> Any:
        tokens = candidate_input_ids[0, -candidate_length:].tolist()
        logits = torch.log(torch.as_tensor(rows(table, tokens, candidate_length)))[None]
        return called(candidate_input_ids, logits, candidate_length, new_logits)

    return sample


def called(*arguments: Any) -> Any:
    """Call the function, whose signature has changed with version 5."""
    old = "is_done_candidate" in inspect.signature(utils._speculative_sampling).parameters
    return utils._speculative_sampling(*arguments, *([False] if old else []))


@pytest.mark.parametrize("name", DRAFTS)
def test_it_is_lossless_with_the_law_that_the_candidates_were_drawn_from(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = {context: DRAFTS[name](row) for context, row in RAW.items()}
    found = total_variation(utils._speculative_sampling, law, monkeypatch)
    assert found < 1e-6


@pytest.mark.parametrize(
    ("name", "bias"), [("temperature 0.5", 0.03728), ("top-k 2", 0.07290), ("greedy", 0.25)]
)
def test_it_is_biased_with_the_rows_before_temperature_and_filters(
    name: str, bias: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = {context: DRAFTS[name](row) for context, row in RAW.items()}
    found = total_variation(handing_over(RAW), law, monkeypatch)
    assert found == pytest.approx(bias, abs=5e-6)


def test_with_an_ensemble_weight_it_is_biased_by_design(monkeypatch: pytest.MonkeyPatch) -> None:
    if "assistant_ensemble_weight" not in inspect.signature(utils._speculative_sampling).parameters:
        pytest.skip("this version of transformers has no ensemble weight")
    sample = functools.partial(utils._speculative_sampling, assistant_ensemble_weight=0.5)
    assert total_variation(sample, RAW, monkeypatch) == pytest.approx(0.30729, abs=5e-6)


@pytest.mark.networks
def test_sampled_with_seeds_it_is_lossless_and_its_fault_is_named() -> None:
    def raw(
        candidate_input_ids: Any, candidate_logits: Any, candidate_length: int, new_logits: Any
    ) -> Any:
        return called(candidate_input_ids, 0.5 * candidate_logits, candidate_length, new_logits)

    options = {"kind": "path", "randomness": "seed", "budget": 60_000}
    right = audit.from_transformers(utils._speculative_sampling)
    assert audit.check_lossless(right, rule="token", **options).passes
    report = audit.check_lossless(audit.from_transformers(raw), **options)
    assert not report.passes
    assert "another temperature" in report.suspects[0]


def test_a_seed_decides_and_the_global_generator_is_left_as_it_was() -> None:
    verify = audit.from_transformers(utils._speculative_sampling)
    path = np.array([0, 1], np.int32), rows(RAW, [0], 2), rows(TARGET, [0, 1], 3)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    texts = [tuple(verify(*path, seed).tolist()) for seed in range(40)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(set(texts)) > 1
    assert texts == [tuple(verify(*path, seed).tolist()) for seed in range(40)]
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.as_tensor(each) for each in path]
    drawn = [tuple(verify(*arrays, generator).tolist()) for _ in range(40)]
    assert len(set(drawn)) > 1
