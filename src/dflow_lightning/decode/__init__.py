"""Speculative decoding with a block drafter: draft, verify, relay, commit."""

from dflow_lightning.decode.decoder import SpeculativeDecoder, load_decoder
from dflow_lightning.decode.engine import Engine
from dflow_lightning.decode.request import Answer, Completion, Request, Update

__all__ = [
    "Answer",
    "Completion",
    "Engine",
    "Request",
    "SpeculativeDecoder",
    "Update",
    "load_decoder",
]
