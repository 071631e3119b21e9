"""One rank of a world whose traces are compared with those of its dry run, with state in host memory and in a ring."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import _dry_worker as worker
import torch
from _ranks import in_group
from planned import plan_of

from partool.plan.rank_trace import Collective, RankTrace
from partool.plan.types import Plan
from partool_runtime.dry.host import absent_host
from partool_runtime.dry.rank import dry_rank, traced
from partool_runtime.dry.record import CollectiveRecord
from partool_runtime.dry.world import alone_in, fake_tensors
from partool_runtime.host import HostParts
from partool_runtime.mesh import build_ranks
from partool_runtime.parallel.weipipe.lanes import Lane, Ticket

T = TypeVar("T")
SPEC = worker.SPEC.replace("data: python-stdlib", "data: {source: python-stdlib, validation: 0.1}")
OFFLOADED = {
    f"offload, {name}": f"{base}, data: {{zero: {zero}}}, offload: {{{fields}}}"
    for name, base, zero, fields in (
        ("optimizer", worker.ALONE, 2, "optimizer: cpu"),
        ("optimizer with copies", worker.ALONE, 1, "optimizer: cpu, speculate: undo, undo_gib: 1, gpu_fraction: 0.3"),
        ("parameters", worker.ALONE, 3, "optimizer: cpu, parameters: cpu"),
        ("parameters in files", worker.ALONE, 3, "optimizer: nvme, parameters: nvme, dir: %s"),
        ("activations", worker.ALONE, 2, "activations: cpu"),
        ("stages", "tensor: 2, sequence: 1, pipeline: {stages: 2, schedule: 1f1b}", 1, "optimizer: cpu"),
    )
}  # fmt: skip
CASES = OFFLOADED | worker.CASES
OFTEN = ("offload, parameters", "zb-v")
"""Cases that run each time; the others belong to the longer suites."""
RINGS = (("weipipe", 2), ("weipipe-naive", 1), ("weipipe-zb", 1))
"""Schedules and numbers of rings that the longer suites compare."""


def plan_for(name: str, folder: str) -> Plan:
    """Return a case's plan; files are in ``folder``."""
    cut = CASES[name].replace("%s", folder)
    return plan_of(SPEC % (worker.GRID if name == "dsp" else "", cut))


def check_case(name: str, folder: str) -> RankTrace:
    """Compare the exchanges of a step and of an evaluation, and the checkpoint, with the dry run; return its trace."""
    plan = plan_for(name, folder)
    with in_group():
        real = traced(plan, build_ranks(plan, torch.device("cpu")))
    dry = dry_rank(plan, int(os.environ["RANK"]))
    assert list(real.collectives) == list(dry.collectives)
    assert list(real.evaluation) == list(dry.evaluation)
    assert len(list(real.evaluation)) > 1, "the loss is summed, and the ranks agree to go on"
    assert real.checkpoint == dry.checkpoint
    return dry


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


def check_ring(schedule: str, data: int) -> RankTrace:
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
    assert found.checkpoint == alone.checkpoint
    return alone


def _issued(record: CollectiveRecord) -> list[Collective]:
    vocabulary = tuple(record.vocabulary)
    return [vocabulary[index] for index in record.order if index >= 0]
