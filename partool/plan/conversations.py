"""What a record for fine-tuning holds: a conversation, a prompt with its completion, or a pair to prefer from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
"""``role`` and ``content``, and what a chat template reads beside them (``tool_calls``, ``name``, ``thinking``)."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in their order, and what a chat template is told beside them."""

    messages: tuple[Message, ...]
    weights: tuple[int, ...]
    """1 for each message that may be trained on, 0 for each that may not."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of functions that the assistant may call, as JSON schemas."""
    origin: str = ""
    """File and line, or file and row; used in messages."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the text that follows it; only the latter is trained on."""

    prompt: str
    completion: str
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Preference:
    """Two samples that begin with the same prompt, of which the first is preferred."""

    chosen: Conversation | Completion
    rejected: Conversation | Completion
