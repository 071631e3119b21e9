"""Which characters of a rendered conversation are trained on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NoReturn

from partool.plan.conversations import Conversation
from partool_runtime.chat._messages import PlainMessages, PlainTools, plain_messages, plain_tools
from partool_runtime.chat.template import ChatTemplate, RenderedText, Span
from partool_runtime.errors import ConfigurationError

Loss = Literal["assistant", "all", "last"]
"""What is trained on: all that the assistant writes, every token, or the assistant's last message."""

_MARKS = (
    "copy the template into a file, put {% generation %} and {% endgeneration %} around what the assistant writes, "
    "and set data.template to that file"
)
_SHOWN = 40
"""Characters that an error shows of each text where two texts part."""


@dataclass(frozen=True, slots=True)
class TrainedText:
    """A rendered conversation and the spans of it that are trained on, in order and apart from each other."""

    text: str
    spans: tuple[Span, ...]
    messages: tuple[int | None, ...]
    """For each span the message, counted from 0, that it is a part of; None where spans are not those of messages."""
    selected: tuple[int, ...]
    """The assistant's messages of which at least one token should be trained on."""


def trained_text(
    template: ChatTemplate, conversation: Conversation, loss: Loss, special_tokens: tuple[str, ...] = ()
) -> TrainedText:
    """Return the text of a conversation and what is trained on in it.

    A template's ``{% generation %}`` marks decide. For a template without them, the assistant's message ``i`` lies
    between the text of the messages before it, rendered with the generation prompt, and the text of the messages up
    to it; both must begin the text of the conversation. ``special_tokens`` are the texts of tokens that end a turn:
    spaces after the last one are not trained on (``Llava`` writes ``</s> ``: the space belongs to the next turn's
    first token), line breaks are, as in the marked templates of TRL 1.16.

    Raises ConfigurationError: PT607 if the template refuses the conversation, PT608 if it rewrites earlier messages,
    so that spans cannot be told.
    """
    return _Finder(template, conversation, special_tokens).trained(loss)


def message_ends(template: ChatTemplate, conversation: Conversation) -> list[int]:
    """Return, for each message, the number of characters up to its end; what a template writes first is the first's.

    A message that cannot be rendered as the last one has no characters: they count for the next message.
    Raises ConfigurationError PT608 if the template rewrites earlier messages.
    """
    return _Finder(template, conversation, ()).ends()


class _Finder:
    """Renderings of one conversation and of its first messages."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, special_tokens: tuple[str, ...]) -> None:
        self._template = template
        self._conversation = conversation
        self._origin = conversation.origin or "a conversation"
        self._special_tokens = special_tokens
        self._messages: PlainMessages = plain_messages(conversation)
        self._tools: PlainTools = plain_tools(conversation)
        self._full = self._rendered(len(self._messages))
        self._assistants = [i for i, message in enumerate(self._messages) if message.get("role") == "assistant"]

    def _rendered(self, count: int, *, prompt: bool = False) -> RenderedText:
        origin = self._conversation.origin
        return self._template.render_plain(self._messages[:count], self._tools, origin, add_generation_prompt=prompt)

    def trained(self, loss: Loss) -> TrainedText:
        if loss == "all":
            return self._all()
        wanted = self._assistants[-1:] if loss == "last" else self._assistants
        selected = [i for i in wanted if self._conversation.weights[i]]
        if self._template.marked(self._tools):
            pairs = self._marked(selected)
        else:
            pairs = [(self._between(i), i) for i in selected]
        spans = tuple(span for span, _ in pairs)
        return TrainedText(self._full.text, spans, tuple(i for _, i in pairs), tuple(selected))

    def _all(self) -> TrainedText:
        """Return everything but the messages of weight 0."""
        text, weights = self._full.text, self._conversation.weights
        ends = self.ends(strict=True) if 0 in weights else []
        spans: list[Span] = [] if ends else [(0, len(text))]
        for (start, end), weight in zip(pairwise([0, *ends]), weights, strict=False):
            if weight and end > start:
                spans.append((start, end))
        if ends and ends[-1] < len(text):
            spans.append((ends[-1], len(text)))
        return TrainedText(text, tuple(spans), (None,) * len(spans), ())

    def _marked(self, selected: list[int]) -> list[tuple[Span, int]]:
        """Return the marked spans of the selected messages.

        A message may have several spans or none. The spans before message ``i`` are as many as those of the messages
        before it; counting them needs further renderings, which are left out where one span for each message is
        marked and all are selected.
        """
        if not selected:
            return []
        spans = self._full.generation_spans
        firsts = list(range(len(self._assistants)))
        if len(spans) != len(self._assistants) or selected != self._assistants:
            firsts = [len(self._rendered(i).generation_spans) if n else 0 for n, i in enumerate(self._assistants)]
        if any(first > after for first, after in pairwise([*firsts, len(spans)])):
            message = f"{self._template.name} marks fewer spans in a longer conversation ({self._origin})"
            raise ConfigurationError("PT608", message, "use a template whose marks do not depend on later messages")
        ends = [*firsts[1:], len(spans)]
        parts = zip(self._assistants, firsts, ends, strict=True)
        return [(span, i) for i, first, end in parts if i in selected for span in spans[first:end]]

    def _between(self, index: int) -> Span:
        """Return the span of the assistant's message ``index``, from its generation prompt to its end."""
        prompt = self._rendered(index, prompt=True).text if index else self._first_prompt()
        start = self._length(prompt, index, "its generation prompt")
        end = self._end(index)
        if end < start:
            self._rewritten(index, "its generation prompt", self._full.text[:end], self._full.text[:start])
        self._refuse_header(index, start, end)
        text = self._full.text
        cut = start + len(text[start:end].rstrip(" \t"))
        return (
            (start, cut) if self._special_tokens and text.endswith(self._special_tokens, start, cut) else (start, end)
        )

    def _first_prompt(self) -> str:
        try:
            return self._rendered(0, prompt=True).text
        except ConfigurationError as error:
            message = (
                f"{self._origin}: the assistant's message 1 has no message before it, "
                f"and {self._template.name} cannot be rendered without messages"
            )
            raise ConfigurationError("PT607", message, "begin with a user's message, or give it weight 0") from error

    def _end(self, index: int) -> int:
        """Return where message ``index`` ends; an end-of-sequence token that closes a conversation is not a part."""
        if index == len(self._messages) - 1:
            return len(self._full.text)
        text = self._rendered(index + 1).text
        eos = self._template.variables.get("eos_token", "")
        if eos and text.endswith(eos) and not self._full.text.startswith(text):
            text = text.removesuffix(eos)
        return self._length(text, index, "its end")

    def _length(self, text: str, index: int, part: str) -> int:
        if not self._full.text.startswith(text):
            self._rewritten(index, part, text, self._full.text)
        return len(text)

    def _rewritten(self, index: int, part: str, first: str, second: str) -> NoReturn:
        at = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
        )
        before, one, other = first[max(0, at - 20) : at], first[at : at + _SHOWN], second[at : at + _SHOWN]
        message = (
            f"{self._origin}, message {index + 1}: {self._template.name} writes it "
            f"differently in the longer conversation: up to {part} the text goes on after {before!r} with {one!r}, in "
            f"the conversation with {other!r}"
        )
        raise ConfigurationError("PT608", message, _MARKS)

    def _refuse_header(self, index: int, start: int, end: int) -> None:
        """Refuse a message whose header, before its content, the template does not write as a generation prompt."""
        content = self._messages[index].get("content")
        text = content.strip() if isinstance(content, str) else ""
        header, content_follows, _ = self._full.text[start:end].partition(text) if text else ("", "", "")
        if not content_follows or not header.strip():
            return
        before = self._rendered(index).text if index else ""
        if before == self._full.text[:start]:
            message = (
                f"{self._origin}, message {index + 1}: {self._template.name} has no generation prompt for it, so that "
                f"its header {header[-_SHOWN:]!r} would be trained on"
            )
            raise ConfigurationError("PT608", message, f"let it write the header if add_generation_prompt; or {_MARKS}")

    def ends(self, *, strict: bool = False) -> list[int]:
        """Return the ends of all messages; unless ``strict``, one that cannot be the last has no characters."""
        ends: list[int] = []
        for index in range(len(self._messages)):
            try:
                end = self._end(index)
            except ConfigurationError as error:
                if strict or error.code != "PT607":
                    raise
                end = 0
            ends.append(max(end, ends[-1] if ends else 0))
        return ends
