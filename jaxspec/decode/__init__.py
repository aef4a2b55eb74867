"""Decoding loops: on the host for any callable, compiled for networks with a cache."""

from jaxspec.decode.cached import CachedNetwork
from jaxspec.decode.commit import Ending
from jaxspec.decode.compiled import CompiledDecoder
from jaxspec.decode.compiled_state import BatchState, DecodedText, Source, texts_of
from jaxspec.decode.host import DecodeError, Decoder, LimitedScorer, Scorer
from jaxspec.decode.metrics import Metrics, Rate, chances_of, metrics_of, overlap
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
    "BatchState",
    "CachedNetwork",
    "CompiledDecoder",
    "DecodeError",
    "DecodeState",
    "DecodedText",
    "Decoder",
    "Difference",
    "Ending",
    "LimitedScorer",
    "Metrics",
    "Rate",
    "RoundRecord",
    "RoundSummary",
    "Scorer",
    "Scores",
    "Source",
    "chances_of",
    "differences",
    "load_rounds",
    "load_state",
    "metrics_of",
    "node_contexts",
    "overlap",
    "replay_round",
    "save_rounds",
    "save_state",
    "score_batched",
    "score_layered",
    "score_sequential",
    "texts_of",
)
