"""Prediction of partool's cost model for a measured case, from the same equations as plans."""

from __future__ import annotations

from dataclasses import replace

from _sequence_job import Case, TrainingWork

from partool.cost.case import INSIDES, ORDERS, SEQUENCE_METHODS, Layouts
from partool.cost.kinds import Kind, kinds
from partool.cost.sequence.price import exchange
from partool.cost.time.attention import _head_share, attention_s
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork as CostJob

LOOPBACK_BYTES_PER_S = 1.5e9
"""Bandwidth per rank of gloo exchanges within one machine, on the machine of the published results."""


def predicted_s(case: Case, job: TrainingWork) -> float:
    """Return the seconds of the attention of the layers, forward and backward, without projections."""
    found = 0.0
    for backward in (False, True):
        cost = _job(job, job.flops_per_s[backward])
        found += sum(_pass_s(case, job, cost, kind, backward=backward) for kind in kinds(cost.model))
    return found


def _pass_s(case: Case, job: TrainingWork, cost: CostJob, kind: Kind, *, backward: bool) -> float:
    layouts = Layouts(
        cp=job.ranks,
        micro_batch=job.shape.batch,
        sequence_method=SEQUENCE_METHODS.index(case.method),
        sequence_order=ORDERS.index(case.order),
        sequence_inner=case.inner,
        sequence_teams=case.teams,
        sequence_inside=INSIDES.index(case.inside),
        compiled=0,
    )
    busy_s = attention_s(cost, layouts, kind, backward=backward)
    found = replace(exchange(cost, layouts, kind, backward=backward), hidden=0.0)  # projections take no time here
    return float(busy_s + found.exposed(cost, busy_s))


def _job(job: TrainingWork, flops_per_s: float) -> CostJob:
    shape = job.shape
    model = ModelConfig(
        layers=len(shape.kinds), hidden=shape.queries * shape.head_dim, ffn_hidden=1, heads=shape.queries,
        kv_heads=shape.keys, head_dim=shape.head_dim, vocab=2, position="none", window=shape.window, grid=shape.grid,
        layer_types=shape.kinds,
    )  # type: ignore[arg-type]  # fmt: skip
    cable = job.rate_mbit * 1e6 / 8 / job.per_node
    devices = Devices(
        accelerator="cpu", backend="cpu", nodes=job.ranks // job.per_node, per_node=job.per_node,
        memory_bytes=2**40, peak_flops=None, achievable_flops=1e15, memory_bytes_per_s=1e15,
        attention_flops=flops_per_s / _head_share(shape.head_dim), link_bytes_per_s=LOOPBACK_BYTES_PER_S,
        fabric_bytes_per_s=cable, link_latency_s=job.latency_s, fabric_latency_s=job.latency_s, operator_s=0.0,
    )  # fmt: skip
    return CostJob(model, devices, shape.length, 1, "fp32")
