"""Decoding loops: on the host for any callable, compiled for networks with a cache."""

from jaxspec.decode.cached import CachedNetwork
from jaxspec.decode.commit import Ending
from jaxspec.decode.compiled import CompiledDecoder
from jaxspec.decode.compiled_state import BatchState, DecodedText, Source, texts_of
from jaxspec.decode.host import DecodeError, Decoder
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
from jaxspec.decode.target import CallableTarget, Scores, Target, as_target, node_contexts

__all__ = (
    "BatchState",
    "CachedNetwork",
    "CallableTarget",
    "CompiledDecoder",
    "DecodeError",
    "DecodeState",
    "DecodedText",
    "Decoder",
    "Difference",
    "Ending",
    "Metrics",
    "Rate",
    "RoundRecord",
    "RoundSummary",
    "Scores",
    "Source",
    "Target",
    "as_target",
    "chances_of",
    "differences",
    "load_rounds",
    "load_state",
    "metrics_of",
    "node_contexts",
    "replay_round",
    "save_rounds",
    "save_state",
    "texts_of",
)
