"""A chat template: how a model folder turns messages into one text."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partool.plan.conversations import Conversation
from partool.plan.tokenizer_folder import DEFAULT, TOOL_USE
from partool_runtime.chat._folder import read_text, special_tokens_of, templates_of
from partool_runtime.chat._messages import PlainMessages, PlainTools, plain_messages, plain_tools
from partool_runtime.errors import ConfigurationError

if TYPE_CHECKING:
    import jinja2

    from partool_runtime.chat._environment import GenerationTag

DATE = datetime.date(2024, 7, 26)
"""The day that ``strftime_now`` gives unless the caller names another: the one that Llama 3.1's templates write
where this function is missing."""
_SAFE_JINJA = (3, 1, 6)
"""Older versions let a template out of the sandbox (CVE-2025-27516)."""
_ANOTHER = "mend the conversation, or set data.template to the file of a template that takes it"

Span = tuple[int, int]
"""Start and end in characters; the end is exclusive."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """The text of a conversation, and which parts of it the template marks with ``{% generation %}``."""

    text: str
    generation_spans: tuple[Span, ...]


class ChatTemplate:
    """Chat templates by name, of which one is used for each conversation.

    ``sources`` holds Jinja templates: "default", and "tool_use" for conversations with tools. ``variables`` are what
    templates read beside the conversation, such as ``bos_token``. ``name`` is used in errors.

    ``strftime_now`` of a template gives ``date``, not today: tokens are cached, counted and hashed, so that the same
    conversations must give the same tokens tomorrow and on every machine. An instance renders in one thread at a time.
    Raises ConfigurationError PT606 if jinja2 is missing or too old, or a template is malformed.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        variables: Mapping[str, str] | None = None,
        name: str = "the chat template",
        date: datetime.date = DATE,
    ) -> None:
        self.variables = dict(variables or {})
        self.name = name
        self._sources = dict(sources)
        self._compiled = {key: self._compile(key, source, date) for key, source in self._sources.items()}
        dated = any("strftime_now" in source for source in self._sources.values())
        parts = [*sorted(self._sources.items()), *sorted(self.variables.items()), date.isoformat() if dated else ""]
        self.identity = hashlib.sha256(repr(parts).encode()).hexdigest()

    @classmethod
    def from_folder(cls, folder: Path, template: Path | None = None, *, date: datetime.date = DATE) -> ChatTemplate:
        """Return a model folder's template, or the one in the file ``template`` with the folder's special tokens.

        Raises ConfigurationError: PT606 if there is no template, PT603 if a file cannot be read.
        """
        variables = special_tokens_of(folder)
        if template is not None:
            source = read_text(template)
            if source is None:
                raise ConfigurationError(
                    "PT606", f"there is no chat template {template}", "set data.template to the path of a file"
                )
            return cls({DEFAULT: source}, variables=variables, name=str(template), date=date)
        sources = templates_of(folder)
        if not sources:
            fix = "use the tokenizer of a model that was tuned for chat, or set data.template to a template's file"
            message = f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
            raise ConfigurationError("PT606", message, fix)
        return cls(sources, variables=variables, name=f"the chat template of {folder}", date=date)

    def _compile(self, key: str, source: str, date: datetime.date) -> tuple[jinja2.Template, GenerationTag]:
        try:
            import jinja2

            version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
        except ImportError:
            version = ()
        if version < _SAFE_JINJA:
            present = ".".join(map(str, version)) or "not installed"
            raise ConfigurationError(
                "PT606", f"{self.name} needs jinja2 3.1.6 or later; it is {present}", 'pip install "partool[hf]"'
            )
        from partool_runtime.chat._environment import compiled

        try:
            return compiled(source, date)
        except jinja2.TemplateSyntaxError as error:
            which = f"{self.name} ({key})" if key != DEFAULT else self.name
            raise ConfigurationError("PT606", f"{which}, line {error.lineno}: {error.message}") from error

    def _chosen(self, tools: PlainTools) -> str:
        for key in ([TOOL_USE] if tools else []) + [DEFAULT]:
            if key in self._compiled:
                return key
        if len(self._compiled) == 1:
            return next(iter(self._compiled))
        names = ", ".join(sorted(self._compiled))
        raise ConfigurationError("PT606", f"{self.name} has no default, only {names}", "write one of them into a file")

    def source(self, tools: PlainTools = None) -> str:
        """Return the text of the template that is used with or without tools."""
        return self._sources[self._chosen(tools)]

    def marked(self, tools: PlainTools = None) -> bool:
        """Return whether the template says with ``{% generation %}`` what the model writes."""
        return self._compiled[self._chosen(tools)][1].occurs

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> RenderedText:
        """Return a conversation's text, which ends where the assistant would begin if ``add_generation_prompt``.

        Raises ConfigurationError PT607, with the conversation's origin and the number of the message, if the template
        refuses the conversation.
        """
        messages, tools = plain_messages(conversation), plain_tools(conversation)
        return self.render_plain(messages, tools, conversation.origin, add_generation_prompt=add_generation_prompt)

    def render_plain(
        self, messages: PlainMessages, tools: PlainTools, origin: str, *, add_generation_prompt: bool = False
    ) -> RenderedText:
        """Render what ``plain_messages`` and ``plain_tools`` have made of a conversation from ``origin``."""
        try:
            return self._rendered(messages, tools, add_generation_prompt)
        except ConfigurationError:
            raise
        except Exception as error:  # templates are programs of others, and fail with any of Python's errors
            number = self._refused(messages, tools, add_generation_prompt, str(error))
            where = f"{origin or 'a conversation'}, message {number} ({_role(messages, number)})"
            raise ConfigurationError("PT607", f"{where}: {self.name} refuses it: {error}", _ANOTHER) from error

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: PlainTools, prompt: bool) -> RenderedText:
        template, marks = self._compiled[self._chosen(tools)]
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        text = "".join(marks.pieces(template, {**self.variables, **variables}))
        if any(text[start:end] != marked for start, end, marked in marks.spans):
            message = f"{self.name} has {{% generation %}} inside a macro or a {{% set %}}, where its place is unknown"
            raise ConfigurationError("PT606", message, "put the marks where the text is written, outside of both")
        return RenderedText(text, tuple((start, end) for start, end, _ in marks.spans))

    def _refused(self, messages: PlainMessages, tools: PlainTools, prompt: bool, text: str) -> int:
        """Return the number of the first message, counted from 1, with which a rendering fails in the same way."""
        for count in range(1, len(messages)):
            try:
                self._rendered(messages[:count], tools, prompt)
            except Exception as error:
                if str(error) == text:
                    return count
        return len(messages)


def _role(messages: PlainMessages, number: int) -> str:
    return str(messages[number - 1].get("role", "no role")) if messages else "no messages"
