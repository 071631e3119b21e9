"""Conversations, prompts with completions and preferences as documents of tokens."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from partool.plan.conversations import Preference, Sample, parse
from partool.plan.data_files import SourceFile
from partool.plan.record_files import records_in
from partool.plan.records import DataError
from partool.spec.data import DataSpec, RecordKind
from partool_runtime.chat import Encoder, encode_all
from partool_runtime.data._sources import Part
from partool_runtime.errors import ConfigurationError

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
        template = None if data.template is None else Path(data.template)
        self._encoder = Encoder(Path(data.tokenizer), template, data.loss)
        self.identity = self._encoder.identity
        self.vocab = self._encoder.vocab

    def parts(self) -> Iterator[Part]:
        """See :class:`partool_runtime.data._sources.TokenSource`."""
        origins: deque[str] = deque()

        def samples() -> Iterator[Sample]:
            for sample in self.samples():
                origins.append(sample.origin)
                yield sample

        for encoded in encode_all(self._encoder, samples(), min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))):
            yield Part(encoded.ids, ends_document=True, loss=encoded.loss, origin=origins.popleft())

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
