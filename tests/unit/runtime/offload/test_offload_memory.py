"""Host memory has one owner, which counts it by purpose and enforces its limit."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from partool_runtime.errors import ConfigurationError
from partool_runtime.offload import HostMemory
from partool_runtime.offload.memory import PAGE_BYTES


def test_memory_begins_at_pages_and_overlaps_no_other() -> None:
    memory = HostMemory(pinned=False)
    taken = [memory.take(size, "gradients") for size in (1, PAGE_BYTES, 5 * PAGE_BYTES + 3, 0)]
    for number, part in enumerate(taken):
        part.fill_(number + 1)
    assert [part.data_ptr() % PAGE_BYTES for part in taken if len(part)] == [0, 0, 0]
    assert all(bool((part == number + 1).all()) for number, part in enumerate(taken))
    assert [len(part) for part in taken] == [1, PAGE_BYTES, 5 * PAGE_BYTES + 3, 0]


def test_it_is_counted_by_purpose() -> None:
    memory = HostMemory(pinned=False)
    memory.take(100, "gradients")
    weights = memory.tensor(7, torch.bfloat16, "weights")
    memory.take(11, "gradients")
    assert (weights.dtype, weights.shape) == (torch.bfloat16, (7,))
    assert memory.purposes == {"gradients": 111, "weights": 14}
    assert memory.held_bytes == 125
    memory.close()
    assert memory.held_bytes == 0


def test_the_limit_holds_to_the_byte() -> None:
    memory = HostMemory(pinned=False, limit_bytes=100)
    memory.take(60, "gradients")
    with pytest.raises(ConfigurationError, match="PT675") as caught:
        memory.take(41, "activations")
    assert "activations" in caught.value.message
    assert "gradients" in caught.value.message  # the purpose that holds the rest
    assert "pinned_gib" in caught.value.help
    assert memory.purposes == {"gradients": 60}
    memory.take(40, "activations")


def test_what_is_taken_late_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(pinned=False)
    memory.take(10, "gradients")
    assert memory.late_bytes == 0
    memory.freeze()
    with caplog.at_level(logging.WARNING):
        memory.take(20, "activations")
        memory.take(30, "activations")
    assert memory.late_bytes == 50
    assert len(caplog.records) == 1
    assert "activations" in caplog.text


def test_a_system_that_refuses_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    memory = HostMemory(pinned=False)
    memory.take(10, "weights")
    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigurationError, match="PT676") as caught:
        memory.take(2**30, "gradients")
    assert "1 GiB" in caught.value.message
    assert memory.purposes == {"weights": 10}


class Pinning:
    """Stand-in for the library that pins existing memory."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 - its name
        assert (address % PAGE_BYTES, flags) == (0, 0)
        self.pinned[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - its name
        del self.pinned[address]
        return 0


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Pinning:
    library = Pinning()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return library


def test_odd_sizes_are_pinned_in_place_and_let_go_before_they_are_freed(pinning: Pinning) -> None:
    memory = HostMemory(pinned=True)
    size_bytes = 5 * PAGE_BYTES  # a power of two would be 8 pages
    parts = [memory.take(size_bytes, "parameters") for _ in range(2)]
    assert pinning.pinned == {part.data_ptr(): size_bytes for part in parts}
    memory.close()
    assert pinning.pinned == {}
    kept = HostMemory(pinned=True)
    kept.take(size_bytes, "parameters")
    del kept
    assert pinning.pinned == {}


def test_what_is_taken_late_is_not_pinned(pinning: Pinning) -> None:
    """Pinning synchronises with the device, which may be waiting for another rank by then."""
    memory = HostMemory(pinned=True)
    memory.freeze()
    memory.take(5 * PAGE_BYTES, "activations")
    assert pinning.pinned == {}


def test_several_threads_take(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(pinned=False, limit_bytes=8 * 50 * 3)

    def take() -> None:
        for _ in range(50):
            memory.take(3, "gradients")

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.held_bytes == 8 * 50 * 3
