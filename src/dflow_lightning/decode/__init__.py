"""Speculative decoding with a block drafter: draft, verify, relay, commit."""

from dflow_lightning.decode.engine import Completion, SpeculativeDecoder
from dflow_lightning.decode.rounds import RoundTimer

__all__ = ["Completion", "RoundTimer", "SpeculativeDecoder"]
