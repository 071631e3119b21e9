"""What a tracker's process is told and answers, and what it hands over, without a tracker and without a process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from partool.plan.event_log import last_events
from partool_runtime.trackers.figures import row_of
from partool_runtime.trackers.follow import LogPlace, bookmark, follow, last_exit_code, shows_more
from partool_runtime.trackers.orders import END_S, Orders
from partool_runtime.trackers.types import FigureRow


@pytest.fixture
def alarms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    set_for: list[int] = []
    monkeypatch.setattr(signal, "alarm", set_for.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return set_for


@pytest.mark.parametrize(
    ("word", "limits"), [(b"end\n", []), (b"end 7\n", [8]), (b"", [END_S + 1]), (b"en", [END_S + 1])]
)
def test_the_end_is_a_word_or_the_end_of_the_starter(word: bytes, limits: list[int], alarms: list[int]) -> None:
    read, write = os.pipe()
    orders = Orders(read)
    os.write(write, b'{"a":')
    os.write(write, b" 1}\n")
    assert orders.first_line() == '{"a": 1}'
    assert not orders.ended(0.0)
    os.write(write, word)
    os.close(write)
    assert orders.ended(5.0)
    assert orders.ended(0.0)
    assert alarms == limits
    os.close(read)


class Notes:
    url = ""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.numbers: list[int] = []

    def begin(self, step: int) -> None:
        self.noted.append(("begin", step))

    def log(self, rows: Sequence[FigureRow]) -> None:
        self.noted += [(row.step, dict(row.figures)) for row in rows]
        self.numbers += [row.number for row in rows]

    def close(self, exit_code: int) -> None:
        raise AssertionError


class AfterLooks:
    """Says that the log is complete at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def ended(self, wait_s: float) -> bool:
        self.looks -= 1
        return self.looks <= 0


def events(file: Path, *each: tuple[str, dict[str, Any]]) -> None:
    with file.open("a") as log:
        for kind, data in each:
            log.write(json.dumps({"v": 1, "kind": kind, "t": 1.5, "rank": 0, "data": data}) + "\n")


def test_log_steps_and_validations_are_handed_over_in_order(tmp_path: Path) -> None:
    log, notes = tmp_path / "log", Notes()
    pairs = {"chosen": 0.5, "rejected": None}
    events(
        log,
        ("start", {"resumed_from": None}),
        ("step", {"step": 1, "loss": 2.0, "tokens_per_s": None, "mfu": None, "preferences": pairs}),
        ("step", {"step": 2, "loss": 1.9}),
        ("validation", {"step": 2, "loss": None, "preferences": pairs}),
        ("end", {"exit_code": 75, "reason": "x"}),
    )
    assert last_exit_code(log) == 75
    repeated = {"step": 2, "loss": 1.5, "tokens_per_s": None}
    events(log, ("warning", {"message": "PT558"}), ("start", {"resumed_from": 1}), ("step", repeated))
    assert last_exit_code(log) == 1, "the last attempt has not ended"
    place = follow(notes, log, LogPlace(), AfterLooks(2), poll_s=0.0)
    assert notes.noted == [
        ("begin", 0),
        (1, {"train/loss": 2.0, "preferences/chosen": 0.5}),
        (2, {"validation/preferences/chosen": 0.5}),
        ("begin", 1),
        (2, {"train/loss": 1.5}),
    ]
    assert place == LogPlace(log.stat().st_size, 3)
    assert shows_more(log, 0)
    events(log, ("warning", {"message": "PT558"}))
    assert not shows_more(log, place.offset)
    sets = {"code": {"loss": 1.5, "perplexity": 4.0, "preferences": {"margin": 2.0}}, "none": {"loss": None}}
    samples = [{"prompt": "a", "text": "b", "tokens": 1, "ended": True}]
    events(log, ("validation", {"step": 3, "loss": 1.0, "sets": sets, "samples": samples}))
    follow(notes, log, place, AfterLooks(1), poll_s=0.0)
    assert notes.numbers == [0, 1, 2, 3]
    of_code = {"loss": 1.5, "perplexity": 4.0, "preferences/margin": 2.0}
    assert notes.noted[-1] == (
        3, {"validation/loss": 1.0, **{f"validation/code/{name}": value for name, value in of_code.items()}}
    )  # fmt: skip
    assert row_of(last_events(log)[-1]).texts == (("a", "b"),)  # type: ignore[union-attr]


def test_a_bookmark_is_kept_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partool_runtime.trackers.follow._LOCK_S", 0.0)
    with bookmark(tmp_path, "wandb") as mark:
        assert mark.place == (0, 0)
        mark.move(LogPlace(123, 4))
        with pytest.raises(TimeoutError, match=f"process {os.getpid()} "), bookmark(tmp_path, "wandb"):
            pass
    with bookmark(tmp_path, "wandb") as mark:
        assert mark.place == (123, 4)
    (tmp_path / "trackers" / "wandb.json").write_text("[torn")
    with bookmark(tmp_path, "wandb") as mark:
        assert mark.place == (0, 0)
