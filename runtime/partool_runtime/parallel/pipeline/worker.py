"""Executes the actions of a pipeline rank: takes the inputs of passes, runs the passes and hands on the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge

from partool.schedule import Action, cell
from partool_runtime import deferral
from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.pipeline.clock import clock_for, received
from partool_runtime.parallel.pipeline.handover import Kept, KeptPass
from partool_runtime.parallel.pipeline.program import Program, ProgramStep
from partool_runtime.parallel.pipeline.types import Done, Stage, StageSync, Watch
from partool_runtime.parallel.pipeline.wires import TransferError, Wires

Calls = tuple[tuple[Callable[[ProgramStep], None], ProgramStep], ...]
"""Pairs of a worker's method and the step that the method executes."""
_UNDIVIDED = nullcontext()


class Worker:
    """One rank's stages, and the state of the current step."""

    def __init__(self, wires: Wires, sync: StageSync | None, watch: Watch | None) -> None:
        self.wires, self._sync, self.watch = wires, sync, watch
        self.stages: Mapping[int, Stage] = {}
        self.kept = Kept()
        self.loss = torch.zeros(())
        """Sum of the token losses so far, float64."""
        self.peak_live = 0
        """Maximum number of (stage, micro-batch) pairs whose activations were held at once."""
        self._micro: Sequence[MicroBatch] = ()
        self._weight = torch.ones(())
        self._clock = clock_for(wires.boundary.device)
        self._waited_s = 0.0

    def begin(self, micro_batches: Sequence[MicroBatch], weight: torch.Tensor | None) -> None:
        """Start a step, whose gradients are scaled by ``weight``, or an evaluation if ``weight`` is None."""
        self._micro = micro_batches
        self._weight = self._weight if weight is None else weight
        self.loss = torch.zeros((), dtype=torch.float64, device=self.wires.boundary.device)
        self.kept = Kept()
        self.peak_live = 0
        if self.watch is not None:
            self._clock.begin()

    def execute(self, program: Program, calls: Calls) -> None:
        """Run an action list; messages that the list receives but does not use are kept for a later list."""
        self.wires.begin(program.inbound)
        step = None
        try:
            for do, step in calls:
                do(step)
            self.wires.post(program.last_posts)
            for action, arrival in program.unclaimed:
                kind: Literal["F", "B"] = "F" if action.kind == "RECV_F" else "B"
                self.kept.ready[kind, action.stage, action.micro_batch] = self.wires.take(*arrival).x_BSH
        except TransferError:
            raise
        except Exception as error:
            if step is not None:
                error.add_note(f"pipeline rank {self.wires.rank}, action {cell(step.action)}")
            raise

    def finish(self) -> None:
        """End a step: complete all sends, release gathered parameters, report all times."""
        self.wires.finish()
        if self._sync is not None:
            self._sync.finish()
        if self.watch is not None:
            self._clock.tell(self.watch)

    def calls(self, program: Program) -> Calls:
        """Return (method, step) for each step of a program, so that the worker's methods are looked up only once.

        Receives are posted where the program says, which need not be where the list receives the message.
        """
        by_kind: dict[str, Callable[[ProgramStep], None]] = {
            "F": self._infer,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "SEND_F": self._send,
            "SEND_B": self._send,
        }
        train = by_kind | {"F": self._train}
        pairs: list[tuple[Callable[[ProgramStep], None], ProgramStep]] = []
        for step in program.steps:
            if step.posts:
                pairs.append((self._post, step))
            if not step.action.kind.startswith("RECV"):
                pairs.append(((train if step.trained else by_kind)[step.action.kind], step))
        return tuple(pairs)

    def recompute_forward(self, step: ProgramStep) -> None:
        """Repeat a forward pass whose graph stayed on another rank, so that its backward pass can run here."""
        kept_pass = self.kept.in_flight.get((step.stage, step.batch))
        if kept_pass is None or kept_pass.edge is not None or step.action.kind == "W":
            return
        forward = Action("F", step.stage, step.batch)
        if self._sync is not None:
            self._sync.before(forward)
        self._hold(step, kept_pass.x_BSH)
        if self._sync is not None:
            self._sync.after(forward)

    # One function per kind of action.

    def _infer(self, step: ProgramStep) -> None:
        x_BSH = None if step.first else self._take("F", step)
        start = self._enter(step)
        with torch.no_grad():
            y_BSH = self.stages[step.stage](x_BSH, self._micro[step.batch])
        self._leave(step, start)
        self._hand_on(step, y_BSH)

    def _train(self, step: ProgramStep) -> None:
        x_BSH = None if step.first else self._take("F", step)
        start = self._enter(step)
        y_BSH = self._hold(step, x_BSH)
        self._leave(step, start)
        self._hand_on(step, y_BSH)

    def _backward(self, step: ProgramStep) -> None:
        kept_pass = self.kept.in_flight[step.stage, step.batch]
        grad_BSH = self._take("B", step) if kept_pass.scale is None else kept_pass.scale
        start = self._enter(step)
        assert kept_pass.edge is not None
        torch.autograd.backward((kept_pass.edge,), (grad_BSH,))
        del self.kept.in_flight[step.stage, step.batch]
        self._leave(step, start)
        self._hand_back(step, kept_pass)

    def _input_gradient(self, step: ProgramStep) -> None:
        kept_pass = self.kept.in_flight[step.stage, step.batch]
        grad_BSH = self._take("B", step) if kept_pass.scale is None else kept_pass.scale
        start = self._enter(step)
        assert kept_pass.edge is not None
        # Splitting is enabled here, too: recomputed layers must keep the same tensors as in their forward pass.
        with deferral.splitting(), deferral.collecting(kept_pass.put_off):
            torch.autograd.backward((kept_pass.edge,), (grad_BSH,))
        self._leave(step, start)
        self._hand_back(step, kept_pass)
        kept_pass.x_BSH = kept_pass.edge = None

    def _weight_gradient(self, step: ProgramStep) -> None:
        start = self._enter(step)
        for work in self.kept.in_flight.pop((step.stage, step.batch)).put_off:
            work()
        self._leave(step, start)

    def _send(self, step: ProgramStep) -> None:
        self.wires.send(self.kept.outbox.pop(step.action), step.neighbour, step.action)
        if self.watch is not None:
            now_s = time.perf_counter()
            self.watch(Done(step.action, now_s, now_s))

    def _post(self, step: ProgramStep) -> None:
        self.wires.post(step.posts)

    # Inputs and outputs of compute.

    def _hold(self, step: ProgramStep, x_BSH: torch.Tensor | None) -> torch.Tensor:
        """Run a stage's forward pass, keep the tensors for its backward pass, and return the output without a graph."""
        if x_BSH is not None:
            x_BSH.requires_grad_(step.passes_back)
        with deferral.splitting() if step.split else _UNDIVIDED:
            y_BSH = self.stages[step.stage](x_BSH, self._micro[step.batch])
        scale = self._weight.to(y_BSH.dtype) if step.last else None
        in_flight = self.kept.in_flight
        in_flight[step.stage, step.batch] = KeptPass(x_BSH, get_gradient_edge(y_BSH), scale)
        self.peak_live = max(self.peak_live, len(in_flight))
        return y_BSH.detach()

    def _take(self, kind: Literal["F", "B"], step: ProgramStep) -> torch.Tensor:
        if step.arrival is None:
            return self.kept.ready.pop((kind, step.stage, step.batch))
        if self.watch is None:
            return self.wires.take(*step.arrival).x_BSH
        x_BSH, self._waited_s = received(self.wires, step.arrival, self.watch)
        return x_BSH

    def _hand_on(self, step: ProgramStep, y_BSH: torch.Tensor) -> None:
        if step.last:
            self.loss += y_BSH
        else:
            self._pass(step, "F", step.stage + 1, y_BSH)

    def _hand_back(self, step: ProgramStep, kept_pass: KeptPass) -> None:
        x_BSH = kept_pass.x_BSH
        if x_BSH is None or not step.passes_back:
            return
        grad_BSH, x_BSH.grad = x_BSH.grad, None
        self._pass(step, "B", step.stage - 1, torch.zeros_like(x_BSH) if grad_BSH is None else grad_BSH)

    def _pass(self, step: ProgramStep, kind: Literal["F", "B"], stage: int, x_BSH: torch.Tensor) -> None:
        """Pass an activation or a gradient to the next or previous stage, which may be on this or on another rank."""
        if step.neighbour == self.wires.rank:
            self.kept.ready[kind, stage, step.batch] = x_BSH
            return
        boundary = self.wires.boundary
        if x_BSH.shape != boundary.shape or x_BSH.dtype != boundary.dtype:
            raise ValueError(f"stage {step.stage} passes on {x_BSH.dtype} {list(x_BSH.shape)}, agreed is {boundary}")
        send = Action("SEND_F" if kind == "F" else "SEND_B", step.stage, step.batch)
        self.kept.outbox[send] = x_BSH.contiguous()

    def _enter(self, step: ProgramStep) -> Any:
        if self._sync is not None:
            self._sync.before(step.action)
        return None if self.watch is None else self._clock.mark()

    def _leave(self, step: ProgramStep, start: Any) -> None:
        if self.watch is not None:
            self._clock.record_action(step.action, start, self._waited_s, self.watch)
            self._waited_s = 0.0
        if self._sync is not None:
            self._sync.after(step.action)
