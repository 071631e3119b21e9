"""Runs of the trainer on ranks of a pool (:class:`_jobs.Jobs`): each opens and closes a process group of its own."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from _ranks import forget_meshes

from partool.plan.types import Plan
from partool_runtime.data import MicroBatch
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.jobs.train.trainer import train
from partool_runtime.mesh import close_ranks
from partool_runtime.stop import StopRequest


class StopAt(StopRequest):
    """A request to stop that reaches only the last rank, after a given step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._at = step

    def agree(self, step: int) -> bool:
        self._signal_if(step == self._at)
        return super().agree(step)

    def heard(self, flags: Sequence[float], step: int) -> bool:
        stopping = super().heard(flags, step)
        self._signal_if(step == self._at - 1)
        return stopping

    def signalled(self) -> None:
        """Request a stop on this rank."""
        self._signal = signal.SIGTERM

    def _signal_if(self, now: bool) -> None:
        if now and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            self.signalled()


def train_plan(plan_json: str, run_dir: Path, resume: bool, stop_at: int | StopAt) -> str:
    """Train as one rank; return ``done``, or the exception that ended the run."""
    stop = StopAt(stop_at) if isinstance(stop_at, int) else stop_at
    torch.use_deterministic_algorithms(True)  # new memory holds NaN, which no loss may reach
    forget_meshes()
    try:
        train(Plan.model_validate_json(plan_json), run_dir, resume, stop)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
        if "Preempted" not in ended:
            close_ranks()
        return ended
    return "done"


def train_and_note(plan_json: str, run_dir: Path, resume: bool, stop_at: int) -> str:
    """Train as one rank, and note the sequences of every step beside the run."""
    name = f"seen-{os.environ['WORLD_SIZE']}.rank-{os.environ['RANK']}.jsonl"
    with _noted(run_dir.parent / name):
        return train_plan(plan_json, run_dir, resume, stop_at)


def train_and_die(plan_json: str, run_dir: Path) -> None:
    """Train as one rank, which is killed without a warning soon after its second checkpoint."""
    threading.Thread(target=_die_after_two_checkpoints, args=(run_dir / "checkpoints",), daemon=True).start()
    train_plan(plan_json, run_dir, False, -1)


def _die_after_two_checkpoints(checkpoints: Path) -> None:
    while not any(checkpoints.glob("step-*[4-9]")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _noted(path: Path) -> Iterator[None]:
    step_of_trainer = Stepper.step

    def step(self: Stepper, number: int, batch: list[MicroBatch], *rest: object) -> object:
        rows = [row for micro in batch for row in micro.tokens_BS.tolist()]
        with path.open("a") as file:
            file.write(json.dumps([number, rows]) + "\n")
        return step_of_trainer(self, number, batch, *rest)

    Stepper.step = step
    try:
        yield
    finally:
        Stepper.step = step_of_trainer
