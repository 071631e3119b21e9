"""Samples encoded by several processes, in their order."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from types import TracebackType
from typing import IO, cast

from partool.process import python_command
from partool_runtime.chat._frames import EncodedChunk, samples_to_json, settings_to_json
from partool_runtime.chat.encode import Encoded, Encoder, EncoderSettings, Sample
from partool_runtime.frames import read_frame, write_frame

CHUNK = 256
"""Samples that a process is given at a time."""
FEW = 2000
"""Samples that one process encodes sooner than others would start."""
_AHEAD = 4
"""Chunks for each process whose tokens may wait for those of an earlier chunk."""


def encode_all(encoder: Encoder, samples: Iterable[Sample], processes: int) -> Iterator[Encoded]:
    """Yield the tokens of all samples in their order, encoded by at most ``processes`` processes.

    The processes are new interpreters. Fewer than ``FEW`` samples are encoded here. Raises what ``Encoder.encode``
    raises, for the first chunk with a sample that cannot be encoded, and RuntimeError if a process ends on its own.
    """
    remaining = iter(samples)
    first = list(islice(remaining, FEW)) if processes > 1 else []
    chunks = _chunks(chain(first, remaining))
    if processes <= 1 or len(first) < FEW:
        for chunk in chunks:
            yield from encoder.encode(chunk)
        return
    with ExitStack() as stack:
        team = [stack.enter_context(_Process(encoder.settings)) for _ in range(processes)]
        for answer in _in_order(team, chunks):
            if answer.error is not None:
                raise answer.error
            yield from answer.encoded


def _chunks(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    while chunk := list(islice(samples, CHUNK)):
        yield chunk


def _in_order(team: Sequence[_Process], chunks: Iterator[Sequence[Sample]]) -> Iterator[EncodedChunk]:
    """Yield the answers to all chunks in order. Each process has one chunk at a time, so that no pipe fills up."""
    waiting: dict[int, EncodedChunk] = {}
    idle, sent, next_index = list(team), 0, 0
    with selectors.DefaultSelector() as selector:
        chunk = next(chunks, None)
        while chunk is not None or next_index < sent:
            while chunk is not None and idle and sent < next_index + _AHEAD * len(team):
                process = idle.pop()
                process.ask(sent, chunk)
                selector.register(process.output, selectors.EVENT_READ, process)
                sent, chunk = sent + 1, next(chunks, None)
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                waiting[key.data.index] = key.data.answer()
                idle.append(key.data)
            while next_index in waiting:
                yield waiting.pop(next_index)
                next_index += 1


class _Process:
    """An interpreter that runs ``partool_runtime.chat.process``; use it as a context, which ends it."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._process = subprocess.Popen(
            python_command("partool_runtime.chat.process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._input = cast("IO[bytes]", self._process.stdin)
        self.output = cast("IO[bytes]", self._process.stdout)
        self.index = -1
        self._write(settings_to_json(settings))

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()  # closes the input, at which the process ends

    def _write(self, part: bytes) -> None:
        try:
            write_frame(self._input, part)
        except OSError as error:
            raise self._ended() from error

    def ask(self, index: int, samples: Sequence[Sample]) -> None:
        """Send a chunk, whose answer then comes through ``output``."""
        self.index = index
        self._write(samples_to_json(samples))

    def answer(self) -> EncodedChunk:
        """Return the answer to the chunk that was sent."""
        try:
            parts = read_frame(self.output)
        except EOFError as error:
            raise self._ended() from error
        if not parts:
            raise self._ended()
        return EncodedChunk.from_parts(parts)

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"a process that encodes samples ended with exit code {self._process.wait()}")
