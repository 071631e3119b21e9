"""Fine-tuning data: conversations become text by a chat template, then tokens, each with whether it is trained on."""

from partool_runtime.chat.encode import Encoded, Encoder
from partool_runtime.chat.parallel import encode_all
from partool_runtime.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "Encoded", "Encoder", "encode_all"]
