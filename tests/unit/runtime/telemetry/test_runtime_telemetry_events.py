"""The event log: torn lines, appending attempts, non-finite numbers, a full disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from partool.plan.event_log import event_log, last_events, parse_event, read_events, read_new_events
from partool_runtime.telemetry._events import EventWriter


def write(run_dir: Path, *steps: int) -> Path:
    writer = EventWriter(run_dir, 3)
    for step in steps:
        writer.write("step", {"step": step})
    writer.close()
    return event_log(run_dir, 3)


def steps(path: Path) -> list[int]:
    return [event["data"]["step"] for event in read_events(path)]


def test_every_line_is_an_event_with_version_time_and_rank(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (line,) = path.read_text().splitlines()
    event = json.loads(line)
    assert (event["v"], event["kind"], event["rank"], event["data"]) == (1, "step", 3, {"step": 1})
    assert event["t"] > 1.6e9


def test_a_log_cut_anywhere_reads_up_to_its_last_whole_line_and_goes_on(tmp_path: Path) -> None:
    whole = write(tmp_path, 1, 2).read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path = event_log(tmp_path, 3)
        path.write_bytes(whole[:cut])
        intact = [1, 2] if cut == len(whole) - 1 else [1]  # only the newline is missing
        assert steps(path) == intact
        write(tmp_path, 7)
        assert steps(path) == [*intact, 7]


def test_other_versions_and_other_json_are_passed_over() -> None:
    good = {"v": 1, "kind": "step", "t": 0.0, "rank": 0, "data": {"step": 1}}
    assert parse_event(json.dumps(good)) == good
    for bad in ({**good, "v": 2}, {"v": 1}, [1], 3):
        assert parse_event(json.dumps(bad)) is None
    assert parse_event(b"\xff\xfe") is None


def test_following_a_log_leaves_an_unfinished_line_for_later(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    events, offset = read_new_events(path, 0)
    assert [e["data"]["step"] for e in events] == [1]
    path.write_bytes(whole)
    events, offset = read_new_events(path, offset)
    assert [e["data"]["step"] for e in events] == [2]
    assert read_new_events(path, offset) == ([], len(whole))
    assert len(read_new_events(path, len(whole) + 5)[0]) == 2  # the file is replaced by a shorter one
    assert read_new_events(tmp_path / "none", 3) == ([], 0)


def test_the_tail_begins_at_a_whole_line(tmp_path: Path) -> None:
    path = write(tmp_path, *range(50))
    tail = [e["data"]["step"] for e in last_events(path, 400)]
    assert tail == list(range(50 - len(tail), 50))
    assert 0 < len(tail) < 6
    assert last_events(tmp_path / "none") == []


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    terms = {"forward": float("inf")}
    writer.write("step", {"step": 1, "loss": float("nan"), "terms_s": terms, "list": [1.5, -float("inf")]})
    writer.close()
    (event,) = read_events(event_log(tmp_path, 0))
    assert event["data"] == {"step": 1, "loss": None, "terms_s": {"forward": None}, "list": [1.5, None]}


def test_a_failed_write_is_reported_once_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.write("step", {"step": 1})
    real = os.write

    def half_then_full(fd: int, data: bytes) -> int:
        real(fd, data[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half_then_full)
    writer.write("step", {"step": 2})
    writer.write("step", {"step": 3})
    monkeypatch.undo()
    writer.write("step", {"step": 4})
    writer.close()
    assert steps(event_log(tmp_path, 0)) == [1, 4]
    assert capfd.readouterr().err.count("No space left on device") == 1
