"""Shards of parameters in a file: steps and evaluations take turns, and writes never meet reads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partool.plan.layout import OffloadLayout
from partool.spec.training import OptimizerSpec
from partool_kernels.host import Pool
from partool_runtime.offload import HostMemory
from partool_runtime.offload.disk.file import FileBlock
from partool_runtime.offload.lanes import ThreadLanes
from partool_runtime.offload.optimizer import HostOptimizer, HostSetting
from partool_runtime.offload.shards import DiskShardStore

SIZES_BYTES = [9000, *[4096] * 5]
"""Root unit, which is fetched once at the start, and layers: more units than fit in memory."""
STEP = [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1]
EVALUATION = [0, 1, 2, 3, 4, 5]
pytestmark = pytest.mark.timeout(60)


def test_an_evaluation_between_steps_is_not_expected_of_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = ThreadLanes()
    shards = DiskShardStore(SIZES_BYTES, OffloadLayout(dir=str(tmp_path), buffers=3), lanes, owner="rank 0")

    def fetch(units: Iterable[int], expected: int) -> None:
        for unit in units:
            into = torch.empty(SIZES_BYTES[unit], dtype=torch.uint8)
            shards.fetch(unit, into, None).wait()
            assert into.eq(expected).all()

    def write(value: int) -> None:
        for home in shards.homes:
            home.fill_(value)
        shards.written()

    read = shards._store._file.read

    def slowly(block: FileBlock, into: memoryview) -> None:
        time.sleep(0.3 if block.place == 0 else 0.0)
        read(block, into)

    try:
        write(1)
        for value in (1, 2):
            shards.begin()
            fetch(STEP, value)
            shards.settle()
            write(value + 1)
            fetch(EVALUATION, value + 1)
            # From here on a prefetch of the root is still in flight when the next weights are written.
            monkeypatch.setattr(shards._store._file, "read", slowly)
    finally:
        shards.close()
        lanes.close()


def test_the_order_of_a_step_outlasts_what_is_fetched_between_steps(tmp_path: Path) -> None:
    lanes = ThreadLanes()
    shards = DiskShardStore(SIZES_BYTES, OffloadLayout(dir=str(tmp_path), buffers=3), lanes, owner="rank 0")
    asked: list[list[int]] = []
    expect = shards._store.expect
    shards._store.expect = lambda order: (asked.append(list(order)), expect(order))[1]  # type: ignore[method-assign]
    try:
        shards.written()
        for units in (STEP, STEP):
            shards.begin()
            for unit in units:
                shards.fetch(unit, torch.empty(SIZES_BYTES[unit], dtype=torch.uint8), None).wait()
            shards.settle()
            for unit in EVALUATION:
                shards.fetch(unit, torch.empty(SIZES_BYTES[unit], dtype=torch.uint8), None).wait()
        assert asked == [[], [], [], STEP, []]  # first step: order unknown, order broken, step ended
    finally:
        shards.close()
        lanes.close()


class Record:
    """Shards without storage that record the calls made to them."""

    notes = ()

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


@pytest.mark.parametrize("ending", ["begin", "save"])
def test_an_interrupted_step_is_given_up_while_nothing_reads_shards(ending: str) -> None:
    shards: Any = Record()
    setting = HostSetting(
        OffloadLayout(optimizer="cpu", gpu_fraction=0.0, speculate=True, threads=1),
        torch.device("cpu"),
        torch.float32,
        torch.bfloat16,
        accumulates=False,
        memory=HostMemory(pinned=False),
        pool=Pool(1),
        shards=shards,
    )
    weights = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    optimizer = HostOptimizer({"w": weights}, OptimizerSpec(), (), setting)
    abandon = optimizer._engine._abandon
    optimizer._engine._abandon = lambda: (shards.calls.append("writes"), abandon())[1]  # type: ignore[method-assign]
    try:
        optimizer.loaded()
        optimizer.begin(1e-3, 1.0)
        optimizer.arrive("w", torch.ones(5, dtype=torch.bfloat16))
        shards.calls.clear()
        if ending == "save":
            optimizer.settle()
        optimizer.begin(1e-3, 1.0)
        assert shards.calls == ["settle", "writes", "written", "begin"]
        assert weights.eq(0).all()
    finally:
        optimizer.close()
