"""The decoder that every rank runs."""

from partool_runtime.model.attention import AttentionLayout, attend
from partool_runtime.model.decoder import AnyDecoder, Block, Decoder, Head, StagedDecoder
from partool_runtime.model.loss import IGNORED, loss
from partool_runtime.model.parts import DecoderParts, StageModule

__all__ = [
    "IGNORED",
    "AnyDecoder",
    "AttentionLayout",
    "Block",
    "Decoder",
    "DecoderParts",
    "Head",
    "StageModule",
    "StagedDecoder",
    "attend",
    "loss",
]
