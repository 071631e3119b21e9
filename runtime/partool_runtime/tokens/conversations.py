"""Conversations, prompts with completions and preferences as documents of tokens."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from partool.plan.conversations import Completion, Conversation, Preference, Sample, parse
from partool.plan.data_files import SourceFile
from partool.plan.record_files import records_in
from partool.plan.records import DataError
from partool.spec.data import DataSpec, RecordKind
from partool_runtime.chat import Encoded, Encoder, encode_all
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.sources import TokenPart


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample as a person looks at it."""

    origin: str
    ids: npt.NDArray[np.uint32]
    loss: npt.NDArray[np.uint8]
    messages: npt.NDArray[np.int32]
    """For each token its message, counted from 0; −1 where the template does not show it."""
    roles: tuple[str, ...]
    """The messages' roles."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens, special tokens included."""


_MOST_PROCESSES = 8
"""Most processes that encode; more would wait for the one that writes."""


class ConversationSource:
    """Samples of records, each of which is one document; a preference gives two, the chosen one first."""

    def __init__(self, files: Sequence[SourceFile], data: DataSpec) -> None:
        if data.records == "auto" or data.is_text:
            raise ValueError("texts have a source of their own")
        self.files = files
        self._data = data
        self._kind: RecordKind = data.records
        self._encoder = Encoder.of_data(data)
        self.identity = self._encoder.identity
        self.vocab = self._encoder.vocab

    def notes(self) -> tuple[str, ...]:
        """See :class:`partool_runtime.tokens.sources.TokenSource`."""
        return self._encoder.notes() if self._kind == "chat" else ()

    def parts(self) -> Iterator[TokenPart]:
        """See :class:`partool_runtime.tokens.sources.TokenSource`."""
        origins: deque[str] = deque()

        def samples() -> Iterator[Sample]:
            for sample in self.samples():
                origins.append(sample.origin)
                yield sample

        for encoded in encode_all(self._encoder, samples(), min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))):
            origin = origins.popleft()
            if self._kind == "preference" and not len(encoded.ids):
                # A document without tokens is not written, and every later pair would be two answers to two prompts.
                help = "leave the record out, or correct the chat template"
                raise ConfigurationError("PT602", f"{origin}: an answer of the pair has no tokens", help)
            yield TokenPart(encoded.ids, ends_document=True, loss=encoded.loss, origin=origin)

    def texts(self, documents: Collection[int]) -> dict[int, Shown]:
        """Return the samples of some documents of the cache, with each token's message, by the document's number."""
        numbered = enumerate(sample for sample in self.samples() if not _is_empty(sample))
        chosen = dict(islice(((n, sample) for n, sample in numbered if n in documents), len(documents)))
        encoded = self._encoder.encode(list(chosen.values()), messages=True)
        return {
            number: Shown(
                sample.origin, one.ids, one.loss, _messages(one, sample), _roles(sample), self._encoder.decode
            )
            for (number, sample), one in zip(chosen.items(), encoded, strict=True)
        }

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of all files, in order.

        Raises ConfigurationError PT601 if a file cannot be read, PT602 for a malformed record.
        """
        for file in self.files:
            try:
                for record, origin in records_in(file.path, file.format):
                    parsed = parse(record, self._kind, self._data, origin)
                    yield from (parsed.chosen, parsed.rejected) if isinstance(parsed, Preference) else (parsed,)
            except OSError as error:
                raise ConfigurationError("PT601", f"{file.path} cannot be read: {error.strerror}") from error
            except DataError as error:
                raise ConfigurationError("PT602", str(error), error.help) from error


def _is_empty(sample: Sample) -> bool:
    return isinstance(sample, Conversation) and not sample.messages


def _roles(sample: Sample) -> tuple[str, ...]:
    if isinstance(sample, Conversation):
        return tuple(str(message["role"]) for message in sample.messages)
    return ("prompt", "completion")


def _messages(encoded: Encoded, sample: Sample) -> npt.NDArray[np.int32]:
    """Return each token's message; a completion's tokens are those that are trained on."""
    if encoded.messages is not None:
        return encoded.messages
    return encoded.loss.astype(np.int32) if isinstance(sample, Completion) else np.full(len(encoded.ids), -1, np.int32)
