"""A hand-written training loop: FSDP2 around the same decoder, AdamW, clipping, nothing else.

Started by ``overhead.py`` under torch's elastic launcher. Prints the median seconds per step of rank 0 as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from partool.plan.types import Plan
from partool_runtime.model import Decoder

WARMUP_STEPS = 5


def main(plan_path: str) -> None:
    """Train on random tokens with the plan's shapes and report the step time."""
    plan = Plan.from_json(Path(plan_path).read_text(encoding="utf-8"))
    torch.set_num_threads(plan.devices.threads_per_rank or 1)
    device = _device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = bf16 if plan.training.precision == "bf16" else MixedPrecisionPolicy()
    torch.manual_seed(0)
    model = Decoder(plan.model).to(device)
    for layer in model.layers:
        if plan.layout.compile == "block":
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    betas = (plan.optimizer.betas[0], plan.optimizer.betas[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.optimizer.lr, betas=betas, fused=True)
    shape = (plan.layout.micro_batch, plan.training.sequence_length)
    tokens_per_step = plan.training.global_batch * plan.training.sequence_length
    marks = [_mark(device)]
    for _ in range(plan.training.steps):
        for _ in range(plan.layout.derived.accumulation):
            tokens_BS = torch.randint(plan.model.vocab, shape, device=device)
            # FSDP2 averages over ranks, so each rank's loss is multiplied by their number.
            (model(tokens_BS, tokens_BS) * (dist.get_world_size() / tokens_per_step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    times = [_elapsed_s(start, end) for start, end in itertools.pairwise(marks)]
    if dist.get_rank() == 0:
        print(json.dumps({"median_s": statistics.median(times[WARMUP_STEPS:])}))
    dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _mark(device: torch.device) -> float | torch.cuda.Event:
    """Return a time stamp: the host's, or a GPU event without waiting for it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_s(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return float(end) - float(start)  # type: ignore[arg-type]
    return float(start.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    main(sys.argv[1])
