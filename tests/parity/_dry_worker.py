"""One rank of a world whose real collectives are compared with those of its dry run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from _ranks import in_group
from planned import plan_of

from partool.plan.rank_trace import Collective
from partool_runtime.dry.host import absent_host
from partool_runtime.dry.rank import dry_rank, traced
from partool_runtime.dry.record import CollectiveRecord
from partool_runtime.dry.world import alone_in, fake_tensors
from partool_runtime.host import HostParts
from partool_runtime.mesh import build_ranks
from partool_runtime.parallel.weipipe.lanes import Lane, Ticket

T = TypeVar("T")

SPEC = """\
model: {hidden: 24, layers: 8, heads: 4, kv_heads: 4, vocab: 256, ffn_hidden: 44, tied_embeddings: true%s}
hardware: {accelerator: cpu, per_node: 4}
data: {source: python-stdlib, validation: 0.1}
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


RINGS = (("weipipe", 2), ("weipipe-naive", 1), ("weipipe-zb", 1))
"""Schedules and numbers of rings that the longer suites compare."""


def check_case(name: str) -> None:
    """Compare the collectives of a step, in order, with those of the rank's dry run."""
    plan = plan_of(SPEC % (GRID if name == "dsp" else "", CASES[name]))
    with in_group():
        assert dist.get_world_size() == plan.layout.mesh.world_size
        real = traced(plan, build_ranks(plan, torch.device("cpu")))
    dry = dry_rank(plan, int(os.environ["RANK"]))
    assert list(real.collectives) == list(dry.collectives)
    assert list(real.evaluation) == list(dry.evaluation)
    assert len(list(real.evaluation)) > 1, "the loss is summed, and the ranks agree to go on"
    assert any(each.kind not in ("allreduce_", "all_reduce_") for each in real.collectives) or name == "zero 0"


class RecordedLane(Lane):
    """Lane of a ring that records its transfers: in a real run they are issued by a thread of the lane."""

    def __init__(self, records: dict[str, CollectiveRecord], name: str, device: torch.device, threaded: bool) -> None:
        super().__init__(name, device, threaded=threaded)
        self._record = records[name] = CollectiveRecord()

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        def recorded() -> T:
            with self._record:
                return job()

        return super().submit(recorded)


def check_ring(schedule: str, data: int) -> None:
    """Compare the transfers of each lane of a ring, and the collectives beside them, with those of the dry run."""
    cut = f"tensor: 1, sequence: 1, pipeline: {{stages: {4 // data}, schedule: {schedule}}}"
    plan = plan_of(SPEC % ("", cut))
    device, real, dry = torch.device("cpu"), dict[str, CollectiveRecord](), dict[str, CollectiveRecord]()
    with in_group():
        found = traced(plan, build_ranks(plan, device), HostParts(ring_lane=partial(RecordedLane, real, threaded=True)))
    with alone_in(4, int(os.environ["RANK"])), fake_tensors() as tensors:
        host = replace(absent_host(tensors), ring_lane=partial(RecordedLane, dry, threaded=False))
        alone = traced(plan, replace(build_ranks(plan, device), tensors=tensors), host)
    for name in ("partool-weights", "partool-gradients"):
        assert _issued(real[name]) == _issued(dry[name]) != []
    beside = [each for each in alone.collectives if not each.purpose.startswith("weipipe")]
    assert list(found.collectives) == beside != []
    assert list(found.evaluation) == [each for each in alone.evaluation if not each.purpose.startswith("weipipe")] != []


def _issued(record: CollectiveRecord) -> list[Collective]:
    vocabulary = tuple(record.vocabulary)
    return [vocabulary[index] for index in record.order if index >= 0]
