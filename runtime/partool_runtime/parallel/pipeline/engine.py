"""Executes a schedule's lists: stages here, activations and gradients over point-to-point transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch.autograd.graph import get_gradient_edge

from partool.schedule import COMPUTE, Action, Schedule, cell, forward_only, receive_depth, remap, validate
from partool_runtime import deferral
from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.pipeline.clock import clock_for, received
from partool_runtime.parallel.pipeline.handover import Handover, Held, Kept, unfinished
from partool_runtime.parallel.pipeline.program import Program, Step, compile_program, halved, until
from partool_runtime.parallel.pipeline.split import split_linears
from partool_runtime.parallel.pipeline.types import Done, Stage, StageSync, Watch
from partool_runtime.parallel.pipeline.wires import TransferError, Wires

_Bound = tuple[Program, tuple[tuple[Callable[[Step], None], Step], ...]]
"""A program, and which method does which of its steps."""
_WHOLE = nullcontext()


class Engine:
    """One rank of a pipeline whose stages stay and whose activations travel.

    ``stages`` are this rank's, by number. ``sync`` prepares and follows up on compute actions. Losses are sums and
    gradients are summed: :meth:`step` leaves in each parameter's ``grad`` what one process would after
    ``(weight * sum of the losses).backward()``. Raises ``ValueError`` for an unsound schedule, as a wrong order of
    transfers would give wrong gradients and no error.
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
        self._wires, self._sync = wires, sync
        self.watch = watch
        """Told of every action once its times are known; may be changed between steps."""
        self._clock = clock_for(wires.boundary.device)
        self._kept = Kept()
        self._micro: Sequence[MicroBatch] = ()
        self._weight = self._loss = torch.zeros(())
        self._waited_s = 0.0
        self.peak_live = 0
        """Most (stage, micro-batch) pairs whose activations were held at once in the latest step."""
        self._settle(schedule, stages)

    def _settle(self, schedule: Schedule, stages: Mapping[int, Stage]) -> None:
        rank = self._wires.rank
        if set(stages) != set(schedule.on_rank(rank)):
            raise ValueError(f"rank {rank} was given stages {sorted(stages)}, its own are {schedule.on_rank(rank)}")
        self.schedule, self._stages = schedule, dict(stages)
        self._halved = halved(schedule)
        for stage in {stage for stage, _ in self._halved} & self._stages.keys():
            split_linears(self._stages[stage].module)
        # One more than the lists need, so that a message can travel while another one is worked on.
        self._depth = max(2, receive_depth(schedule))
        self._whole = self._bound(schedule)
        self._forward: dict[int, _Bound] = {}
        self._rest: Schedule | None = None

    def step(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> torch.Tensor:
        """Run one step; return the sum of the token losses seen on this rank, a float64 scalar.

        ``weight`` is a scalar that scales the gradients. Raises :class:`TransferError` where a peer hangs or is gone.
        """
        self.start(micro_batches, weight)
        self.run()
        return self.finish()

    def start(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> None:
        """Begin a step, see :meth:`step`; :meth:`run` and :meth:`finish` do the rest."""
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"the schedule has {self.schedule.micro_batches} micro-batches, not {len(micro_batches)}")
        self._begin(micro_batches, weight)
        self._rest = self.schedule

    def run(self, done: Sequence[int] | None = None) -> None:
        """Run the step to its end, or until each rank has done so many of the actions that are left (``done``).

        All ranks are given the same numbers, such as :func:`partool.schedule.after` returns. Then nothing is on the
        wires, and :meth:`run` goes on with what is left, before or after :meth:`move`.
        """
        if self._rest is None:
            raise ValueError("no step has been started")
        if done is None:
            self._execute(self._whole if self._rest is self.schedule else self._bound(self._rest))
            self._rest = None
        else:
            self._execute(self._bound(until(self._rest, done)))
            self._rest = remap(self._rest, done, self._rest.placement)

    def move(self, placement: Sequence[int], stages: Mapping[int, Stage]) -> None:
        """Go on with another map of stages to ranks, in this step and later ones; all ranks do so between two runs.

        ``stages`` are this rank's under the new map. One that was elsewhere gets its parameters, buffers and gradients
        from there; forward passes whose backward pass is to come are done again from their inputs.
        """
        rest, rank = self._rest, self._wires.rank
        if rest is None:
            raise ValueError("no step has been started")
        left = {action for actions in rest.lists for action in actions}
        done = {a for actions in self.schedule.lists for a in actions if a.kind in COMPUTE and a not in left}
        handover = Handover(self._kept, self._wires)
        moved = [s for s, (old, new) in enumerate(zip(rest.placement, placement, strict=True)) if old != new]
        for stage in moved:
            work = unfinished(self.schedule, done, stage)
            if rest.placement[stage] == rank:
                handover.give(placement[stage], stage, self._stages[stage].module, work)
            elif placement[stage] == rank:
                handover.take(rest.placement[stage], stage, stages[stage].module, work)
        self._wires.finish()
        none = [0] * rest.ranks
        rest = remap(rest, none, placement)
        self._settle(remap(self.schedule, none, placement), stages)
        self._rest = rest
        for step in self._bound(rest)[0].steps:
            if step.stage in moved and step.action.kind in ("B", "I"):
                self._again(step)

    def _again(self, step: Step) -> None:
        held = self._kept.held.get((step.stage, step.batch))
        if held is not None and held.edge is None:
            forward = Action("F", step.stage, step.batch)
            if self._sync is not None:
                self._sync.before(forward)
            self._hold(step, held.x_BSH)
            if self._sync is not None:
                self._sync.after(forward)

    def finish(self) -> torch.Tensor:
        """End a step that has run; return what :meth:`step` does."""
        self._wires.finish()
        if self._sync is not None:
            self._sync.finish()
        if self.watch is not None:
            self._clock.tell(self.watch)
        return self._loss

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return the sum of the token losses seen on this rank, without gradients; any number of micro-batches."""
        self._begin(micro_batches, self._weight)
        count = len(micro_batches)
        if count not in self._forward:
            self._forward[count] = self._bound(forward_only(self.schedule, count))
        self._execute(self._forward[count])
        return self.finish()

    def _begin(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor) -> None:
        self._micro, self._weight = micro_batches, weight
        self._loss = torch.zeros((), dtype=torch.float64, device=self._wires.boundary.device)
        self._kept = Kept()
        self.peak_live = 0
        if self.watch is not None:
            self._clock.begin()

    def _execute(self, bound: _Bound) -> None:
        program, calls = bound
        self._wires.begin(program.inbound, self._depth)
        step = None
        try:
            for do, step in calls:
                do(step)
            for action, arrival in program.unclaimed:
                kind: Literal["F", "B"] = "F" if action.kind == "RECV_F" else "B"
                self._kept.ready[kind, action.stage, action.micro_batch] = self._wires.take(*arrival).x_BSH
        except TransferError:
            raise
        except Exception as error:
            if step is not None:
                error.add_note(f"pipeline rank {self._wires.rank}, action {cell(step.action)}")
            raise

    def _bound(self, schedule: Schedule) -> _Bound:
        program = compile_program(schedule, self._wires.rank, self._halved)
        calls: dict[str, Callable[[Step], None]] = {
            "F": self._evaluate,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "SEND_F": self._send,
            "SEND_B": self._send,
            "RECV_F": self._expect,
            "RECV_B": self._expect,
        }
        train = calls | {"F": self._train}
        return program, tuple(((train if step.trained else calls)[step.action.kind], step) for step in program.steps)

    # One function per kind of action.

    def _evaluate(self, step: Step) -> None:
        x_BSH = None if step.first else self._take("F", step)
        start = self._enter(step)
        with torch.no_grad():
            y_BSH = self._stages[step.stage](x_BSH, self._micro[step.batch])
        self._leave(step, start)
        self._hand_on(step, y_BSH)

    def _train(self, step: Step) -> None:
        x_BSH = None if step.first else self._take("F", step)
        start = self._enter(step)
        y_BSH = self._hold(step, x_BSH)
        self._leave(step, start)
        self._hand_on(step, y_BSH)

    def _hold(self, step: Step, x_BSH: torch.Tensor | None) -> torch.Tensor:
        """Run a stage forward and hold what its backward pass needs; return the output without its graph."""
        if x_BSH is not None:
            x_BSH.requires_grad_(step.passes_back)
        with deferral.splitting() if step.split else _WHOLE:
            y_BSH = self._stages[step.stage](x_BSH, self._micro[step.batch])
        scale = self._weight.to(y_BSH.dtype) if step.last else None
        held = self._kept.held
        held[step.stage, step.batch] = Held(x_BSH, get_gradient_edge(y_BSH), scale)
        self.peak_live = max(self.peak_live, len(held))
        return y_BSH.detach()

    def _hand_on(self, step: Step, y_BSH: torch.Tensor) -> None:
        if step.last:
            self._loss += y_BSH
        else:
            self._pass(step, "F", step.stage + 1, y_BSH)

    def _backward(self, step: Step) -> None:
        held = self._kept.held[step.stage, step.batch]
        grad_BSH = self._take("B", step) if held.scale is None else held.scale
        start = self._enter(step)
        assert held.edge is not None
        torch.autograd.backward((held.edge,), (grad_BSH,))
        del self._kept.held[step.stage, step.batch]
        self._leave(step, start)
        self._pass_back(step, held)

    def _input_gradient(self, step: Step) -> None:
        held = self._kept.held[step.stage, step.batch]
        grad_BSH = self._take("B", step) if held.scale is None else held.scale
        start = self._enter(step)
        assert held.edge is not None
        with deferral.splitting(), deferral.collecting(held.put_off):
            torch.autograd.backward((held.edge,), (grad_BSH,))
        self._leave(step, start)
        self._pass_back(step, held)
        held.x_BSH = held.edge = None

    def _weight_gradient(self, step: Step) -> None:
        start = self._enter(step)
        for work in self._kept.held.pop((step.stage, step.batch)).put_off:
            work()
        self._leave(step, start)

    def _send(self, step: Step) -> None:
        self._wires.send(self._kept.outbox.pop(step.action), step.neighbour, step.action)
        if self.watch is not None:
            now_s = time.perf_counter()
            self.watch(Done(step.action, now_s, now_s))

    def _expect(self, step: Step) -> None:
        assert step.arrival is not None
        self._wires.expect(*step.arrival)

    # What goes into compute and comes out of it.

    def _take(self, kind: Literal["F", "B"], step: Step) -> torch.Tensor:
        if step.arrival is None:
            return self._kept.ready.pop((kind, step.stage, step.batch))
        if self.watch is None:
            return self._wires.take(*step.arrival).x_BSH
        x_BSH, self._waited_s = received(self._wires, step.arrival, self.watch)
        return x_BSH

    def _pass(self, step: Step, kind: Literal["F", "B"], stage: int, x_BSH: torch.Tensor) -> None:
        """Give an activation or a gradient to a neighbouring stage."""
        if step.neighbour == self._wires.rank:
            self._kept.ready[kind, stage, step.batch] = x_BSH
            return
        boundary = self._wires.boundary
        if x_BSH.shape != boundary.shape or x_BSH.dtype != boundary.dtype:
            raise ValueError(f"stage {step.stage} passes on {x_BSH.dtype} {list(x_BSH.shape)}, agreed is {boundary}")
        send = Action("SEND_F" if kind == "F" else "SEND_B", step.stage, step.batch)
        self._kept.outbox[send] = x_BSH.contiguous()

    def _pass_back(self, step: Step, held: Held) -> None:
        x_BSH = held.x_BSH
        if x_BSH is None or not step.passes_back:
            return
        grad_BSH, x_BSH.grad = x_BSH.grad, None
        self._pass(step, "B", step.stage - 1, torch.zeros_like(x_BSH) if grad_BSH is None else grad_BSH)

    def _enter(self, step: Step) -> object:
        if self._sync is not None:
            self._sync.before(step.action)
        return None if self.watch is None else self._clock.mark()

    def _leave(self, step: Step, start: object) -> None:
        if self.watch is not None:
            self._clock.done(step.action, start, self._waited_s, self.watch)
            self._waited_s = 0.0
        if self._sync is not None:
            self._sync.after(step.action)
