"""Samples encoded by several processes: the same as by one, in the same order, with the same errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from _chat_case import PLAIN, folder, talk

from partool.plan.conversations import Completion, Conversation
from partool_runtime.chat import Encoder, encode_all, parallel
from partool_runtime.chat._frames import EncodedChunk, samples_from_json, samples_to_json, settings_from_json
from partool_runtime.chat._frames import settings_to_json as to_json
from partool_runtime.chat.encode import EncoderSettings, Sample
from partool_runtime.errors import ConfigurationError

STRICT = PLAIN.replace("{{ m.content", "{{ raise_exception('no') if m.content == 'bad' }}{{ m.content")


def samples(count: int) -> Iterator[Sample]:
    for i in range(count):
        yield talk(f"u: hello {i}\na: {'the cat ' * (i % 9)}", origin=f"a.jsonl:{i + 1}")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "CHUNK", 3)
    monkeypatch.setattr(parallel, "FEW", 10)


@pytest.mark.usefixtures("small_chunks")
def test_processes_give_what_one_gives_and_pass_errors_on(tmp_path: Path) -> None:
    encoder = Encoder(folder(tmp_path / "m", STRICT), loss="last")
    mixed = [*samples(50), Conversation((), ()), Completion("two", " the"), *samples(5)]
    expected = encoder.encode(mixed)
    several = list(encode_all(encoder, iter(mixed), 2))
    assert len(several) == len(expected) == 57
    for one, other in zip(several, expected, strict=True):
        assert (one.ids.tolist(), one.loss.tolist()) == (other.ids.tolist(), other.loss.tolist())
        assert (one.ids.dtype, one.loss.dtype, one.untrained) == (other.ids.dtype, other.loss.dtype, other.untrained)
    bad = [
        *samples(40),
        talk("u: x\na: bad", origin="b.jsonl:9"),
        *samples(9),
        talk("u: bad\na: y", origin="b.jsonl:19"),
    ]
    with pytest.raises(ConfigurationError, match=r"PT607: b.jsonl:9, message 2 \(assistant\): .* refuses it: no"):
        list(encode_all(encoder, bad, 2))


@pytest.mark.usefixtures("small_chunks")
def test_a_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    begin = parallel._Process.__enter__

    def enter(process: parallel._Process) -> parallel._Process:
        started.append(process._process.pid)
        return begin(process)

    def dying() -> Iterator[Sample]:
        for i, sample in enumerate(samples(1000)):
            if i == 40:
                os.kill(started[0], signal.SIGKILL)
            yield sample

    monkeypatch.setattr(parallel._Process, "__enter__", enter)
    encoder = Encoder(folder(tmp_path / "m", PLAIN))
    with pytest.raises(RuntimeError, match="ended with exit code -9"):
        list(encode_all(encoder, dying(), 1 + 1))
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_few_samples_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_Process", None)
    encoder = Encoder(folder(tmp_path / "m", PLAIN))
    assert len(list(encode_all(encoder, samples(300), 8))) == 300
    assert list(encode_all(encoder, [], 2)) == []


def test_frames_give_back_what_they_were_given() -> None:
    conversation = talk("u: é\ud800\na: x", weights=(0, 1), tools=({"name": "add"},))
    completion = Completion("p", "c", "f:1")
    assert samples_from_json(samples_to_json([conversation, completion])) == [conversation, completion]
    settings = EncoderSettings(Path("/m"), Path("t.jinja"), "all")
    assert settings_from_json(to_json(settings)) == settings
    error = EncodedChunk.from_parts(EncodedChunk(error=ConfigurationError("PT607", "m", "h")).parts()).error
    assert str(error) == "PT607: m\n  help: h"


def test_workers_import_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, partool_runtime.chat.process; print({'torch', 'transformers'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "set()"
