"""One rank of a measurement: ``python _pipeline_rank.py JOB RESULT``, with torch's RANK, WORLD_SIZE, MASTER_* set.

All cases are set up first and then run in turn, round after round, so that a disturbance of the machine affects all
of them. A step starts on all ranks at an agreed time of the machine's clock and ends when its last rank is through.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _pipeline_cases import Case, Job
from _pipeline_model import RealStage, TimedRing, TimedStage
from _pipeline_net import sent_bytes
from _pipeline_peer import TorchPipeline
from torch import nn

from partool.schedule import Schedule
from partool_runtime.groups import Groups
from partool_runtime.parallel.pipeline.engine import PipelineEngine
from partool_runtime.parallel.pipeline.types import Boundary, Done
from partool_runtime.parallel.pipeline.wires import Wires, open_lines
from partool_runtime.parallel.weipipe.passes import WeiPipePasses
from partool_runtime.parallel.weipipe.ring import open_ring

START_IN_S = 0.004
"""Seconds between the agreement on a start time and the start."""


class Runner:
    """A case on this rank: its step, and the actions that its executor recorded."""

    def __init__(self, case: Case, job: Job, step: Callable[[], object], modules: list[nn.Module]) -> None:
        self.case, self.job, self._step, self._modules = case, job, step, modules
        self.done: list[Any] = []
        self.steps: list[dict[str, Any]] = []

    def step(self) -> None:
        """Run one step with the others and note when it ended."""
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        self.done.clear()
        sent = sent_bytes() if self.job.shaped else 0
        start = _start_together()
        self._step()
        stop = time.perf_counter()
        dist.barrier()  # the last messages may still be in flight
        found: dict[str, Any] = {"start_s": start, "stop_s": stop}
        if self.job.shaped:
            found["sent_bytes"] = sent_bytes() - sent
        if self.done:
            found["done"] = [(*done.action, done.start_s - start, done.stop_s - start) for done in self.done]
        self.steps.append(found)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the last step left."""
        return [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for module in self._modules
            for parameter in module.parameters()
        ]


def _start_together() -> float:
    """Wait for the other ranks; return the time on the machine's clock at which all of them start."""
    dist.barrier()
    start = torch.tensor([time.perf_counter() + START_IN_S], dtype=torch.float64)
    dist.broadcast(start, 0)
    left = float(start) - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return float(start)


def stages_of(case: Case, job: Job, schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    """Return this rank's stages."""
    mine = schedule.on_rank(rank)
    if job.real:
        dtype = torch.float64 if job.double else torch.float32
        return {stage: RealStage(job.shape, stage, schedule.stages, dtype) for stage in mine}
    waits, elements = case.waits, case.elements
    return {stage: TimedStage(job.shape, stage, schedule.stages, waits[stage], elements) for stage in mine}


class Setting:
    """Resources shared by a job's cases: micro-batches, and process groups, each of which costs threads and sockets."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank, self.world = job, dist.get_rank(), dist.get_world_size()
        self._peer_group = dist.new_group()
        self._groups = open_lines(Groups(), (tuple(range(self.world)),))

    def runner(self, case: Case) -> Runner:
        """Set up a case."""
        schedule, shape = case.schedule(self.world), self.job.shape
        if schedule.moves == "weights":
            return self._ring(case, schedule)
        stages = stages_of(case, self.job, schedule, self.rank)
        dtype = torch.float64 if self.job.double else torch.float32
        batch, weight = shape.micro_batches(case.micro_batches), torch.tensor(1 / case.micro_batches, dtype=dtype)
        size = (shape.batch, shape.length, shape.hidden)
        executor: TorchPipeline | PipelineEngine
        if case.engine == "torch":
            executor = TorchPipeline(schedule, stages, torch.zeros(size, dtype=dtype), self._peer_group)
        else:
            boundary = Boundary(size, dtype, torch.device("cpu"))
            wires = Wires(self.rank, self._groups, boundary)
            executor = PipelineEngine(schedule, stages, wires)
        runner = Runner(case, self.job, lambda: executor.step(batch, weight), list(stages.values()))
        if isinstance(executor, PipelineEngine):
            executor.watch = runner.done.append
        return runner

    def _ring(self, case: Case, schedule: Schedule) -> Runner:
        model = TimedRing(self.job.shape, case.waits, case.elements)
        batch, weight = self.job.shape.micro_batches(case.micro_batches), torch.tensor(1 / case.micro_batches)
        done: list[Done] = []
        ring = open_ring(Groups(), (tuple(range(self.world)),))
        passes = WeiPipePasses(schedule, model, ring, torch.float32, watch=done.append)
        modules = [model.first, *model.stages, model.last]
        runner = Runner(case, self.job, lambda: passes.step(batch, weight, lambda _: nullcontext()), modules)
        runner.done = done
        return runner


def one_way_s(nbytes: int, rounds: int = 15) -> float:
    """Return the seconds of one message from rank 0 to rank 1, half of a round trip, as a median."""
    x, rank = torch.zeros(nbytes // 4), dist.get_rank()
    taken = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
            dist.send(x, 0)
        taken.append((time.perf_counter() - start) / 2)
    return statistics.median(taken)


def main(job_path: str, result_path: str) -> None:
    """Run a job and write this rank's record."""
    torch.set_num_threads(1)
    job = Job.read(Path(job_path))
    dist.init_process_group("gloo")
    setting = Setting(job)
    runners = [setting.runner(case) for case in job.cases]
    for runner in runners:  # sockets connect and buffers are allocated here
        runner.step()
    gradients = [runner.gradients() for runner in runners] if job.compare else []
    if not job.compare:
        for runner in runners:
            runner.steps.clear()
        for turn in range(job.rounds):
            for runner in runners if turn % 2 == 0 else reversed(runners):
                for _ in range(job.steps):
                    runner.step()
    result = {
        "one_way_s": one_way_s(job.shape.boundary_bytes),
        "steps": [runner.steps for runner in runners],
        "apart": [_apart(runners, gradients, at) for at in range(len(gradients))],
        "largest": [max(float(gradient.abs().max()) for gradient in found) for found in gradients],
    }
    dist.barrier()
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def _apart(runners: list[Runner], gradients: list[list[torch.Tensor]], at: int) -> float:
    """Return the relative difference of a case's gradients from those of the first case with the same stages."""
    schedule = runners[at].case.same_stages
    first = next(other for other, runner in enumerate(runners) if runner.case.same_stages == schedule)
    pairs = zip(gradients[at], gradients[first], strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


if __name__ == "__main__":
    main(*sys.argv[1:])
