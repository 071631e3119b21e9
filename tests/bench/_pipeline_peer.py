"""The peer to compare with: torch.distributed.pipelining's runtime, on the same stages and the same lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from partool.schedule import COMPUTE, Schedule
from partool_runtime.data.batches import MicroBatch

KINDS = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}


class _Module(nn.Module):
    """A stage as torch's runtime calls it: the first one receives tokens, all of them receive the labels."""

    def __init__(self, stage: nn.Module, first: bool) -> None:
        super().__init__()
        self.stage = stage
        self.first = first

    def forward(self, x: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        micro = MicroBatch(x, labels_BS)
        out: torch.Tensor = self.stage(None if self.first else x, micro)
        return out


class TorchPipeline:
    """Runs a schedule's compute actions; torch's own lowering places the transfers.

    Shapes are given, so that no step infers them. Inputs come as micro-batches: no step splits a batch.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        example_BSH: torch.Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # Tensors that cross a boundary need gradients; torch's runtime reads that from its example inputs.
        tokens_BS = torch.zeros(example_BSH.shape[:2], dtype=torch.int64)
        example_BSH = example_BSH.detach().requires_grad_()
        loss = torch.zeros((), dtype=example_BSH.dtype, requires_grad=True)
        last = schedule.stages - 1
        self._weight = torch.ones(())
        self._stages = [
            PipelineStage(
                _Module(module, index == 0),
                index,
                schedule.stages,
                example_BSH.device,
                input_args=(tokens_BS if index == 0 else example_BSH,),
                output_args=(loss if index == last else example_BSH,),
                group=group,
            )
            for index, module in stages.items()
        ]
        self._runtime = _PipelineScheduleRuntime(
            self._stages, schedule.micro_batches, loss_fn=lambda out, _: out * self._weight, scale_grads=False
        )
        order = {
            rank: [_Action(stage, KINDS[kind], batch) for kind, stage, batch in actions if kind in COMPUTE]
            for rank, actions in enumerate(schedule.lists)
        }
        self._runtime.pipeline_order = order
        self._runtime._prepare_schedule_with_comms(order)

    def step(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> None:
        """Leave the gradients of the weighted sum of losses in the parameters."""
        self._weight = weight
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self._runtime._step_microbatches(
            [(micro.tokens_BS,) for micro in micro_batches],
            [{"labels_BS": micro.labels_BS} for micro in micro_batches],
            [micro.labels_BS for micro in micro_batches],
            [],
            return_outputs=False,
        )
