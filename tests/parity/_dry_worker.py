"""One rank of a world whose collectives and memory are compared with those of its dry run."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import in_group
from planned import plan_of
from torch.distributed.tensor import DTensor

from partool.plan.rank_trace import COMPUTE, Collective
from partool.plan.types import Plan
from partool_runtime.dry.rank import dry_rank, micro_batches
from partool_runtime.dry.record import CollectiveRecord
from partool_runtime.mesh import build_ranks
from partool_runtime.offload.install import open_optimizer
from partool_runtime.precision import LossScaler
from partool_runtime.preparation import prepare
from partool_runtime.stepping import Stepper
from partool_runtime.torch_internals.tensors import TorchDispatchMode

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
    "stages with shards": "tensor: 1, sequence: 1, pipeline: {stages: 2, schedule: 1f1b}, data: {zero: 2}",
}  # fmt: skip
OFTEN = ("zero 1", "zero 3", "hybrid shards", "tensor, norms on shares", "ring", "usp", "dsp", "interleaved", "zb-v")
"""Cases that run each time; the others belong to the longer suites."""


def check_case(name: str, library: str) -> None:
    """Compare a step's collectives, in order, and its peak of memory with those of the rank's dry run."""
    plan = plan_of(SPEC % (GRID if name == "dsp" else "", CASES[name]))
    with in_group():
        assert dist.get_world_size() == plan.layout.mesh.world_size
        collectives, peak_bytes = _real(plan, Path(library))
    dry = dry_rank(plan, int(os.environ["RANK"]))
    assert collectives == list(dry.collectives)
    assert any(each.kind not in ("allreduce_", "all_reduce_") for each in collectives) or name == "zero 0"
    assert dry.memory is not None
    held_bytes = dry.memory.peak_bytes
    assert held_bytes == pytest.approx(peak_bytes, rel=0.02), (held_bytes / peak_bytes, dry.memory.terms_bytes)
    assert "unattributed" not in dry.memory.terms_bytes


def _real(plan: Plan, library: Path) -> tuple[list[Collective], int]:
    """Return the collectives of a rank's second step, and the most bytes that an allocator of its own then counts."""
    counting = ctypes.CDLL(str(library))
    counting.peak_bytes.restype = ctypes.c_longlong
    counting.count_this_thread()
    gc.collect()  # earlier cases ran in this process
    counting.restart_peak()
    before_bytes = int(counting.peak_bytes())
    ranks = build_ranks(plan, torch.device("cpu"))
    prepared = prepare(plan, ranks, lambda done, sent_bytes: None)
    optimizer = open_optimizer(plan, prepared, ranks)
    stepper = Stepper(
        prepared.passes, optimizer, LossScaler(enabled=False), ranks=ranks, training=plan.training, spec=plan.optimizer,
        kernels=plan.kernels.mode,
    )  # fmt: skip
    batch, record = micro_batches(plan), CollectiveRecord()
    with _AtOnce(), record:
        peaks_bytes = []
        for step in range(4):
            record.restart()
            counting.restart_peak()
            stepper.step(step, batch, lambda term: nullcontext())
            peaks_bytes.append(int(counting.peak_bytes()))
    # Threads of gloo can let go of tensors late, never too early.
    peak_bytes = min(peaks_bytes[1:]) - before_bytes
    prepared.passes.close()
    return [record.by_place[place] for place in record.order if place != COMPUTE], peak_bytes


class _AtOnce(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Waits for each collective where it is issued, as threads of gloo keep tensors alive until they are done."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name not in ("send", "recv_"):
            work = results[-1] if isinstance(results, list | tuple) else results
            dist.Work.unbox(work).wait()
        elif func.namespace == "_c10d_functional" and name != "wait_tensor":
            torch.ops._c10d_functional.wait_tensor(results)
        else:
            return results
        time.sleep(_LET_GO_S)
        return results


_LET_GO_S = 0.002
"""Time in which a thread of gloo drops its references to tensors after their collective is complete."""
