"""Decoding loops: on the host for any callable, compiled for networks with a cache."""

from jaxspec.decode.cached import TreeAttention
from jaxspec.decode.commit import Ending
from jaxspec.decode.compiled import FusedDecoder
from jaxspec.decode.compiled_state import FusedState, FusedText, Source, texts_of
from jaxspec.decode.host import DecodeError, Decoder, LimitedScorer, Scorer
from jaxspec.decode.metrics import Metrics, Rate, chances_of, metrics_of
from jaxspec.decode.rounds import (
    Difference,
    RoundRecord,
    differences,
    load_rounds,
    replay_round,
    save_rounds,
)
from jaxspec.decode.state import DecodeState, RoundSummary, load_state, save_state
from jaxspec.decode.target import (
    Scores,
    node_contexts,
    score_batched,
    score_layered,
    score_sequential,
)

__all__ = (
    "DecodeError",
    "DecodeState",
    "Decoder",
    "Difference",
    "Ending",
    "FusedDecoder",
    "FusedState",
    "FusedText",
    "LimitedScorer",
    "Metrics",
    "Rate",
    "RoundRecord",
    "RoundSummary",
    "Scorer",
    "Scores",
    "Source",
    "TreeAttention",
    "chances_of",
    "differences",
    "load_rounds",
    "load_state",
    "metrics_of",
    "node_contexts",
    "replay_round",
    "save_rounds",
    "save_state",
    "score_batched",
    "score_layered",
    "score_sequential",
    "texts_of",
)
