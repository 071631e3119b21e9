"""The process of one calibration rank, which :mod:`partool_runtime.calibrate.__main__` starts."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from partool_runtime.agent.lifeline import end_with_parent
from partool_runtime.calibrate.fit import summary
from partool_runtime.calibrate.items import CPU_SIZES, GPU_SIZES, Item, Work, items

_MOST = 200
_LEAST = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Device, ranks and duration of the measurements."""

    device: torch.device
    world: int
    seconds: float
    """Target duration of the measurement of an item, in seconds."""

    def samples(self, item: Item) -> list[float]:
        """Return the seconds of every repeat of ``item`` on every rank; all ranks must call this with equal items.

        All ranks start together and make the same number of repeats, so that all work at the same time.
        """
        work = item.prepare()
        cuda = self.device.type == "cuda" and not item.host_clock
        once = max(self._times(work, 2, cuda=cuda)[1:])  # the first call allocates memory and chooses kernels
        repeats = self._agree(min(_MOST, max(_LEAST, int(self.seconds / max(once, 1e-9)))))
        local_s = self._times(work, repeats, cuda=cuda)
        if self.world == 1:
            return local_s
        gathered = [torch.zeros(repeats, dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(gathered, torch.tensor(local_s, dtype=torch.float64))
        if item.kind == "collective":  # a collective is done when its last rank is
            return [float(value) for value in torch.stack(gathered).amax(0)]
        return [float(value) for value in torch.cat(gathered)]

    def _agree(self, repeats: int) -> int:
        """Return the smallest value of ``repeats`` over all ranks; the call also synchronises the ranks."""
        if self.world == 1:
            return repeats
        count = torch.tensor([repeats])
        dist.all_reduce(count, dist.ReduceOp.MIN)
        return int(count.item())

    def _times(self, work: Work, repeats: int, *, cuda: bool) -> list[float]:
        if not cuda:
            marks = [time.perf_counter()]
            for _ in range(repeats):
                work()
                marks.append(time.perf_counter())
            return [after - before for before, after in itertools.pairwise(marks)]
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def main() -> None:
    """Measure every item; rank 0 writes a line that describes the device, then one line for each measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent(arguments.parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{arguments.store}", rank=rank, world_size=world, timeout=timedelta(minutes=5)
    )
    torch.manual_seed(rank)
    work = items((GPU_SIZES if cuda else CPU_SIZES)[arguments.sizes], device, world)
    if rank == 0:
        _write({"machine": _machine(device), "items": len(work)})
    timing = Timing(device, world, arguments.seconds)
    for item in work:
        measured = timing.samples(item)
        if rank == 0:
            _write(_measurement(item, measured))
    dist.destroy_process_group()


def _machine(device: torch.device) -> dict[str, object]:
    cuda = device.type == "cuda"
    return {
        "backend": "cpu" if not cuda else "rocm" if torch.version.hip else "cuda",
        "device_name": torch.cuda.get_device_name(device) if cuda else "",
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _measurement(item: Item, measured: list[float]) -> dict[str, object]:
    n, median, mad = summary(measured)
    return {
        "kind": item.kind, "name": item.name, "precision": item.precision, "work": item.work,
        "work_unit": item.work_unit, "elements": item.elements, "length": item.length, "sides": item.sides,
        "seconds": median, "mad_s": mad, "n": n,
    }  # fmt: skip


def _write(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
