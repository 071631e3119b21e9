"""Forward and backward passes of a step in a ring: the executor of WeiPipe's action lists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from partool.schedule import Schedule
from partool.schedule.weipipe import room, weipipe
from partool_runtime.data.batches import MicroBatch
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.passes import Timer
from partool_runtime.parallel.pipeline.clock import clock_for
from partool_runtime.parallel.pipeline.types import Watch, split_linears
from partool_runtime.parallel.weipipe.chunks import Chunk
from partool_runtime.parallel.weipipe.compute import Computation, RingModel
from partool_runtime.parallel.weipipe.lanes import Lane
from partool_runtime.parallel.weipipe.program import Compute, ShiftGroup, Step, compile_program
from partool_runtime.parallel.weipipe.ring import PipelineRing
from partool_runtime.parallel.weipipe.shifts import Buffer, Gradients, LentBuffers, TravellingWeights, Wire


class WeiPipePasses:
    """One rank of a ring around which weights are sent; implements :class:`partool_runtime.parallel.passes.Passes`.

    Micro-batch ``m`` of a step runs on rank ``m mod ranks``. Summed gradients of the rank's own stages are stored in
    the parameters' ``grad``. Gradients of the outer modules, which every rank has, are summed over the ring and also
    stored in ``grad``. ``replicas`` are the ranks with the same place in all rings, over which the stages' gradients
    are summed; None means that there is one ring. ``everyone`` are the ranks of all rings, over which the outer
    modules' gradients are summed; None means the ring's group for weights, which is idle at that time. ``dtype`` is the
    type of computation and of sent weights; gradients are sent and summed in the parameters' type.

    Raises ``ValueError`` where schedule, ring and model do not fit.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: RingModel,
        ring: PipelineRing,
        dtype: torch.dtype,
        *,
        replicas: dist.ProcessGroup | None = None,
        everyone: dist.ProcessGroup | None = None,
        watch: Watch | None = None,
        timeout_s: float = 600.0,
        lane: Callable[[str, torch.device], Lane] = Lane,
    ) -> None:
        _check(schedule, model, ring)
        self.schedule, self._model, self._ring = schedule, model, ring
        if replicas is not None and everyone is None:
            raise ValueError("gradients of replicas are summed, but not those of the outer modules of all rings")
        self._replicas, self._watch = replicas, watch
        self._watching = False
        self._program = compile_program(schedule, ring.rank)
        self._evaluation: dict[int, tuple[Step, ...]] = {}
        self._chunks = [Chunk(stage) for stage in model.stages]
        self._outer = _distinct(model)
        self._everyone = ring.relay if everyone is None else everyone
        mine = schedule.on_rank(ring.rank)
        example = next(model.stages[mine[0]].parameters())
        self._weight_buffers = {
            stage: Buffer(torch.empty(self._chunks[stage].weight_elements, dtype=dtype, device=example.device))
            for stage in mine
        }
        self._home = {
            stage: example.new_zeros(self._chunks[stage].gradient_elements, requires_grad=False) for stage in mine
        }
        self._example, self._device = example, example.device
        self._clock = clock_for(self._device)
        self._wire = Wire(ring, timeout_s, self._device)
        buffer_count = max(room(one, ring.rank).weights for one in (schedule, self._forward_only(ring.size)))
        longest = max(chunk.weight_elements for chunk in self._chunks)
        lent = LentBuffers(buffer_count, longest, dtype, example.device)
        moves, sums = lane("partool-weights", example.device), lane("partool-gradients", example.device)
        self._weights = TravellingWeights(self._wire, self._chunks, self._weight_buffers, lent, moves)
        self._gradients = Gradients(self._wire, self._chunks, self._home, sums)
        self._halved = any(step.action.kind == "I" for step in self._program if isinstance(step, Compute))
        if self._halved:
            for module in (*model.stages, model.last):
                split_linears(module)
        self._computation = Computation(model, self._chunks, dtype, schedule.trained_from)
        self._predicting = Computation(model, self._chunks, dtype, schedule.stages)

    @property
    def copies_bytes(self) -> int:
        """Bytes of this rank's weight copies in the type of computation; the parameters themselves are not counted."""
        return sum(buffer.flat.numel() * buffer.flat.itemsize for buffer in self._weight_buffers.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that stay on this rank: gradients of its own stages and of the outer modules."""
        gradients = [*self._home.values(), *(p.grad for p in self._outer if p.grad is not None)]
        return sum(gradient.numel() * gradient.itemsize for gradient in gradients)

    @property
    def sent(self) -> tuple[int, int]:
        """Numbers of weight and gradient elements that this rank has sent in the ring; sums over replicas do not count.

        See :func:`partool.schedule.weipipe.volume`.
        """
        return self._weights.sent_elements, self._gradients.sent_elements

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights and gradients that this rank has sent in the ring; sums over replicas do not count."""
        weights, gradients = self.sent
        return weights * next(iter(self._weight_buffers.values())).flat.itemsize + gradients * self._example.itemsize

    @property
    def peak_live(self) -> int:
        """Maximum number of (stage, micro-batch) pairs kept for a backward pass at once in the latest step."""
        return self._computation.peak_live

    def step(self, batch: Sequence[MicroBatch], weight: torch.Tensor, timer: Timer) -> torch.Tensor:
        """See :class:`Passes`. Raises ``TransferError`` if a peer hangs or has ended."""
        if len(batch) != self.schedule.micro_batches:
            raise ValueError(f"the schedule has {self.schedule.micro_batches} micro-batches, not {len(batch)}")
        for flat in self._home.values():
            flat.zero_()
        self._computation.begin(batch, weight)
        self._watching = self._watch is not None
        self._run(self._program, self._computation, timer)
        with timer("pipeline_bubble"):
            self._finish()
        self._tell()
        self._watching = False
        with timer("gradient_sync"):
            self._sum()
        return self._computation.loss_sum

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """See :class:`Passes`. As many micro-batches are processed at a time as the ring has ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        waiting: list[MicroBatch] = []
        for micro in batches:
            if stopping():
                return None
            waiting.append(micro)
            if len(waiting) == self._ring.size:
                total += self._predicted(waiting)
                waiting = []
        return total + self._predicted(waiting) if waiting else total

    def close(self) -> None:
        """End the threads that run the shifts."""
        self._weights.close()
        self._gradients.close()

    def _predicted(self, batch: Sequence[MicroBatch]) -> torch.Tensor:
        count = len(batch)
        if count not in self._evaluation:
            self._evaluation[count] = compile_program(self._forward_only(count), self._ring.rank)
        self._predicting.begin(batch, torch.ones((), device=self._device))
        self._run(self._evaluation[count], self._predicting, lambda _: nullcontext())
        self._finish()
        return self._predicting.loss_sum

    def _forward_only(self, micro_batches: int) -> Schedule:
        schedule = self.schedule
        return weipipe(schedule.name, schedule.ranks, micro_batches, schedule.chunks, schedule.stages)

    def _run(self, program: Sequence[Step], computation: Computation, timer: Timer) -> None:
        for stage, buffer in self._weight_buffers.items():
            self._chunks[stage].pack(self._model.stages[stage], buffer.flat)
        self._wire.timed_actions.clear()
        if self._watching:
            self._clock.begin()
        ended_s = time.perf_counter()
        for step in program:
            if isinstance(step, ShiftGroup):
                self._weights.move(step.shifts, step.releases)
            elif isinstance(step, Compute):
                ended_s = self._compute(step, computation, timer, ended_s)
            else:
                self._gradients.shift(step.action, step.peer)

    def _compute(self, step: Compute, computation: Computation, timer: Timer, ended_s: float) -> float:
        """Run a compute action; return the time at which it ended, in seconds."""
        kind, stage, _ = action = step.action
        flat = None if kind == "W" else self._weights.of(stage)
        sums = kind in ("B", "W") and self._chunks[stage].gradient_elements > 0
        into = self._gradients.room() if sums else None
        waited_s = time.perf_counter() - ended_s
        start = self._clock.mark() if self._watching else None
        with timer("forward" if kind == "F" else "backward"):
            if kind == "F" and flat is not None:
                computation.forward(action, flat, keeps=step.keeps, halved=self._halved)
            elif flat is not None:
                computation.backward(action, flat)
            if kind in ("B", "W"):
                computation.weights(action, None if into is None else into.flat)
        if self._watching:
            self._clock.record_action(action, start, waited_s, self._wire.timed_actions.append)
        ended_s = time.perf_counter()
        if into is not None:
            self._gradients.add(stage, into)
        if step.releases:
            self._weights.release(stage)
        return ended_s

    def _finish(self) -> None:
        self._weights.finish()
        self._gradients.finish()
        self._wire.finish()

    def _tell(self) -> None:
        if self._watch is not None:
            self._clock.tell(self._wire.timed_actions.append)
            for timed in sorted(self._wire.timed_actions, key=lambda timed: timed.stop_s):
                self._watch(timed)

    def _sum(self) -> None:
        """Sum the outer modules' gradients over the ring, and all gradients over replicas; set the stages' ``grad``."""
        for parameter in self._outer:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # One sum over all rings: rings that sum separately may differ in the last bit.
            sum_over(parameter.grad, self._everyone)
        for stage, flat in self._home.items():
            if self._replicas is not None and flat.numel():
                sum_over(flat, self._replicas)
            parameters = dict(self._model.stages[stage].named_parameters())
            for name, gradient in self._chunks[stage].gradients(flat).items():
                parameters[name].grad = gradient


def _distinct(model: RingModel) -> list[nn.Parameter]:
    """Return the trained parameters of the outer modules; shared parameters are listed only once."""
    distinct = {id(p): p for p in chain(model.first.parameters(), model.last.parameters()) if p.requires_grad}
    return list(distinct.values())


def _check(schedule: Schedule, model: RingModel, ring: PipelineRing) -> None:
    if schedule.ranks != ring.size:
        raise ValueError(f"the schedule is for {schedule.ranks} ranks, the ring has {ring.size}")
    if schedule.stages != len(model.stages):
        raise ValueError(f"the schedule has {schedule.stages} stages, the model {len(model.stages)}")
    if schedule.trained_from and any(p.requires_grad for p in model.first.parameters()):
        raise ValueError(f"the embedding is trained, so backward passes cannot end at stage {schedule.trained_from}")
