"""The layouts worth pricing: what the spec pins is kept, the rest is enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partool.cost.memory import predict_memory
from partool.cost.step import predict_time
from partool.cost.work import Work
from partool.layout.capabilities import Needs
from partool.layout.mesh import split_layers
from partool.plan.types import Layout, MemoryPrediction, Mesh, TimePrediction
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.parallel import Compile, Recompute, ZeroStage
from partool.spec.spec import Spec

SURE = 0.95
"""Probability of fitting from which a layout counts as safe; below it the plan carries a warning."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A spec with its model and machines resolved."""

    spec: Spec
    model: ModelConfig
    devices: Devices

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.devices.nodes * self.devices.per_node

    @property
    def model_parallel(self) -> int:
        """Ranks that share one copy of a micro-batch."""
        parallel = self.spec.parallel
        return parallel.tensor * parallel.pipeline.stages * parallel.sequence.degree

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.world_size // self.model_parallel


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with its price."""

    work: Work
    memory: MemoryPrediction
    time: TimePrediction

    @property
    def fits(self) -> bool:
        """True if the prediction stays under the capacity."""
        return self.memory.total_bytes <= self.memory.capacity_bytes

    @property
    def safe(self) -> bool:
        """True if it fits with the uncertainty of the prediction as well."""
        return self.fits and self.memory.fit_probability >= SURE


def candidates(problem: Problem) -> Iterator[Layout]:
    """Yield every layout that agrees with the spec."""
    for zero, shard in _zero(problem):
        for micro_batch in micro_batches(problem):
            for recompute in _recompute(problem):
                yield layout(problem, zero, shard, micro_batch, recompute)


def layout(problem: Problem, zero: ZeroStage, shard: int, micro_batch: int, recompute: Recompute) -> Layout:
    """Return the layout of these choices; everything else is as the spec says."""
    parallel = problem.spec.parallel
    stages = parallel.pipeline.stages
    mesh = Mesh(
        pp=stages,
        dp_replicate=problem.dp // shard,
        dp_shard=shard,
        cp=parallel.sequence.degree,
        tp=parallel.tensor,
    )
    return Layout(
        mesh=mesh,
        expert=parallel.expert,
        zero=zero,
        micro_batch=micro_batch,
        accumulation=problem.spec.training.global_batch // (problem.dp * micro_batch),
        recompute=(recompute,) * problem.model.layers,
        compile=_compile(problem),
        stages=split_layers(problem.model.layers, stages),
        schedule=parallel.pipeline.schedule,
        sequence_method=parallel.sequence.method,
        offload_optimizer=parallel.offload.optimizer,
    )


def price(problem: Problem, layout: Layout) -> Candidate:
    """Return a layout with its predicted memory and time."""
    work = _work(problem, layout)
    return Candidate(work, predict_memory(work, problem.spec.limits.memory_headroom), predict_time(work))


def fits(problem: Problem, layout: Layout) -> bool:
    """Return True if a layout's predicted memory stays under the capacity."""
    memory = predict_memory(_work(problem, layout), problem.spec.limits.memory_headroom)
    return memory.total_bytes <= memory.capacity_bytes


def _work(problem: Problem, layout: Layout) -> Work:
    return Work(problem.model, layout, problem.spec.training, problem.devices, tuple(problem.spec.model.frozen))


def micro_batches(problem: Problem) -> list[int]:
    """Return the micro-batches to try: the pinned one, or a rank's share and its divisors that are powers of two."""
    pinned = problem.spec.parallel.micro_batch
    if pinned != "auto":
        return [pinned]
    share = problem.spec.training.global_batch // problem.dp
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    useful = [n for n in divisors if n & (n - 1) == 0 or n == share]
    stages = problem.spec.parallel.pipeline.stages
    return [n for n in useful if share // n >= stages] or [1]


def needs(problem: Problem, layout: Layout) -> Needs:
    """Return what a layout asks of the runtime."""
    mesh = layout.mesh
    return Needs(
        model=problem.model,
        frozen=bool(problem.spec.model.frozen),
        backend=problem.devices.backend,
        nodes=problem.devices.nodes,
        zero=layout.zero,
        replicas=mesh.dp_replicate,
        tensor=mesh.tp,
        stages=mesh.pp,
        sequence=mesh.cp,
        expert=layout.expert,
        offload_optimizer=layout.offload_optimizer,
        accumulation=layout.accumulation,
        recompute=frozenset(layout.recompute),
        compile=layout.compile,
        precision=problem.spec.training.precision,
    )


def _zero(problem: Problem) -> Iterator[tuple[ZeroStage, int]]:
    """Yield ZeRO stages with the ranks that share the state; one rank has nothing to share."""
    data, dp = problem.spec.parallel.data, problem.dp
    stages: tuple[ZeroStage, ...] = (0, 1, 2, 3) if data.zero == "auto" else (data.zero,)
    for zero in stages:
        if zero == 0 or dp == 1:
            if data.zero != "auto" or (zero == 0 and data.shard in ("auto", 1)):
                yield zero, 1
        elif data.shard != "auto":
            yield zero, data.shard
        else:
            yield zero, dp
            inside = problem.devices.per_node // problem.model_parallel
            if 1 < inside < dp and dp % inside == 0:
                yield zero, inside


def _recompute(problem: Problem) -> tuple[Recompute, ...]:
    pinned = problem.spec.parallel.recompute
    return ("none", "selective", "full") if pinned == "auto" else (pinned,)


def _compile(problem: Problem) -> Compile:
    pinned = problem.spec.parallel.compile
    if pinned != "auto":
        return pinned
    return "none" if problem.devices.backend == "cpu" else "block"
