"""Copies that overlap compute: their order, their errors, and when the host waits."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from partool_runtime.offload import lanes as lanes_module
from partool_runtime.offload.lanes import StreamLanes, ThreadLanes, open_lanes
from partool_runtime.offload.leaving import Leaving
from partool_runtime.offload.worker import SerialWorker

pytestmark = pytest.mark.timeout(30)


@dataclass
class Gate:
    """Mark that the test sets as reached."""

    reached: threading.Event = field(default_factory=threading.Event)
    waits: int = 0

    def wait(self) -> None:
        self.waits += 1
        assert self.reached.wait(10)

    def done(self) -> bool:
        return self.reached.is_set()

    def before_compute(self) -> None:
        self.wait()


def test_a_lane_keeps_its_order_and_waits_for_marks() -> None:
    lanes, gate = ThreadLanes(random.Random(1)), Gate()
    first, second = torch.zeros(3), torch.zeros(3)
    held = lanes.down.copy(first, torch.ones(3), gate)
    behind = lanes.down.copy(second, first)
    lanes.up.copy(torch.zeros(3), second).wait()  # the other lane does not wait
    assert not held.done()
    assert not behind.done()
    assert first.sum() == 0
    gate.reached.set()
    behind.wait()
    assert held.done()
    assert second.sum() == 3
    lanes.now().wait()
    lanes.close()


def test_an_error_reaches_whoever_waits_for_a_later_copy() -> None:
    lanes = ThreadLanes()
    lanes.up.copy(torch.zeros(3), torch.zeros(4))
    later = lanes.up.copy(torch.zeros(3), torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        later.wait()
    with pytest.raises(RuntimeError, match="size"):
        later.before_compute()
    lanes.down.copy(torch.zeros(3), torch.zeros(3)).wait()
    lanes.close()


def test_a_cpu_has_threads_for_lanes() -> None:
    lanes = open_lanes(torch.device("cpu"))
    assert isinstance(lanes, ThreadLanes)
    lanes.close()


class Calls:
    """Calls to streams and events, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.current = "compute"
        calls = self

        class Stream:
            made = 0
            device = torch.device("cuda", 0)

            def __init__(self, device: torch.device) -> None:
                self.name = ("down", "up")[Stream.made]
                Stream.made += 1

            def wait_event(self, event: Event) -> None:
                calls.told.append(f"{self.name} waits for {event.name}")

            def synchronize(self) -> None:
                calls.told.append(f"host waits for {self.name}")

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                self.name = f"{stream.name}'s mark"
                calls.told.append(self.name)

            def synchronize(self) -> None:
                calls.told.append(f"host waits for {self.name}")

            def query(self) -> bool:
                return True

        @contextmanager
        def on(stream: Stream):  # type: ignore[no-untyped-def]
            before, calls.current = calls.current, stream.name
            yield
            calls.current = before

        def current_stream(device: torch.device | None = None) -> Stream:
            stream = Stream.__new__(Stream)
            stream.name = calls.current
            return stream

        fakes = {
            "Stream": Stream,
            "Event": Event,
            "stream": on,
            "current_stream": current_stream,
            "device": nullcontext,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(lanes_module.torch.cuda, name, fake)


class Copied:
    """Stand-in for a tensor on a GPU."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def copy_(self, source: object, *, non_blocking: bool) -> None:
        assert non_blocking
        self.calls.told.append(f"copy on {self.calls.current}")


def test_streams_are_told_what_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    lanes = StreamLanes(torch.device("cuda", 0))
    calls.current = "reductions"
    made = lanes.now()
    mark = lanes.down.copy(Copied(calls), Copied(calls), made)  # type: ignore[arg-type]
    calls.current = "compute"
    mark.wait()
    assert mark.done()
    lanes.up.copy(Copied(calls), Copied(calls)).before_compute()  # type: ignore[arg-type]
    lanes.close()
    assert calls.told == [
        "reductions's mark",
        "down waits for reductions's mark",
        "copy on down",
        "down's mark",
        "host waits for down's mark",
        "copy on up",
        "up's mark",
        "compute waits for up's mark",
        "host waits for down",
        "host waits for up",
    ]


def test_gradients_on_their_way_do_not_fill_the_device() -> None:
    leaving = Leaving(most_bytes=100)
    pieces = [torch.zeros(2, 20) for _ in range(4)]  # 160 bytes and two gradients each
    marks = [Gate() for _ in pieces]
    for index in (0, 1):
        for half in pieces[index]:
            leaving.add(half, marks[index])
            leaving.settle()
    assert leaving.held_bytes == 320
    assert [mark.waits for mark in marks] == [0, 0, 0, 0]
    leaving.add(pieces[2][0], marks[2])
    threading.Timer(0.05, marks[0].reached.set).start()
    leaving.settle()  # waits for the oldest piece, and only for it
    assert [mark.waits for mark in marks] == [2, 0, 0, 0]
    assert leaving.held_bytes == 320
    leaving.add(pieces[2][1], marks[2])
    leaving.settle()
    marks[1].reached.set()
    leaving.settle()
    assert leaving.held_bytes == 160
    marks[2].reached.set()
    leaving.settle()
    assert leaving.held_bytes == 0


def test_small_gradients_on_their_way_do_not_hold_the_host_back() -> None:
    leaving, gate = Leaving(most_bytes=100), Gate()
    for _ in range(25):
        leaving.add(torch.zeros(1), gate)
        leaving.settle()
    assert gate.waits == 0
    assert leaving.held_bytes == 100


def test_a_worker_stops_at_an_error_and_nobody_hangs() -> None:
    worker, done = SerialWorker("worker"), []

    def fail() -> None:
        raise OSError("gone")

    for work in (lambda: done.append(1), fail, lambda: done.append(2)):
        worker.put(work)
    with pytest.raises(OSError, match="gone"):
        worker.drain()
    with pytest.raises(OSError, match="gone"):
        worker.wait_for(lambda: False)
    worker.close()
    assert done == [1]
