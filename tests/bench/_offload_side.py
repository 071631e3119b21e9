"""One side of a benchmark of offload, in a process of its own: ``python _offload_side.py JOB``.

It reads requests from standard input, a line of JSON each, and answers on standard output the same way. Sides can thus
run at the same time and make their steps in turn, so that a disturbance of the machine affects all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from _offload_job import Job, Steps

from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.jobs.process import configure_process
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import close_ranks, open_ranks
from partool_runtime.offload.install import open_optimizer
from partool_runtime.offload.optimizer import HostOptimizer
from partool_runtime.optim.types import Optimizer
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import prepare
from partool_runtime.torch_internals.tensors import local
from partool_runtime.weights import fill, post_load


class Side(Protocol):
    """One side of the benchmark, which makes optimizer steps."""

    device: torch.device

    def step(self, number: int, batch: Sequence[MicroBatch], clip: float) -> tuple[float, float]:
        """Make a step; return its mean loss and the norm of its gradients before clipping."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return up-to-date compute weights, masters and moments."""

    def figures(self) -> dict[str, Any]:
        """Return the side's own counters."""

    def held_bytes(self) -> dict[str, int]:
        """Return the host memory that the side reports, by term; empty if it does not report any."""


class Partool:
    """The trainer's own step, with the optimizer where its plan places it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        configure_process(plan)
        self._ranks = open_ranks(plan)
        self.device = self._ranks.device
        self._prepared = prepare(plan, self._ranks, lambda done, sent_bytes: None)
        self._model = self._prepared.model
        self._optimizer: Optimizer = open_optimizer(plan, self._prepared, self._ranks)
        fill(self._model, plan.weights, seed=plan.training.seed, masters=self._optimizer.masters())
        self._optimizer.loaded()
        post_load(self._model)
        self._steppers: dict[float, Stepper] = {}

    def step(self, number: int, batch: Sequence[MicroBatch], clip: float) -> tuple[float, float]:
        """See :class:`Side`."""
        if clip not in self._steppers:
            self._steppers[clip] = Stepper(
                self._prepared.passes,
                self._optimizer,
                LossScaler(enabled=False),
                ranks=self._ranks,
                training=self._plan.training,
                spec=self._plan.optimizer.model_copy(update={"clip": clip}),
                kernels=self._plan.kernels.mode,
            )
        result = self._steppers[clip].step(number, batch, lambda _: nullcontext())
        return result.loss, result.grad_norm

    def state(self) -> dict[str, torch.Tensor]:
        """See :class:`Side`."""
        self._optimizer.settle()
        found = {f"weight.{name}": local(p.detach()) for name, p in self._model.named_parameters()}
        masters = self._optimizer.masters() or {}
        found |= {f"master.{name}": local(tensor) for name, tensor in masters.items()}
        return found | {name: local(tensor) for name, tensor in self._optimizer.state().items()}

    def figures(self) -> dict[str, Any]:
        """See :class:`Side`."""
        counted = getattr(self._optimizer, "figures", None)
        return {} if counted is None else {name: getattr(counted, name) for name in counted.__slots__}

    def held_bytes(self) -> dict[str, int]:
        """See :class:`Side`."""
        return self._optimizer.held_bytes() if isinstance(self._optimizer, HostOptimizer) else {}


def open_side(job: Job) -> Side:
    """Set a side up."""
    plan = Plan.from_json(job.plan)
    if job.side == "deepspeed":
        from _offload_deepspeed import DeepSpeed

        return DeepSpeed(plan, Path(job.deepspeed), Path(job.built))
    if job.side == "reference":
        from _offload_reference import Reference

        return Reference(plan)
    return Partool(plan)


def batches(plan: Plan, number: int, steps: Steps) -> list[MicroBatch]:
    """Return a step's micro-batches of random tokens, the same on every side."""
    drawn = torch.Generator().manual_seed(number)
    shape = (steps.sequences, steps.tokens + 1)
    every = [torch.randint(plan.model.vocab, shape, generator=drawn) for _ in range(steps.micro_batches)]
    return [MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in every]


def make_steps(side: Side, plan: Plan, steps: Steps) -> dict[str, Any]:
    """Make steps; return their total seconds, from idle to idle, and each step's result."""
    data = [batches(plan, steps.first + index, steps) for index in range(steps.count)]
    _wait(side.device)
    before = side.figures()
    start_s = time.perf_counter()
    found = [side.step(steps.first + index, batch, steps.clip) for index, batch in enumerate(data)]
    _wait(side.device)
    seconds = time.perf_counter() - start_s
    counted = {name: value - before[name] for name, value in side.figures().items()}
    losses, norms = [loss for loss, _ in found], [norm for _, norm in found]
    return {"seconds": seconds, "losses": losses, "norms": norms, "figures": counted}


def digests(side: Side) -> dict[str, str]:
    """Return a digest of every tensor of the state, which changes with any single bit."""
    found = {}
    for name, tensor in side.state().items():
        flat = tensor.contiguous().cpu().reshape(-1)
        # Empty tensors have no bytes to view.
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def usage(side: Side, before_bytes: int) -> dict[str, Any]:
    """Return peaks of device memory, and of process memory beyond its size before set-up."""
    device = torch.cuda.max_memory_allocated() if side.device.type == "cuda" else 0
    host = _peak_bytes() - before_bytes
    return {"device_bytes": device, "host_bytes": host, "held_bytes": side.held_bytes(), "figures": side.figures()}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(path: str) -> None:
    """Answer requests until there are no more."""
    # Output of libraries on standard output must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    job = Job.read(Path(path))
    plan = Plan.from_json(job.plan)
    if plan.devices.backend != "cpu":
        torch.cuda.init()
    before_bytes = _peak_bytes()
    start_s = time.perf_counter()
    side = open_side(job)
    _wait(side.device)
    print(json.dumps({"ready_s": time.perf_counter() - start_s}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "steps":
            answer = make_steps(side, plan, Steps(**request))
        elif what == "digests":
            answer = digests(side)
        else:
            answer = usage(side, before_bytes)
        print(json.dumps(answer), file=answers)
    close_ranks()


if __name__ == "__main__":
    main(sys.argv[1])
