"""Forward and backward passes of a step through a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from partool.layout.sequence import tokens
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.schedule import Schedule, without_backward
from partool_runtime.building import frozen_names, whole_shapes
from partool_runtime.data.batches import MicroBatch, on_device
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import stages as hf_stages
from partool_runtime.hf.stages import HfParts, HfStage
from partool_runtime.mesh import COLLECTIVE_TIMEOUT, Ranks
from partool_runtime.model import DecoderParts, StageModule
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.passes import BeforePass
from partool_runtime.parallel.pipeline.engine import PipelineEngine
from partool_runtime.parallel.pipeline.sync import PipelineSync, Timer, Unit
from partool_runtime.parallel.pipeline.types import Boundary, Done
from partool_runtime.parallel.pipeline.wires import Wires, open_lines
from partool_runtime.parallel.tensor.sync import TensorGradients
from partool_runtime.precision import COMPUTE_DTYPE
from partool_runtime.torch_internals.tensors import local


class TiedGradients:
    """Adds up the gradients of the first stage's embedding and of the embedding's copy in the last stage.

    Both ranks then hold the same bits and make the same update, so the copies never differ.
    """

    def __init__(self, embed: nn.Module, group: dist.ProcessGroup) -> None:
        self._embed, self._group = embed, group

    @classmethod
    def between(cls, parts: DecoderParts | HfParts, schedule: Schedule, ranks: Ranks) -> TiedGradients | None:
        """Return this rank's ``TiedGradients``; None if the rank holds no tied embedding. A collective of all ranks."""
        first, last = schedule.placement[0], schedule.placement[-1]
        if first == last:
            return None
        mine = ranks.groups.of([(pipeline[first], pipeline[last]) for pipeline in ranks.pp.parts])
        if mine is None or parts.embed is None:
            return None
        return cls(parts.embed, mine)

    def add_up(self) -> None:
        """Sum the embeddings' gradients; call this after these gradients are reduced over data-parallel ranks."""
        gradient = cast(torch.Tensor, self._embed.weight).grad
        if gradient is not None and local(gradient).numel() > 0:
            sum_over(local(gradient), self._group)


Report = Callable[[Sequence[Done], int], None]
"""Function called after a training step with the step's actions and the number of bytes sent.

The actions are in the order in which their times became known."""


class DecoderStage:
    """A stage of a decoder; implements the interface ``Stage``, which the engine calls."""

    def __init__(self, module: StageModule | HfStage, device: torch.device, before: BeforePass | None = None) -> None:
        """``before`` is called before each forward pass of the last stage."""
        self._module, self._device, self._before = module, device, before

    @property
    def module(self) -> nn.Module:
        """Module that holds the parameters."""
        return self._module

    def __call__(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        """Return the hidden state ``[B, S, H]``, or on the last stage the sum of token losses."""
        x = x_BSH if x_BSH is not None else micro.tokens_BS.to(self._device, non_blocking=True)
        last = self._module.last
        if self._module.contexts is not None:
            self._module.contexts.first_sequence = micro.first
        if last and self._before is not None:
            self._before(micro)
        labels_BS = micro.labels_BS.to(self._device, non_blocking=True) if last else None
        out: torch.Tensor = self._module(x, labels_BS, *on_device(micro.documents_BL, self._device))
        return out


class PipelinePasses:
    """Passes (:class:`partool_runtime.parallel.passes.Passes`) of a rank; the ranks of a pipeline share one batch."""

    def __init__(
        self,
        engine: PipelineEngine,
        wires: Wires,
        sync: PipelineSync,
        ranks: Ranks,
        *,
        tied: TiedGradients | None,
        tensor: TensorGradients | None,
        report: Report,
    ) -> None:
        self._engine, self._wires, self._sync, self._ranks = engine, wires, sync, ranks
        self._tied, self._tensor, self._report = tied, tensor, report
        self._timed_actions: list[Done] = []
        engine.watch = self._timed_actions.append

    def step(self, batch: Sequence[MicroBatch], weight: torch.Tensor, timer: Timer) -> torch.Tensor:
        """See ``Passes``. Ranks without the last stage return 0."""
        self._timed_actions.clear()
        self._sync.use(timer)
        before_bytes = self._wires.sent_bytes
        loss_sum = self._engine.step(batch, weight)
        if self._tied is not None:
            with timer("gradient_sync"):
                self._tied.add_up()
        if self._tensor is not None:
            with timer("tensor_parallel"):
                self._tensor.add_up()
        with timer("pipeline_bubble"):  # ranks that finish early wait here for the others
            sum_over(torch.zeros((), device=self._ranks.device), self._ranks.world)
        self._report(self._timed_actions, self._wires.sent_bytes - before_bytes)
        return loss_sum

    def evaluate(self, batches: Iterable[MicroBatch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """See ``Passes``. Processes as many micro-batches at a time as a training step has."""
        total = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        together: list[MicroBatch] = []
        for micro in batches:
            if stopping():
                return None
            together.append(micro)
            if len(together) == self._engine.schedule.micro_batches:
                self._timed_actions.clear()
                total += self._engine.evaluate(together)
                together = []
        if together:
            self._timed_actions.clear()
            total += self._engine.evaluate(together)
        return total

    def close(self) -> None:
        """See ``Passes``."""


def trained_schedule(plan: Plan) -> Schedule:
    """Return the plan's schedule; stages before the first trained stage have no backward passes.

    Raises ConfigurationError PT503 if the schedule cannot be made from the plan's layout.
    """
    try:
        schedule = schedule_of(plan.layout)
    except ValueError as error:
        fix = "make it again: partool plan SPEC --out FILE"
        raise ConfigurationError("PT503", f"the plan's pipeline schedule cannot be made: {error}", fix) from error
    first = first_trained_stage(plan)
    return without_backward(schedule, first) if first > 0 else schedule


def boundary_shape(plan: Plan, sequence_rank: int = 0) -> tuple[int, int, int]:
    """Return the shape of the hidden state ``[B, S, H]`` that a rank sends to the next stage.

    S is the number of tokens of ``sequence_rank``. Tensor ranks divide S further (rounded up) or divide H.
    """
    layout, length = plan.layout, tokens(plan.shares[sequence_rank])
    if layout.tensor.sequence_norms:
        length = -(-length // layout.mesh.tp)
    return layout.micro_batch, length, plan.model.hidden // layout.tensor.inner


def first_trained_stage(plan: Plan) -> int:
    """Return the number of the first stage that holds a trained parameter."""
    if plan.hf is not None:
        return hf_stages.first_trained_stage(plan)
    shapes = whole_shapes(plan.model)
    frozen = frozen_names(shapes, plan.frozen)
    return min(_stage_of(name, plan.layout.pipeline.bounds) for name in shapes if name not in frozen)


def _stage_of(name: str, spans: Sequence[tuple[int, int]]) -> int:
    kind, _, rest = name.partition(".")
    if kind in ("embed", "position"):
        return 0
    if kind != "layers":
        return len(spans) - 1
    layer = int(rest.partition(".")[0])
    return next(stage for stage, (first, stop) in enumerate(spans) if first <= layer < stop)


def pipeline_passes(
    parts: DecoderParts | HfParts,
    units: Sequence[Unit],
    schedule: Schedule,
    *,
    plan: Plan,
    ranks: Ranks,
    report: Report,
    before: BeforePass | None = None,
) -> PipelinePasses:
    """Return the ``Passes`` of this pipeline rank; a collective of all ranks. The model may be on the meta device.

    ``before`` is called before each forward pass of the last stage.
    """
    layout, rank = plan.layout, ranks.pp.place
    sync = PipelineSync(schedule.lists[rank], units, zero=layout.data.zero, replicas=ranks.replicate.size)
    boundary = Boundary(boundary_shape(plan, ranks.cp.place), COMPUTE_DTYPE[plan.training.precision], ranks.device)
    timeout_s = COLLECTIVE_TIMEOUT.total_seconds()
    lines = open_lines(ranks.groups, ranks.pp.parts, schedule.placement, timeout_s=timeout_s)
    wires = Wires(rank, lines, boundary, timeout_s=timeout_s)
    stages = {number: DecoderStage(module, ranks.device, before) for number, module in parts.stages.items()}
    tied = TiedGradients.between(parts, schedule, ranks) if plan.model.tied_embeddings else None
    tensor = TensorGradients.of(parts, plan, ranks)
    engine = PipelineEngine(schedule, stages, wires, sync=sync)
    return PipelinePasses(engine, wires, sync, ranks, tied=tied, tensor=tensor, report=report)
