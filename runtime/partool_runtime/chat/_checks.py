"""What a short conversation shows of a template that would make a tuned model worse without an error."""

from __future__ import annotations

from typing import Any

from partool.plan.conversations import Conversation
from partool_runtime.chat.spans import trained_text
from partool_runtime.chat.template import ChatTemplate
from partool_runtime.errors import ConfigurationError


def template_notes(template: ChatTemplate, special_tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Return sentences about the end of the assistant's turn in a conversation of two messages, none if it is fine.

    A model that is not trained on the token that ends its turn goes on writing when it should stop.
    """
    for content in ("a", [{"type": "text", "text": "a"}]):  # templates for pictures take parts only
        try:
            return _notes(template, special_tokens, content)
        except ConfigurationError:
            continue
    return ()


def turn_end(template: ChatTemplate, special_tokens: tuple[str, ...]) -> str | None:
    """Return the special token that ends an assistant's turn and is trained on; None if there is none."""
    for content in ("a", [{"type": "text", "text": "a"}]):
        messages = tuple({"role": role, "content": content} for role in ("user", "assistant"))
        try:
            result = trained_text(template, Conversation(messages, (1, 1)), "assistant", special_tokens)
        except ConfigurationError:
            continue
        text = "" if not result.spans else result.text[slice(*result.spans[-1])].rstrip()
        return next((token for token in special_tokens if text.endswith(token)), None)
    return None


def _notes(template: ChatTemplate, special_tokens: tuple[str, ...], content: Any) -> tuple[str, ...]:
    messages = tuple({"role": role, "content": content} for role in ("user", "assistant"))
    result = trained_text(template, Conversation(messages, (1, 1)), "assistant", special_tokens)
    if not result.spans:
        return (f"{template.name} marks nothing of an assistant's message, so that no token would be trained on",)
    start, end = result.spans[-1]
    if result.text[start:end].rstrip().endswith(special_tokens):
        return ()
    after = result.text[end:].lstrip()
    stop = next((token for token in special_tokens if after.startswith(token)), None)
    if stop is not None:
        return (
            f"{template.name} leaves {stop!r} out of its {{% generation %}} marks: the model would not learn to stop",
        )
    return (
        f"{template.name} writes no special token behind an assistant's message: the model would not learn to stop",
    )
