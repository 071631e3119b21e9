"""What a record for fine-tuning holds: a conversation, a prompt with its completion, or a pair to prefer from.

The forms are those of TRL's data sets (https://huggingface.co/docs/trl/dataset_formats) and ShareGPT's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partool.plan.records import DataError, Record
from partool.spec.data import DataSpec, RecordKind

Message = Mapping[str, Any]
"""``role`` and ``content``, and what a chat template reads beside them (``tool_calls``, ``name``, ``thinking``)."""

_ALIASES = {"messages": ("conversations", "conversation"), "role": ("from",), "content": ("value",)}
"""Keys that are read by these names, too, where a record lacks the first; ShareGPT's."""
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool"}
"""Roles by the names that ShareGPT and its relatives give them."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_KIND: dict[RecordKind, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "chat": ("messages",),
    "instruct": ("prompt", "completion"),
}


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


Sample = Conversation | Completion


@dataclass(frozen=True, slots=True)
class Preference:
    """Two samples that begin with the same prompt, of which the first is preferred."""

    chosen: Sample
    rejected: Sample


def recognise(record: Record, data: DataSpec, origin: str) -> RecordKind:
    """Return what a record holds, by its keys; raises DataError where none of the kinds has its keys."""
    for kind, keys in _OF_KIND.items():
        if all(_name(key, record, data) in record for key in keys):
            return kind
    if data.text_field in record:
        return "text"
    raise DataError(
        f"{origin} has no key {data.text_field!r} (its keys: {_listed(record)}), nor messages, prompt and completion, "
        "or chosen and rejected",
        "set data.text_field to the text's key, or rename keys, as in data.keys: {messages: dialogue}",
    )


def parse(record: Record, kind: RecordKind, data: DataSpec, origin: str) -> Sample | Preference:
    """Return what a record of chat, instruct or preference data holds; raises DataError with line or row and key."""
    parts = _Parts(record, data, origin)
    if kind == "preference":
        return parts.preference()
    return parts.instruct() if kind == "instruct" else parts.conversation("messages")


def _listed(keys: Mapping[str, Any]) -> str:
    return ", ".join(sorted(keys)) or "none"


def _name(key: str, record: Record, data: DataSpec) -> str:
    """Return the name that a record, or a message, has for a key: as ``data.keys`` says, else the first that exists."""
    if key in data.keys:
        return data.keys[key]
    return next((name for name in (key, *_ALIASES.get(key, ())) if name in record), key)


@dataclass(frozen=True, slots=True)
class _Parts:
    """A record's parts, by the keys that partool reads."""

    record: Record
    data: DataSpec
    origin: str

    def instruct(self) -> Sample:
        """Return a prompt with its completion; both are texts, or both are messages."""
        return self.answered(self.value("prompt"), "completion")

    def preference(self) -> Preference:
        """Return a pair; without a prompt in the record, the messages that both begin with are the prompt."""
        prompt = self.record.get(_name("prompt", self.record, self.data))
        if prompt is not None:
            return Preference(self.answered(prompt, "chosen"), self.answered(prompt, "rejected"))
        if isinstance(self.value("chosen"), str) or isinstance(self.value("rejected"), str):
            help = "add the prompt, or write both as lists of messages"
            raise DataError(f"{self.origin} has no prompt, and its answers are texts", help)
        pair = [self.conversation("chosen"), self.conversation("rejected")]
        shared = _shared(pair[0].messages, pair[1].messages)
        if shared == min(len(each.messages) for each in pair):
            raise DataError(f"{self.origin}: chosen and rejected do not part", "each needs an answer that differs")
        first, second = (replace(each, weights=(0,) * shared + each.weights[shared:]) for each in pair)
        return Preference(first, second)

    def answered(self, prompt: Any, key: str) -> Sample:
        """Return the sample of a prompt and the answer under ``key``; only the answer is trained on."""
        answer = self.value(key)
        if isinstance(prompt, str) and isinstance(answer, str):
            return Completion(prompt, answer, self.origin)
        if isinstance(prompt, str) or isinstance(answer, str):
            kinds = f"a {type(prompt).__name__} and a {type(answer).__name__}"
            help = "write both as texts, or both as lists of messages"
            raise DataError(f"{self.origin}: prompt and {key} are {kinds}", help)
        before, after = self.conversation("prompt"), self.conversation(key)
        if not after.messages and key != "completion":
            help = "a pair needs two answers: leave the record out"
            raise DataError(f"{self.origin}: {key!r} holds no message", help)
        weights = (0,) * len(before.messages) + after.weights
        return replace(before, messages=before.messages + after.messages, weights=weights)

    def conversation(self, key: str) -> Conversation:
        """Return the messages under a key, and the record's tools."""
        value = self.value(key)
        if not isinstance(value, Sequence) or isinstance(value, str):
            message = f"{self.origin}: {key!r} is a {type(value).__name__}, not a list of messages"
            raise DataError(message, "a message is {role: user, content: TEXT}")
        parsed = [
            _message(each, self.data, f"{self.origin}, message {number}") for number, each in enumerate(value, start=1)
        ]
        messages, weights = tuple(each for each, _ in parsed), tuple(weight for _, weight in parsed)
        return Conversation(messages, weights, self.tools(), self.origin)

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the record's descriptions of functions."""
        tools = self.record.get(_name("tools", self.record, self.data)) or ()
        if isinstance(tools, str) or not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools):
            raise DataError(f"{self.origin}: 'tools' is no list of objects", "each tool is a function's JSON schema")
        return tuple(tools)

    def value(self, key: str) -> Any:
        """Return the value of a key that the record must have."""
        name = _name(key, self.record, self.data)
        if self.record.get(name) is None:
            message = f"{self.origin} has no key {name!r} (its keys: {_listed(self.record)})"
            raise DataError(message, f"data.keys: {{{key}: NAME}} names its key")
        return self.record[name]


def _message(value: Any, data: DataSpec, origin: str) -> tuple[Message, int]:
    """Return a message by the usual keys, and its weight."""
    if not isinstance(value, Mapping):
        raise DataError(f"{origin} is a {type(value).__name__}, not an object with role and content")
    message = {name: part for name, part in value.items() if part is not None}
    role = message.pop(_name("role", message, data), None)
    content = message.pop(_name("content", message, data), None)
    if not isinstance(role, str):
        raise DataError(f"{origin} has no role (its keys: {_listed(value)})", "data.keys: {role: NAME} names its key")
    role = data.roles.get(role, _ROLES.get(role, role))
    if role not in ROLES:
        help = f"data.roles says what it is, as in {{{role}: user}}"
        raise DataError(f"{origin}: the role {role!r} is none of {', '.join(ROLES)}", help)
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{origin}: its weight is {weight!r}", "write 1 to train on the message, or 0")
    if content is None and "tool_calls" not in message:
        help = "data.keys: {content: NAME} names its key"
        raise DataError(f"{origin} has no content (its keys: {_listed(value)})", help)
    return {"role": role, "content": _content(content, origin), **message}, int(weight)


def _content(content: Any, origin: str) -> Any:
    """Return a message's text, or its list of parts, which must be text, too."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise DataError(f"{origin}: its content is a {type(content).__name__}, not a string")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise DataError(f"{origin} holds a part of type {kind}", "partool trains on text: leave the record out")
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Return the number of messages that both lists begin with."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
