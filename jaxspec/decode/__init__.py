"""Rounds until the budget is spent, for any model that is a callable."""

from jaxspec.decode.bounds import Bounds
from jaxspec.decode.drafters import AdaptiveTree, Draft, Drafter, FixedTree, NoDraft, SampledPath
from jaxspec.decode.loop import DecodeError, Decoder, LimitedScorer, Scorer
from jaxspec.decode.metrics import Metrics, Rate, chances_of, metrics_of
from jaxspec.decode.policy import AdaptiveTreePolicy
from jaxspec.decode.replay import (
    Difference,
    RoundRecord,
    differences,
    load_rounds,
    replay_round,
    save_rounds,
)
from jaxspec.decode.state import DecodeState, RoundSummary, load_state, save_state

__all__ = (
    "AdaptiveTree",
    "AdaptiveTreePolicy",
    "Bounds",
    "DecodeError",
    "DecodeState",
    "Decoder",
    "Difference",
    "Draft",
    "Drafter",
    "FixedTree",
    "LimitedScorer",
    "Metrics",
    "NoDraft",
    "Rate",
    "RoundRecord",
    "RoundSummary",
    "SampledPath",
    "Scorer",
    "chances_of",
    "differences",
    "load_rounds",
    "load_state",
    "metrics_of",
    "replay_round",
    "save_rounds",
    "save_state",
)
