"""One rank of a world whose real collectives are compared with those of its dry run."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from _ranks import in_group
from planned import plan_of

from partool_runtime.dry.rank import dry_rank, traced
from partool_runtime.mesh import build_ranks

SPEC = """\
model: {hidden: 24, layers: 8, heads: 4, kv_heads: 4, vocab: 256, ffn_hidden: 44, tied_embeddings: true%s}
hardware: {accelerator: cpu, per_node: 4}
data: python-stdlib
training: {global_batch: 16, sequence_length: 63, steps: 3, precision: fp32}
parallel: {%s, compile: none}
kernels: {mode: torch}
"""
ALONE = "tensor: 1, sequence: 1, pipeline: 1"
GRID = ", attention: {grid: [7, 9], layer_types: {pattern: [row, column]}}"
CASES = {
    **{f"zero {stage}": f"{ALONE}, data: {{zero: {stage}}}" for stage in range(4)},
    "hybrid shards": f"{ALONE}, data: {{zero: 3, shard: 2}}",
    "one parameter at a time": f"{ALONE}, data: {{zero: 3, gather: sequential}}",
    "tensor": "tensor: {degree: 2, sequence_norms: false}, sequence: 1, pipeline: 1, data: {zero: 2}",
    "tensor, norms on shares": "tensor: {degree: 4, sequence_norms: true}, sequence: 1, pipeline: 1",
    "tensor in two dimensions": "tensor: {shape: [2, 2]}, sequence: 1, pipeline: 1",
    "recompute": "tensor: 2, sequence: 1, pipeline: 1, data: {zero: 3}, recompute: full",
    **{
        method: f"tensor: 1, pipeline: 1, sequence: {{degree: {degree}, method: {method}}}, recompute: {recompute}"
        for method, degree, recompute in (
            ("ring", 2, "full"), ("ulysses", 2, "none"), ("all_gather", 4, "selective"), ("usp", 4, "none"),
            ("startrail", 4, "full"), ("dsp", 2, "none"),
        )
    },
    **{
        schedule: f"tensor: 2, sequence: 1, pipeline: {{stages: 2, schedule: {schedule}}}, data: {{zero: 1}}"
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "hanayo")
    },
    **{
        f"offload, {name}": f"{base}, data: {{zero: {zero}}}, offload: {{{fields}}}"
        for name, base, zero, fields in (
            ("optimizer", ALONE, 2, "optimizer: cpu"),
            ("optimizer with copies", ALONE, 1, "optimizer: cpu, speculate: undo, undo_gib: 1, gpu_fraction: 0.3"),
            ("parameters", ALONE, 3, "optimizer: cpu, parameters: cpu"),
            ("parameters in files", ALONE, 3, "optimizer: nvme, parameters: nvme, dir: /tmp"),
            ("activations", ALONE, 2, "activations: cpu"),
            ("stages", "tensor: 2, sequence: 1, pipeline: {stages: 2, schedule: 1f1b}", 1, "optimizer: cpu"),
        )
    },
    "stages with shards": "tensor: 1, sequence: 1, pipeline: {stages: 2, schedule: 1f1b}, data: {zero: 2}",
}  # fmt: skip
OFTEN = ("zero 1", "zero 3", "hybrid shards", "tensor, norms on shares", "ring", "usp", "dsp", "interleaved", "zb-v",
         "offload, parameters")  # fmt: skip
"""Cases that run each time; the others belong to the longer suites."""


def check_case(name: str) -> None:
    """Compare the collectives of a step, in order, with those of the rank's dry run."""
    plan = plan_of(SPEC % (GRID if name == "dsp" else "", CASES[name]))
    with in_group():
        assert dist.get_world_size() == plan.layout.mesh.world_size
        real = traced(plan, build_ranks(plan, torch.device("cpu")))
    dry = dry_rank(plan, int(os.environ["RANK"]))
    assert list(real.collectives) == list(dry.collectives)
    assert any(each.kind not in ("allreduce_", "all_reduce_") for each in real.collectives) or name == "zero 0"
