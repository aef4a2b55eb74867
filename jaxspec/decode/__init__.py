"""Decoding loops: on the host for any callable, compiled for networks with a cache."""

from jaxspec.decode.cached import CachedNetwork
from jaxspec.decode.commit import Ending
from jaxspec.decode.compiled import CompiledDecoder
from jaxspec.decode.files import load, save
from jaxspec.decode.host import DecodeError, Decoder
from jaxspec.decode.metrics import Metrics, Rate, metrics_of, overlap
from jaxspec.decode.request import Options, Request
from jaxspec.decode.rounds import Difference, RoundRecord, differences, replay_round
from jaxspec.decode.state import BatchState, DecodedText, DecodeState, Source
from jaxspec.decode.target import CallableTarget, Scores, Target

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
    "Options",
    "Rate",
    "Request",
    "RoundRecord",
    "Scores",
    "Source",
    "Target",
    "differences",
    "load",
    "metrics_of",
    "overlap",
    "replay_round",
    "save",
)
