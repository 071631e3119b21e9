"""What an encoding process is asked and answers: JSON and arrays, in frames on pipes."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partool.plan.conversations import Completion, Conversation
from partool_runtime.chat._messages import plain_messages, plain_tools
from partool_runtime.chat.encode import Encoded, EncoderSettings, Sample
from partool_runtime.errors import ConfigurationError


def settings_to_json(settings: EncoderSettings) -> bytes:
    """Return settings as JSON."""
    template = None if settings.template is None else str(settings.template)
    fields = [str(settings.folder), template, settings.loss, settings.date.isoformat(), settings.special_tokens]
    return json.dumps(fields).encode()


def settings_from_json(data: bytes) -> EncoderSettings:
    """Return what ``settings_to_json`` was given."""
    folder, template, loss, date, special_tokens = json.loads(data)
    file = None if template is None else Path(template)
    return EncoderSettings(Path(folder), file, loss, datetime.date.fromisoformat(date), tuple(special_tokens))


def samples_to_json(samples: Sequence[Sample]) -> bytes:
    """Return samples as JSON, with messages as templates read them."""
    return json.dumps([_to_json(sample) for sample in samples]).encode()


def _to_json(sample: Sample) -> list[Any]:
    if isinstance(sample, Completion):
        return [sample.prompt, sample.completion, sample.origin]
    return [plain_messages(sample), sample.weights, plain_tools(sample) or [], sample.origin]


def samples_from_json(data: bytes) -> list[Sample]:
    """Return what ``samples_to_json`` was given."""
    return [_from_json(*fields) for fields in json.loads(data)]


def _from_json(*fields: Any) -> Sample:
    if len(fields) == 3:
        return Completion(*fields)
    messages, weights, tools, origin = fields
    return Conversation(tuple(messages), tuple(weights), tuple(tools), origin)


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The tokens of some samples, or the error that encoding them raised."""

    encoded: Sequence[Encoded] = ()
    error: ConfigurationError | None = None

    def parts(self) -> list[bytes]:
        """Return the answer as parts of a frame."""
        if self.error is not None:
            return [json.dumps({"error": [self.error.code, self.error.message, self.error.help]}).encode()]
        head = {"lengths": [len(one.ids) for one in self.encoded], "untrained": [one.untrained for one in self.encoded]}
        ids = np.concatenate([one.ids for one in self.encoded])
        loss = np.concatenate([one.loss for one in self.encoded])
        return [json.dumps(head).encode(), ids.astype("<u4").tobytes(), loss.tobytes()]

    @classmethod
    def from_parts(cls, parts: list[bytes]) -> EncodedChunk:
        """Return what ``parts`` was made of."""
        head = json.loads(parts[0])
        if "error" in head:
            return cls(error=ConfigurationError(*head["error"]))
        borders = np.cumsum(head["lengths"])[:-1]
        ids = np.split(np.frombuffer(parts[1], "<u4"), borders)
        loss = np.split(np.frombuffer(parts[2], np.uint8), borders)
        rows = zip(ids, loss, head["untrained"], strict=True)
        return cls([Encoded(one.astype(np.uint32), mask, tuple(messages)) for one, mask, messages in rows])
