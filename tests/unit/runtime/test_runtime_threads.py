"""Threads work on the device of the thread that starts them; CUDA's calls are emulated."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from partool_runtime import threads
from partool_runtime.offload.lanes import ThreadLanes
from partool_runtime.offload.worker import SerialWorker
from partool_runtime.parallel.weipipe.lanes import Lane

RUNTIME = Path(threads.__file__).parent
DEVICE = 3


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Device of each thread that set one, by the thread's name; the present thread is on device 3."""
    found: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.get(threading.current_thread().name, DEVICE))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda index: found.__setitem__(threading.current_thread().name, index)
    )
    return found


def test_threads_begin_on_their_starters_device(settled: dict[str, int]) -> None:
    seen: list[dict[str, int]] = []
    threads.start(lambda: seen.append(dict(settled)), "one").join(timeout=10)
    assert seen == [{"one": DEVICE}]
    with threads.executor("two") as pool:
        assert pool.submit(lambda: dict(settled)).result(timeout=10) == {"one": DEVICE, "two_0": DEVICE}


def test_threads_of_threads_inherit_the_device(settled: dict[str, int]) -> None:
    settled["outer"] = 5
    inner: list[int] = []

    def outer() -> None:
        torch.cuda.set_device(6)
        threads.start(lambda: inner.append(torch.cuda.current_device()), "inner").join(timeout=10)

    threads.start(outer, "outer").join(timeout=10)
    assert inner == [6]


def test_workers_and_lanes_set_their_device(settled: dict[str, int]) -> None:
    worker, lanes, lane = SerialWorker("worker"), ThreadLanes(), Lane("lane", torch.device("cpu"))
    worker.put(lambda: None)
    worker.drain()
    lanes.down.copy(torch.zeros(1), torch.ones(1)).wait()
    lanes.up.copy(torch.zeros(1), torch.ones(1)).wait()
    lane.submit(lambda: None).wait()
    for one in (worker, lanes, lane):
        one.close()
    assert settled == dict.fromkeys(("worker", "partool-down", "partool-up", "lane"), DEVICE)


def test_without_cuda_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _index: pytest.fail("there is no device to set"))
    threads.start(lambda: None, "plain").join(timeout=10)


def test_the_runtime_starts_threads_in_one_place() -> None:
    """The agent, which has no torch, starts its own, and so does the measurement of disks, which uses no device."""
    own = re.compile(r"threading\.Thread\(|ThreadPoolExecutor\(|_thread\.start_new_thread")
    found = {
        str(path.relative_to(RUNTIME))
        for path in RUNTIME.rglob("*.py")
        if path.parts[len(RUNTIME.parts)] != "agent" and own.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"calibrate/storage.py", "threads.py"}
