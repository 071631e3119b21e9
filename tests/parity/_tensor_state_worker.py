"""Ranks of test_tensor_state.py: runs of the trainer, each on some of the ranks, and checkpoints of every layout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _forks import run_forked
from _trainer_worker import StopAt

from partool.plan.types import Plan
from partool_runtime.checkpoint import Checkpointer
from partool_runtime.mesh import close_ranks, open_ranks
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.pieces import Placed, TensorBlock, Value, pieces
from partool_runtime.preparation import prepare
from partool_runtime.saving import state_of
from partool_runtime.trainer import train


def values(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """Return what a checkpoint holds under a name: other bits for every step, name and element."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def blocks(state: dict[str, Value]) -> Iterator[tuple[str, tuple[int, ...], TensorBlock]]:
    """Yield (name, whole shape, block of it) of everything that this rank holds."""
    for name, value in state.items():
        for piece in value.pieces() if isinstance(value, Placed) else pieces(value, None):
            yield name, tuple(value.shape), piece


def of_whole(name: str, shape: tuple[int, ...], piece: TensorBlock, step: int) -> torch.Tensor:
    place = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))
    return values(name, shape, step)[place]


def save_and_load(plan: Plan, job: dict[str, Any], folder: Path) -> None:
    """Save the layout's state as a step, and load the steps that others saved; all bits are those of the whole."""
    ranks = open_ranks(plan)
    model = prepare(plan, ranks, lambda done, sent: None).model
    state = state_of(model, DeviceOptimizer(trained_parameters(model), plan.optimizer, model.copies))
    place = {"rank": ranks.rank, "world_size": ranks.world_size}
    checkpointer = Checkpointer(folder / "crossed", keep=99, mode=job["mode"], timeout_s=60, **place)
    if job["save"]:
        for name, shape, piece in blocks(state):
            piece.tensor.copy_(of_whole(name, shape, piece, job["save"]))
        checkpointer.save(job["save"], state, {"layout": job["run"]})
        for _, _, piece in blocks(state):
            piece.tensor.fill_(-1.0)  # training goes on
    for step in job["load"]:
        for _, _, piece in blocks(state):
            piece.tensor.fill_(99.0)
        checkpointer.load(step, state)
        for name, shape, piece in blocks(state):
            assert torch.equal(piece.tensor, of_whole(name, shape, piece, step)), (job["run"], step, name)
    checkpointer.close()
    close_ranks()


def run(plan: Plan, job: dict[str, Any], folder: Path) -> str:
    try:
        train(plan, folder / job["run"], job["resume"], StopAt(job["stop_at"]))
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
        if "Preempted" not in ended:
            raise
        return ended
    return "done"


def main(jobs: str) -> int:
    """Do one job after the other; each has ranks of its own: torch keeps meshes for as long as a process lives."""
    folder = Path(jobs).parent
    for name, job in json.loads(Path(jobs).read_text()).items():
        plan = Plan.model_validate_json(json.dumps(job["plan"]))
        if run_forked(plan.layout.mesh.world_size, partial(do, plan, job, folder, name)):
            return 1
    return 0


def do(plan: Plan, job: dict[str, Any], folder: Path, name: str) -> None:
    if "load" in job:
        save_and_load(plan, job, folder)
    else:
        (folder / f"{name}.rank-{os.environ['RANK']}.txt").write_text(run(plan, job, folder))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
