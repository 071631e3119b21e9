"""The loop that somebody would write by hand: FSDP2 around the same decoder, AdamW, clipping, nothing else.

Started by ``overhead.py`` under torch's elastic launcher. Prints the median seconds per step of rank 0 as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from partool.plan.types import Plan
from partool_runtime.model import Decoder

WARMUP_STEPS = 5


def main(plan_path: str) -> None:
    """Train on random tokens with the plan's shapes and report the step time."""
    plan = Plan.from_json(Path(plan_path).read_text(encoding="utf-8"))
    torch.set_num_threads(plan.devices.threads_per_rank or 1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Decoder(plan.model)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    betas = (plan.optimizer.betas[0], plan.optimizer.betas[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.optimizer.lr, betas=betas, fused=True)
    shape = (plan.layout.micro_batch, plan.training.sequence_length)
    tokens_per_step = plan.training.global_batch * plan.training.sequence_length
    times = []
    for _ in range(plan.training.steps):
        start = time.perf_counter()
        for _ in range(plan.layout.accumulation):
            tokens_BS = torch.randint(plan.model.vocab, shape)
            # FSDP2 averages over ranks, so each rank's share is scaled up by their number.
            (model(tokens_BS, tokens_BS) * (dist.get_world_size() / tokens_per_step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps({"median_s": statistics.median(times[WARMUP_STEPS:])}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
