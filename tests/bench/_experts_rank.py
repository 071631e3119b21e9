"""One rank of ``experts.py``: ``python _experts_rank.py JOB RESULT``, with torch's RANK, WORLD_SIZE, MASTER_* set."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _experts_job import TOP_K, Job
from torch import nn
from torch.nn import functional as F

from partool.spec.experts import Moe
from partool.spec.model import ModelConfig
from partool_runtime.model.moe import MixtureOfExperts
from partool_runtime.parallel.expert.dispatch import ExpertTeam, read_rows, routed


class Side:
    """An implementation of the layer on this rank."""

    def __init__(self, title: str, forward: Callable[[torch.Tensor], torch.Tensor], parameters: dict[str, Any]) -> None:
        self.title, self.forward = title, forward
        self._parameters = parameters
        self.step_s: list[float] = []
        self.cpu_s: list[float] = []

    def step(self, x_BSH: torch.Tensor, grad_BSH: torch.Tensor) -> torch.Tensor:
        """Run forward and backward pass with fresh gradients."""
        for parameter in self._parameters["all"]:
            parameter.grad = None
        x_BSH.grad = None
        out = self.forward(x_BSH)
        out.backward(grad_BSH)
        return out.detach()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients as partool stacks them: of the router, and of gate, up and down of this rank's experts."""
        found: dict[str, torch.Tensor] = self._parameters["gradients"]()
        return found


def weights(job: Job) -> dict[str, torch.Tensor]:
    """Return the weights of the whole layer, the same on every rank."""
    shape = job.shape
    drawn = torch.Generator().manual_seed(0)
    sizes = {"gate": shape.ffn_hidden, "up": shape.ffn_hidden, "down": shape.hidden}
    found = {}
    for name, rows in sizes.items():
        columns = shape.ffn_hidden if name == "down" else shape.hidden
        found[name] = torch.randn(shape.experts, rows, columns, generator=drawn) / columns**0.5
    router = torch.randn(shape.experts, shape.hidden, generator=drawn) / shape.hidden**0.5
    router[:, 0] = 0.0  # the first element of each token is 1
    if job.skewed:
        router[0, 0] = 20.0
    return found | {"router": router}


def partool_side(job: Job, whole: dict[str, torch.Tensor]) -> Side:
    """Return partool's layer."""
    shape, rank, ranks = job.shape, dist.get_rank(), dist.get_world_size()
    moe = Moe(experts=shape.experts, top_k=TOP_K, ffn_hidden=shape.ffn_hidden)
    config = ModelConfig(layers=1, hidden=shape.hidden, ffn_hidden=8, heads=1, kv_heads=1, head_dim=8, vocab=8, moe=moe)
    with torch.device("meta"):
        layer = MixtureOfExperts(config)
    layer.router.weight = nn.Parameter(whole["router"].clone())
    here = shape.experts // ranks
    for name, stacked in layer.experts.stacked():
        stacked.weight = nn.Parameter(whole[name][rank * here : (rank + 1) * here].flatten(0, 1).clone())
    if ranks > 1:
        group = dist.group.WORLD
        assert group is not None
        team = ExpertTeam(group.group_name, rank, (shape.tokens,) * ranks, read_rows)
        layer.routed = partial(routed, layer, team)  # type: ignore[method-assign]

    def gradients() -> dict[str, torch.Tensor]:
        of = {name: stacked.weight for name, stacked in layer.experts.stacked()}
        return {name: _grad(weight).view(here, -1, weight.shape[1]) for name, weight in of.items()} | {
            "router": _grad(layer.router.weight)
        }

    return Side("partool", layer, {"all": list(layer.parameters()), "gradients": gradients})


class GatedExpert(nn.Module):
    """An expert as DeepSpeed's layer takes it."""

    def __init__(self, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn_hidden, bias=False)
        self.up = nn.Linear(hidden, ffn_hidden, bias=False)
        self.down = nn.Linear(ffn_hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[…, H]`` to ``[…, H]``."""
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def deepspeed_side(job: Job, whole: dict[str, torch.Tensor]) -> Side:
    """Return DeepSpeed's layer, which drops no tokens and samples no second expert."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.init_distributed("gloo")
    shape, rank, ranks = job.shape, dist.get_rank(), dist.get_world_size()
    expert = GatedExpert(shape.hidden, shape.ffn_hidden)
    layer = MoE(
        shape.hidden, expert, shape.experts, ep_size=ranks, k=TOP_K, drop_tokens=False, top2_2nd_expert_sampling=False
    )
    layer.set_deepspeed_parallelism()
    inner = layer.deepspeed_moe
    here = shape.experts // ranks
    mine = list(inner.experts.deepspeed_experts)
    with torch.no_grad():
        inner.gate.wg.weight.copy_(whole["router"])
        for at, each in enumerate(mine):
            for name in ("gate", "up", "down"):
                getattr(each, name).weight.copy_(whole[name][rank * here + at])

    def gradients() -> dict[str, torch.Tensor]:
        stacked = {
            name: torch.stack([_grad(getattr(each, name).weight) for each in mine]) for name in ("gate", "up", "down")
        }
        return stacked | {"router": _grad(inner.gate.wg.weight)}

    return Side("deepspeed", lambda x: layer(x)[0], {"all": list(layer.parameters()), "gradients": gradients})


def transformers_side(job: Job, whole: dict[str, torch.Tensor], implementation: str) -> Side:
    """Return transformers' Mixtral block with one of its implementations of experts."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    shape = job.shape
    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn_hidden,
        num_local_experts=shape.experts,
        num_experts_per_tok=TOP_K,
        experts_implementation=implementation,
    )
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(whole["router"])
        block.experts.gate_up_proj.copy_(torch.cat([whole["gate"], whole["up"]], dim=1))
        block.experts.down_proj.copy_(whole["down"])

    def gradients() -> dict[str, torch.Tensor]:
        gate, up = _grad(block.experts.gate_up_proj).chunk(2, dim=1)
        return {"gate": gate, "up": up, "down": _grad(block.experts.down_proj), "router": _grad(block.gate.weight)}

    def forward(x_BSH: torch.Tensor) -> torch.Tensor:
        out = block(x_BSH)
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found

    return Side("transformers", forward, {"all": list(block.parameters()), "gradients": gradients})


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def made(title: str, job: Job, whole: dict[str, torch.Tensor]) -> Side:
    """Return a side by its title."""
    if title == "partool":
        return partool_side(job, whole)
    if title == "deepspeed":
        return deepspeed_side(job, whole)
    return transformers_side(job, whole, "grouped_mm" if title.endswith("grouped") else "eager")


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest value of its tensor."""
    return max(float((found[name] - each).abs().max() / each.abs().max()) for name, each in wanted.items())


def main(job_path: str, result_path: str) -> None:
    """Run a job and write this rank's record."""
    torch.set_num_threads(1)
    job = Job.read(Path(job_path))
    sys.path.append(job.extra_path)
    dist.init_process_group("gloo")
    whole = weights(job)
    sides = [made(title, job, whole) for title in job.sides]
    drawn = torch.Generator().manual_seed(1 + dist.get_rank())
    x_BSH, grad_BSH = (torch.randn(1, job.shape.tokens, job.shape.hidden, generator=drawn) for _ in range(2))
    x_BSH[..., 0] = 1.0
    chosen = (x_BSH.flatten(0, 1) @ whole["router"].T).topk(TOP_K).indices.flatten().bincount()
    x_BSH.requires_grad_()
    results = []
    for side in sides:
        out = side.step(x_BSH, grad_BSH)
        results.append(side.gradients() | {"out": out, "x": _grad(x_BSH).clone()})
        side.step(x_BSH, grad_BSH)
    differences = [apart(each, results[0]) for each in results]
    del results, out
    for turn in range(job.rounds):
        for at in range(len(sides)):
            _timed(sides[(turn + at) % len(sides)], x_BSH, grad_BSH)
    peaks = _peaks(job, sides, x_BSH, grad_BSH)
    record = [
        {
            "step_s": side.step_s,
            "cpu_s": side.cpu_s,
            "peak_bytes": peak,
            "apart": difference,
            "imbalance": float(chosen.max() * job.shape.experts / chosen.sum()),
        }
        for side, difference, peak in zip(sides, differences, peaks, strict=True)
    ]
    Path(result_path).write_text(json.dumps(record), encoding="utf-8")
    dist.destroy_process_group()


def _timed(side: Side, x_BSH: torch.Tensor, grad_BSH: torch.Tensor) -> None:
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    side.step(x_BSH, grad_BSH)
    dist.barrier()
    side.step_s.append(time.perf_counter() - start_s)
    side.cpu_s.append(time.process_time() - start_cpu_s)


def _peaks(job: Job, sides: list[Side], x_BSH: torch.Tensor, grad_BSH: torch.Tensor) -> list[int]:
    """Return the most bytes that a step of each side allocates, its gradients included."""
    counting = ctypes.CDLL(job.library)
    counting.peak_bytes.restype = ctypes.c_longlong
    counting.count_this_thread()
    found = []
    for side in sides:
        gc.collect()
        counting.restart_peak()
        before_bytes = int(counting.peak_bytes())
        side.step(x_BSH, grad_BSH)
        found.append(int(counting.peak_bytes()) - before_bytes)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
