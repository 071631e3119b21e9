"""Executes a schedule's lists: stages here, activations and gradients over point-to-point transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from partool.schedule import Schedule, cell, forward_only
from partool_runtime import deferral
from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.pipeline.program import Program, Step, compile_program
from partool_runtime.parallel.pipeline.split import split_linears
from partool_runtime.parallel.pipeline.types import Done, Stage, StageSync, Watch
from partool_runtime.parallel.pipeline.wires import TransferError, Wires

_Bound = tuple[Program, tuple[tuple[Callable[[Step], None], Step], ...]]
"""A program, and which method does which of its steps."""
_Held = tuple[torch.Tensor | None, GradientEdge, torch.Tensor | None]
"""What a backward pass starts from: a stage's input, its output's place in the graph, and for a loss its weight."""
_NOTHING = nullcontext()


class Engine:
    """One rank of a pipeline whose stages stay and whose activations travel.

    ``stages`` are this rank's, by number. ``sync`` prepares and follows up on compute actions, ``watch`` is told of
    every action. Losses are sums, gradients are summed: :meth:`step` leaves in each parameter's ``grad`` what one
    process would after ``(weight * sum of the losses).backward()``.
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
        if set(stages) != set(schedule.on_rank(wires.rank)):
            raise ValueError(f"rank {wires.rank} has stages {sorted(stages)}, not {schedule.on_rank(wires.rank)}")
        self.schedule, self._stages, self._wires = schedule, dict(stages), wires
        self._sync = sync
        self.watch = watch
        self._program = self._bind(compile_program(schedule, wires.rank))
        self._forward_programs: dict[int, _Bound] = {}
        self._micro: Sequence[MicroBatch] = ()
        self._weight = torch.ones(())
        self._loss = torch.zeros(())
        self._ready: dict[tuple[str, int, int], torch.Tensor] = {}
        """Inputs of compute actions that were made or received on this rank, by kind F or B, stage, micro-batch."""
        self._outbox: dict[tuple[str, int, int], torch.Tensor] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._put_off: dict[tuple[int, int], list[deferral.Work]] = {}
        self._waited_s = 0.0
        self.peak_live = 0
        """Most (stage, micro-batch) pairs whose activations were held at once in the latest step."""

    def step(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> torch.Tensor:
        """Run one step; return the sum of the token losses seen on this rank, a float64 scalar.

        ``weight`` is a scalar that scales the gradients. Raises :class:`TransferError` where a peer hangs or is gone.
        """
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"the schedule has {self.schedule.micro_batches} micro-batches, not {len(micro_batches)}")
        self._begin(micro_batches, weight)
        self._run(self._program)
        return self._finish()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return the sum of the token losses seen on this rank, without gradients; any number of micro-batches."""
        self._begin(micro_batches, self._weight)
        count = len(micro_batches)
        if count not in self._forward_programs:
            schedule = forward_only(self.schedule, count)
            self._forward_programs[count] = self._bind(compile_program(schedule, self._wires.rank))
        self._run(self._forward_programs[count])
        return self._finish()

    def _begin(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> None:
        self._micro, self._weight = micro_batches, weight
        self._loss = torch.zeros((), dtype=torch.float64, device=self._wires.boundary.device)
        self.peak_live = 0

    def _finish(self) -> torch.Tensor:
        self._wires.finish()
        if self._sync is not None:
            self._sync.finish()
        return self._loss

    def _run(self, bound: _Bound) -> None:
        program, calls = bound
        self._wires.begin(program.inbound)
        step = None
        try:
            for do, step in calls:
                do(step)
        except TransferError:
            raise
        except Exception as error:
            if step is not None:
                error.add_note(f"pipeline rank {self._wires.rank}, action {cell(step.action)}")
            raise

    def _bind(self, program: Program) -> _Bound:
        for step in program.steps:
            if step.split:
                split_linears(self._stages[step.stage].module)
        forward = self._evaluate if program.forward_only else self._forward
        calls: dict[str, Callable[[Step], None]] = {
            "F": forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._expect,
            "RECV_B": self._expect,
        }
        return program, tuple((calls[step.action.kind], step) for step in program.steps)

    # One function per kind of action.

    def _evaluate(self, step: Step) -> None:
        x_BSH = None if step.first else self._take("F", step)
        start_s = self._enter(step)
        y_BSH = self._stages[step.stage](x_BSH, self._micro[step.batch])
        self._leave(step, start_s)
        self._hand_on(step, y_BSH)

    def _forward(self, step: Step) -> None:
        if not step.trained:
            with torch.no_grad():
                return self._evaluate(step)
        x_BSH = None if step.first else self._take("F", step).requires_grad_(step.wants_input_gradient)
        start_s = self._enter(step)
        with deferral.splitting() if step.split else _NOTHING:
            y_BSH = self._stages[step.stage](x_BSH, self._micro[step.batch])
        # The edge and not the output, which is free as soon as it has been sent.
        scale = self._weight.to(y_BSH.dtype) if step.last else None
        self._held[step.stage, step.batch] = x_BSH, get_gradient_edge(y_BSH), scale
        self.peak_live = max(self.peak_live, len(self._held))
        self._leave(step, start_s)
        return self._hand_on(step, y_BSH.detach())

    def _hand_on(self, step: Step, y_BSH: torch.Tensor) -> None:
        if step.last:
            self._loss += y_BSH
        else:
            self._pass(step, "F", step.stage + 1, y_BSH)

    def _backward(self, step: Step) -> None:
        grad_BSH = self._gradient(step)
        start_s = self._enter(step)
        x_BSH, edge, _ = self._held.pop((step.stage, step.batch))
        torch.autograd.backward((edge,), (grad_BSH,))
        self._leave(step, start_s)
        self._pass_back(step, x_BSH)

    def _input_gradient(self, step: Step) -> None:
        grad_BSH = self._gradient(step)
        start_s = self._enter(step)
        key = (step.stage, step.batch)
        x_BSH, edge, _ = self._held[key]
        put_off = self._put_off[key] = []
        with deferral.splitting(), deferral.collecting(put_off):
            torch.autograd.backward((edge,), (grad_BSH,))
        self._leave(step, start_s)
        self._pass_back(step, x_BSH)

    def _weight_gradient(self, step: Step) -> None:
        start_s = self._enter(step)
        for work in self._put_off.pop((step.stage, step.batch)):
            work()
        del self._held[step.stage, step.batch]
        self._leave(step, start_s)

    def _send(self, step: Step) -> None:
        kind, stage, batch = step.action
        start_s = time.perf_counter()
        self._wires.send(self._outbox.pop((kind, stage, batch)), step.peer, step.action)
        if self.watch is not None:
            self.watch(Done(step.action, start_s, start_s))

    def _expect(self, step: Step) -> None:
        assert step.arrival is not None
        self._wires.expect(*step.arrival)

    # What goes in and out of compute.

    def _take(self, kind: str, step: Step) -> torch.Tensor:
        if step.arrival is None:
            return self._ready.pop((kind, step.stage, step.batch))
        started_s = time.perf_counter()
        received = self._wires.take(*step.arrival)
        self._waited_s = received.there_s - started_s
        if self.watch is not None:
            self.watch(Done(received.action, received.posted_s, received.there_s))
        return received.x_BSH

    def _gradient(self, step: Step) -> torch.Tensor:
        scale = self._held[step.stage, step.batch][2]
        return self._take("B", step) if scale is None else scale

    def _pass(self, step: Step, kind: str, stage: int, x_BSH: torch.Tensor) -> None:
        """Give an activation or a gradient to a neighbouring stage."""
        if self.schedule.placement[stage] == self._wires.rank:
            self._ready[kind, stage, step.batch] = x_BSH
        else:
            self._outbox[f"SEND_{kind}", step.stage, step.batch] = x_BSH.contiguous()

    def _pass_back(self, step: Step, x_BSH: torch.Tensor | None) -> None:
        if x_BSH is None or not x_BSH.requires_grad:
            return
        grad_BSH, x_BSH.grad = x_BSH.grad, None
        if grad_BSH is None:
            grad_BSH = torch.zeros_like(x_BSH)
        self._pass(step, "B", step.stage - 1, grad_BSH)

    def _enter(self, step: Step) -> float:
        if self._sync is not None:
            self._sync.before(step.action)
        return time.perf_counter()

    def _leave(self, step: Step, start_s: float) -> None:
        if self.watch is not None:
            self.watch(Done(step.action, start_s, time.perf_counter(), self._waited_s))
        self._waited_s = 0.0
        if self._sync is not None:
            self._sync.after(step.action)
