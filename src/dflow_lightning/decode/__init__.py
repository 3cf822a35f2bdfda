"""Speculative decoding with a block drafter: draft, verify, relay, commit."""

from dflow_lightning.decode.decoder import SpeculativeDecoder
from dflow_lightning.decode.engine import Engine
from dflow_lightning.decode.request import Completion, Request, Update
from dflow_lightning.decode.rounds import RoundTimer

__all__ = ["Completion", "Engine", "Request", "RoundTimer", "SpeculativeDecoder", "Update"]
