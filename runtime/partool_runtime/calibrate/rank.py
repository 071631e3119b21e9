"""The process of one calibration rank, which :mod:`partool_runtime.calibrate.__main__` starts."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from partool_runtime.agent.lifeline import end_with_parent
from partool_runtime.calibrate.clock import Timing
from partool_runtime.calibrate.fit import summary
from partool_runtime.calibrate.items import CPU_SIZES, GPU_SIZES, Item, items


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
        "work_unit": item.work_unit, "elements": item.elements, "length": item.length, "seconds": median,
        "mad_s": mad, "n": n,
    }  # fmt: skip


def _write(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
