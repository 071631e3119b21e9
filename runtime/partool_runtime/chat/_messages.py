"""Messages as chat templates read them: plain JSON values, without keys whose value is null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partool.plan.conversations import Conversation, Message

PlainMessages = list[dict[str, Any]]
PlainTools = list[dict[str, Any]] | None

_REASONING = ("reasoning_content", "thinking", "reasoning")


def plain_messages(conversation: Conversation) -> PlainMessages:
    """Return a conversation's messages for a template.

    As in transformers 5.24, a key whose value is null is left out, since templates would write "None", and text of
    reasoning is given under each of the names ``reasoning_content`` and ``thinking`` that templates read.
    """
    return [_plain_message(message) for message in conversation.messages]


def plain_tools(conversation: Conversation) -> PlainTools:
    """Return a conversation's tools for a template, None where it has none."""
    return [_plain(tool) for tool in conversation.tools] or None


def _plain_message(message: Message) -> dict[str, Any]:
    values = {key: _plain(value) for key, value in message.items() if value is not None}
    reasoning = next((values[key] for key in _REASONING if key in values), None)
    if reasoning is None:
        return values
    return {"thinking": reasoning, **values, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Return a value that holds nothing but JSON's types: an object's methods could lead a template out of the sandbox.

    Anything else becomes its type's name in angle brackets: templates ask whether a picture is there, not what it is.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"
