"""Ranks of test_trainer.py: runs the trainer several times in one process and notes how each run ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from partool.plan.types import Plan
from partool_runtime.mesh import close_ranks
from partool_runtime.stop import StopRequest
from partool_runtime.trainer import train


class StopAt(StopRequest):
    """A request that reaches the last rank only, after some step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._at = step

    def agree(self, step: int) -> bool:
        if step == self._at and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            self._signal = signal.SIGTERM
        return super().agree(step)


def agreed_port(file: Path) -> str:
    """Return a port that is free now, chosen by rank 0: one chosen for a job long ahead may be taken by then."""
    if os.environ["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            written = file.with_suffix(".new")
            written.write_text(str(probe.getsockname()[1]))
        written.rename(file)
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def main(jobs: str) -> None:
    torch.use_deterministic_algorithms(True)  # new memory holds NaN, which no loss may reach
    folder = Path(jobs).parent
    for name, job in json.loads(Path(jobs).read_text()).items():
        _clear_sharding_prop_cache()  # it holds meshes whose groups the job before has left
        os.environ["MASTER_PORT"] = agreed_port(folder / f"{name}.port")
        plan = Plan.model_validate_json(json.dumps(job["plan"]))
        try:
            train(plan, folder / job["run"], job["resume"], StopAt(job["stop_at"]))
            ended = "done"
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
        (folder / f"{name}.rank-{os.environ['RANK']}.txt").write_text(ended)
        if ended != "done" and "Preempted" not in ended:
            close_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
