"""Shards of parameters in a file: steps and evaluations take turns, and writes never meet reads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from partool.plan.types import HostWork
from partool_runtime.offload.disk.file import Block
from partool_runtime.offload.lanes import ThreadLanes
from partool_runtime.offload.shelves import DiskShelf

SIZES_BYTES = [9000, *[4096] * 5]
"""A root, which is fetched first and not again, and layers: more units than are held in memory."""
STEP = [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1]
EVALUATION = [0, 1, 2, 3, 4, 5]
pytestmark = pytest.mark.timeout(60)


def test_an_evaluation_between_steps_is_not_expected_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = ThreadLanes()
    shelf = DiskShelf(SIZES_BYTES, HostWork(folder=str(tmp_path), buffers=3), lanes, owner="rank 0")

    def fetch(units: Iterable[int], expected: int) -> None:
        for unit in units:
            into = torch.empty(SIZES_BYTES[unit], dtype=torch.uint8)
            shelf.fetch(unit, into, None).wait()
            assert into.eq(expected).all()

    def write(value: int) -> None:
        for home in shelf.homes:
            home.fill_(value)
        shelf.written()

    read = shelf._store._file.read

    def slowly(block: Block, into: memoryview) -> None:
        time.sleep(0.3 if block.place == 0 else 0.0)
        read(block, into)

    try:
        write(1)
        for value in (1, 2):
            shelf.begin()
            fetch(STEP, value)
            shelf.settle()
            write(value + 1)
            fetch(EVALUATION, value + 1)
            # From here on a read of the root that nobody waits for is under way when the next weights are written.
            monkeypatch.setattr(shelf._store._file, "read", slowly)
    finally:
        shelf.close()
        lanes.close()


def test_the_order_of_a_step_outlasts_what_is_fetched_between_steps(tmp_path: Path) -> None:
    lanes = ThreadLanes()
    shelf = DiskShelf(SIZES_BYTES, HostWork(folder=str(tmp_path), buffers=3), lanes, owner="rank 0")
    asked: list[list[int]] = []
    expect = shelf._store.expect
    shelf._store.expect = lambda order: (asked.append(list(order)), expect(order))[1]  # type: ignore[method-assign]
    try:
        shelf.written()
        for units in (STEP, STEP):
            shelf.begin()
            for unit in units:
                shelf.fetch(unit, torch.empty(SIZES_BYTES[unit], dtype=torch.uint8), None).wait()
            shelf.settle()
            for unit in EVALUATION:
                shelf.fetch(unit, torch.empty(SIZES_BYTES[unit], dtype=torch.uint8), None).wait()
        assert asked == [[], [], [], STEP, []]  # the first step's: nothing known, not as known, ended
    finally:
        shelf.close()
        lanes.close()
