"""Executes a rank's action list: computes the rank's stages, and sends activations and gradients to peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch.distributed.fsdp import FSDPModule

from partool.schedule import COMPUTE, Action, Schedule, forward_only, remap, validate
from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.pipeline.handover import Handover, unfinished
from partool_runtime.parallel.pipeline.program import Program, compile_program, halved, until
from partool_runtime.parallel.pipeline.types import Stage, StageSync, Watch, split_linears
from partool_runtime.parallel.pipeline.wires import Wires
from partool_runtime.parallel.pipeline.worker import Calls, Worker

_Ready = tuple[Program, Calls]
"""A rank's program, and the methods that run its steps."""


class PipelineEngine:
    """One rank of a pipeline: stages stay on their ranks, activations are sent between ranks.

    ``stages`` are this rank's stages, by number. ``sync`` is called before and after compute actions, ``watch`` with
    every action once its times are known. Losses and gradients are sums: after :meth:`step` each parameter's ``grad``
    is the same as in one process after ``(weight * sum of the losses).backward()``. Raises ``ValueError`` for an
    invalid schedule, because a wrong order of transfers would give wrong gradients without an error.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        wires: Wires,
        *,
        sync: StageSync | None = None,
        watch: Watch | None = None,
    ) -> None:
        if schedule.moves != "activations":
            raise ValueError(f"{schedule.name} passes weights round: it has an executor of its own")
        if problems := validate(schedule):
            raise ValueError(f"the schedule {schedule.name} is unsound: {problems[0]}")
        self._wires = wires
        self._worker = Worker(wires, sync, watch)
        self._settle(schedule, stages)

    def _settle(self, schedule: Schedule, stages: Mapping[int, Stage]) -> None:
        """Prepare everything that all steps have in common."""
        rank = self._wires.rank
        if set(stages) != set(schedule.on_rank(rank)):
            raise ValueError(f"rank {rank} was given stages {sorted(stages)}, its own are {schedule.on_rank(rank)}")
        self.schedule = schedule
        self._worker.stages = dict(stages)
        self._halved = halved(schedule)
        for stage in {stage for stage, _ in self._halved} & stages.keys():
            split_linears(stages[stage].module)
        self._full_step = self._ready(schedule)
        self._forward: dict[int, _Ready] = {}
        self._rest: Schedule | None = None

    def _ready(self, schedule: Schedule, executed: Set[Action] = frozenset()) -> _Ready:
        """Return what this rank needs to run a schedule once the compute actions ``executed`` have run."""
        program = compile_program(schedule, self._wires.rank, self._halved, executed)
        return program, self._worker.calls(program)

    @property
    def watch(self) -> Watch | None:
        """Function that is called with every action once its times are known; may be changed between steps."""
        return self._worker.watch

    @watch.setter
    def watch(self, watch: Watch | None) -> None:
        self._worker.watch = watch

    @property
    def peak_live(self) -> int:
        """Maximum number of (stage, micro-batch) pairs whose activations were held at once in the latest step."""
        return self._worker.peak_live

    def step(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> torch.Tensor:
        """Run one step; return the sum of the token losses seen on this rank, a float64 scalar.

        ``weight`` is a scalar that scales the gradients. Raises :class:`partool_runtime.parallel.pipeline.wires.
        TransferError` if a peer hangs or has ended.
        """
        self.start(micro_batches, weight)
        self.run()
        return self.finish()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run any number of micro-batches without gradients; return the sum of the token losses seen on this rank."""
        if self._rest is not None:
            raise ValueError("a step is under way")
        count = len(micro_batches)
        if count not in self._forward:
            self._forward[count] = self._ready(forward_only(self.schedule, count))
        self._worker.begin(micro_batches, None)
        self._worker.execute(*self._forward[count])
        return self.finish()

    def start(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> None:
        """Begin a step with the arguments of :meth:`step`; :meth:`run` and :meth:`finish` complete the step."""
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"the schedule has {self.schedule.micro_batches} micro-batches, not {len(micro_batches)}")
        self._worker.begin(micro_batches, weight)
        self._rest = self.schedule

    def run(self, action_counts: Sequence[int] | None = None) -> None:
        """Run the step to its end, or until each rank has executed ``action_counts[rank]`` of the remaining actions.

        All ranks must pass the same ``action_counts``, for example a result of :func:`partool.schedule.after`. No
        message is in flight afterwards, and another :meth:`run` continues with the remaining actions, before or after
        :meth:`move`.
        """
        rest = self._unfinished()
        if action_counts is None:
            is_full_step = rest is self.schedule
            self._worker.execute(*(self._full_step if is_full_step else self._ready(rest, self._executed(rest))))
            self._rest = None
        else:
            self._worker.execute(*self._ready(until(rest, action_counts), self._executed(rest)))
            self._rest = remap(rest, action_counts, rest.placement)

    def move(self, placement: Sequence[int], stages: Mapping[int, Stage]) -> None:
        """Change the map of stages to ranks, for this step and later ones; all ranks call it between two runs.

        ``stages`` are this rank's stages under the new map. A stage that was on another rank gets its parameters,
        buffers and gradients from that rank; forward passes whose backward pass is still to come are recomputed from
        their inputs. The caller moves the optimizer's state. Raises ``ValueError`` for stages under ``fully_shard``,
        whose gradients are not in ``grad`` before they are reduced.
        """
        rest, rank = self._unfinished(), self._wires.rank
        if any(isinstance(part, FSDPModule) for one in self._worker.stages.values() for part in one.module.modules()):
            raise ValueError("stages sharded with fully_shard cannot move within a step")
        executed = self._executed(rest)
        handover = Handover(self._worker.kept, self._wires)
        moved = [s for s, (old, new) in enumerate(zip(rest.placement, placement, strict=True)) if old != new]
        for stage in moved:
            work = unfinished(self.schedule, executed, stage)
            if rest.placement[stage] == rank:
                handover.give(placement[stage], stage, self._worker.stages[stage].module, work)
            elif placement[stage] == rank:
                handover.take(rest.placement[stage], stage, stages[stage].module, work)
        self._wires.finish()
        none = [0] * rest.ranks
        rest = remap(rest, none, placement)
        self._settle(remap(self.schedule, none, placement), stages)
        self._rest = rest
        for step in compile_program(rest, rank, self._halved, executed).steps:
            self._worker.recompute_forward(step)

    def finish(self) -> torch.Tensor:
        """End a step that has run; return the sum of the token losses like :meth:`step`."""
        self._worker.finish()
        return self._worker.loss

    def _executed(self, rest: Schedule) -> set[Action]:
        remaining = {action for actions in rest.lists for action in actions}
        return {a for actions in self.schedule.lists for a in actions if a.kind in COMPUTE and a not in remaining}

    def _unfinished(self) -> Schedule:
        if self._rest is None:
            raise ValueError("no step is under way")
        return self._rest
