"""One rank of a measurement: ``python _tensor_rank.py JOB RESULT``, with torch's RANK, WORLD_SIZE, MASTER_* set.

All cases are set up first and then run in turn, round after round, so that a disturbance of the machine meets all of
them. A step is a whole one: forward, backward, gradient norm, clipping, AdamW. It starts on all ranks together.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from _tensor_job import Case, Job

from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.mesh import lay_mesh
from partool_runtime.optim.adamw import AdamW
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import prepare
from partool_runtime.stepping import Stepper
from partool_runtime.weights import fill, post_load

Step = Callable[[int, Sequence[MicroBatch]], float]
"""Makes a step with the micro-batches of this rank; returns the mean loss."""


def partool_step(plan: Plan) -> Step:
    """Return the trainer's own step."""
    ranks = lay_mesh(plan, torch.device("cpu"))
    prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
    model = prepared.model
    optimizer = AdamW(trained_parameters(model), plan.optimizer, model.copies)
    scaler = LossScaler(enabled=False)
    stepper = Stepper(
        prepared.passes,
        optimizer,
        scaler,
        ranks=ranks,
        training=plan.training,
        spec=plan.optimizer,
        kernels=plan.kernels.mode,
    )
    fill(model, plan.weights, seed=plan.training.seed)
    post_load(model)
    return lambda number, batch: stepper.step(number, batch, lambda _: nullcontext()).loss


def step_of(case: Case, job: Job) -> Step:
    """Set a case up."""
    if case.engine == "partool":
        return partool_step(job.case_plan(case))
    plan = Plan.from_json(job.plan)
    if case.engine == "dtensor":
        from _tensor_dtensor import dtensor_step

        return dtensor_step(plan, sequence=bool(case.layout.get("sequence_norms")))
    from _tensor_deepspeed import deepspeed_step

    return deepspeed_step(plan, job.hf, overlap=case.layout.get("tensor_overlap") == "backward")


def batches(plan: Plan, seed: int) -> list[MicroBatch]:
    """Return a step's micro-batches of random tokens, the same on every rank: they all share their data."""
    drawn = torch.Generator().manual_seed(seed)
    shape = (plan.layout.micro_batch, plan.training.sequence_length)
    found = []
    for _ in range(plan.layout.accumulation):
        tokens_BS = torch.randint(plan.model.vocab, shape, generator=drawn)
        labels_BS = torch.randint(plan.model.vocab, shape, generator=drawn)
        found.append(MicroBatch(tokens_BS, labels_BS))
    return found


def main(job_path: str, result_path: str) -> None:
    """Run a job and write what this rank has seen."""
    torch.set_num_threads(1)
    job = Job.read(Path(job_path))
    if job.extra_path:
        sys.path.append(job.extra_path)
    dist.init_process_group("gloo")
    plan = Plan.from_json(job.plan)
    steps = [step_of(case, job) for case in job.cases]
    losses: list[list[float]] = [[] for _ in steps]
    for number in range(max(1, job.losses)):  # the first step allocates, and sockets connect
        for step, found in zip(steps, losses, strict=True):
            found.append(step(number, batches(plan, number)))
    times: list[list[float]] = [[] for _ in steps]
    batch = batches(plan, 0)
    for turn in range(job.rounds if not job.losses else 0):
        order = range(len(steps)) if turn % 2 == 0 else reversed(range(len(steps)))
        for at in order:
            for _ in range(job.steps):
                dist.barrier()
                start_s = time.perf_counter()
                steps[at](1 + turn, batch)
                dist.barrier()
                times[at].append(time.perf_counter() - start_s)
    Path(result_path).write_text(json.dumps({"step_s": times, "losses": losses}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
