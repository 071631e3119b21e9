"""One rank of a measurement: ``python _tensor_rank.py JOB RESULT``, with torch's RANK, WORLD_SIZE, MASTER_* set.

All cases are set up first and then run in turn, round after round, so that a disturbance of the machine affects all
of them. A step is complete: forward, backward, gradient norm, clipping, AdamW. It starts on all ranks together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from _tensor_job import Case, Job

from partool.plan.types import Plan
from partool_runtime.data.batches import MicroBatch
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import Decoder
from partool_runtime.optim.device import DeviceOptimizer
from partool_runtime.parallel import apply
from partool_runtime.parallel.tensor.apply import layer_sharding, make_team
from partool_runtime.parallel.tensor.sharding import Sharding, apply_sharding
from partool_runtime.parallel.tensor.vocabulary import VocabularyLoss, VocabularyRows
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import prepare
from partool_runtime.weights import fill, post_load

Step = Callable[[int, Sequence[MicroBatch]], float]
"""Function that makes a step with the micro-batches of this rank and returns the mean loss."""


def device_of(plan: Plan) -> torch.device:
    """Return this rank's device."""
    if plan.devices.backend == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def partool_step(plan: Plan, *, hooked: bool = False) -> Step:
    """Return the trainer's own step; ``hooked`` inserts the exchanges of tensor ranks even for one rank."""
    ranks = build_ranks(plan, device_of(plan))
    with exchanges_of_one() if hooked else nullcontext():
        prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
    model = prepared.model
    optimizer = DeviceOptimizer(trained_parameters(model), plan.optimizer, model.copies)
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


@contextmanager
def exchanges_of_one() -> Iterator[None]:
    """Make models prepared in this context exchange with a group of one rank, which the trainer never does."""
    own = apply.apply_tensor

    def hook(model: Decoder, plan: Plan, ranks: Ranks) -> None:
        team = make_team(plan, ranks)
        layer = layer_sharding(team)
        apply_sharding(model, Sharding(lambda _: layer, VocabularyRows(team, 0), None, VocabularyLoss(team, 0)))

    apply.apply_tensor = hook
    try:
        yield
    finally:
        apply.apply_tensor = own


def step_of(case: Case, job: Job) -> Step:
    """Set up a case."""
    if case.engine in ("partool", "hooked"):
        return partool_step(job.case_plan(case), hooked=case.engine == "hooked")
    plan = Plan.from_json(job.plan)
    if case.engine == "dtensor":
        from _tensor_dtensor import dtensor_step

        return dtensor_step(plan, sequence=bool(case.layout.get("sequence_norms")))
    from _tensor_deepspeed import deepspeed_step

    return deepspeed_step(plan, job.hf, overlap=case.layout.get("tensor_overlap") == "backward")


def batches(plan: Plan, seed: int) -> list[MicroBatch]:
    """Return a step's micro-batches of random tokens, the same on every rank, as all ranks share their data."""
    drawn = torch.Generator().manual_seed(seed)
    shape = (plan.layout.micro_batch, plan.training.sequence_length)
    found = []
    for _ in range(plan.layout.derived.accumulation):
        tokens_BS = torch.randint(plan.model.vocab, shape, generator=drawn)
        labels_BS = torch.randint(plan.model.vocab, shape, generator=drawn)
        found.append(MicroBatch(tokens_BS, labels_BS))
    return found


def _timed_s(step: Step, number: int, batch: Sequence[MicroBatch]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    step(number, batch)  # reading the loss waits for the device
    dist.barrier()
    return time.perf_counter() - start_s


def main(job_path: str, result_path: str) -> None:
    """Run a job and write this rank's record."""
    torch.set_num_threads(1)
    job = Job.read(Path(job_path))
    if job.extra_path:
        sys.path.append(job.extra_path)
    plan = Plan.from_json(job.plan)
    device = device_of(plan)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
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
                times[at].append(_timed_s(steps[at], 1 + turn, batch))
    Path(result_path).write_text(json.dumps({"step_s": times, "losses": losses}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
