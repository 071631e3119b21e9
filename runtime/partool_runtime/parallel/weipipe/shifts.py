"""Shifts of a ring: weights are received and passed on, gradients are summed and sent to their owners."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from partool.schedule import Action
from partool.schedule.weipipe import GRADIENT_COPIES
from partool_runtime.parallel.pipeline.types import Done
from partool_runtime.parallel.pipeline.wires import TransferError
from partool_runtime.parallel.weipipe.chunks import Chunk
from partool_runtime.parallel.weipipe.lanes import Lane, Ticket
from partool_runtime.parallel.weipipe.ring import Group, PipelineRing
from partool_runtime.torch_internals import collectives


@dataclass(eq=False)
class Buffer:
    """Flat memory of a stage's weights or gradients, and the sends that still read it."""

    flat: torch.Tensor
    leaving: list[tuple[dist.Work, Action, int]] = field(default_factory=list)
    added: Ticket[None] | None = None
    """Job that adds the buffer to a sum; on a GPU the host waits for the job, lest it reuse the buffer too early."""


class LentBuffers:
    """Pool of buffers; the buffer that was returned first is lent first."""

    def __init__(self, count: int, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        for _ in range(count):
            self.give(Buffer(torch.empty(elements, dtype=dtype, device=device)))

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        self._free.put(buffer)

    def take(self, timeout_s: float) -> Buffer | None:
        """Return a free buffer; None if no buffer becomes free within ``timeout_s`` seconds."""
        try:
            return self._free.get(timeout=timeout_s)
        except Empty:
            return None


class Wire:
    """Sends and receives for one rank; errors name the action and the peer, and ended shifts are recorded."""

    def __init__(self, ring: PipelineRing, timeout_s: float, device: torch.device) -> None:
        self.ring, self.timeout_s = ring, timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._ordered: list[tuple[dist.Work, Action, int]] | None = [] if device.type == "cuda" else None
        """On a GPU, transfers that streams wait for and that the host has not seen complete."""
        self.timed_actions: list[Done] = []
        """Shifts of the current step, in the order in which they ended."""

    def send(self, buffer: Buffer, flat: torch.Tensor, group: Group, action: Action, peer: int) -> None:
        """Start to send ``flat``, a part of ``buffer``; the buffer must not change until :meth:`settle`."""
        try:
            work = dist.isend(flat, group=group, group_dst=peer)
        except RuntimeError as error:
            raise TransferError(self.ring.rank, action, peer, _reason(error)) from error
        assert work is not None
        buffer.leaving.append((work, action, peer))
        now = time.perf_counter()
        self.timed_actions.append(Done(action, now, now))

    def receive(self, flat: torch.Tensor, group: Group, action: Action, peer: int) -> Callable[[], None]:
        """Post a receive; return a function that waits for it."""
        posted_s = time.perf_counter()
        try:
            work = dist.irecv(flat, group=group, group_src=peer)
        except RuntimeError as error:
            raise TransferError(self.ring.rank, action, peer, _reason(error)) from error
        assert work is not None

        def wait() -> None:
            self._wait(work, action, peer)
            self.timed_actions.append(Done(action, posted_s, time.perf_counter()))

        return wait

    def settle(self, buffer: Buffer) -> None:
        """Wait until all sends from a buffer are complete."""
        while buffer.leaving:
            self._wait(*buffer.leaving.pop(0))

    def finish(self) -> None:
        """On a GPU, wait until the device has completed all transfers; on a CPU the transfers are already complete."""
        for work, action, peer in self._ordered or ():
            last_s = time.monotonic() + self.timeout_s
            while not collectives.is_complete(work):
                if time.monotonic() > last_s:
                    raise TransferError(self.ring.rank, action, peer, self._timeout_message())
                time.sleep(1e-3)
        if self._ordered:
            self._ordered.clear()

    def _wait(self, work: dist.Work, action: Action, peer: int) -> None:
        started_s = time.monotonic()
        try:
            if self._ordered is not None:
                # With a timeout NCCL's wait blocks the host; without a timeout only the current stream waits.
                work.wait()
                self._ordered.append((work, action, peer))
                return
            work.wait(self._limit)
        except RuntimeError as error:
            timed_out = time.monotonic() - started_s >= self.timeout_s
            raise TransferError(
                self.ring.rank, action, peer, self._timeout_message() if timed_out else _reason(error)
            ) from error

    def _timeout_message(self) -> str:
        return f"nothing moved for {self.timeout_s:g} s"


class TravellingWeights:
    """Stages' weights that pass through this rank: received ahead, sent on at once, and kept until their last use."""

    def __init__(
        self, wire: Wire, chunks: Sequence[Chunk], local_buffers: Mapping[int, Buffer], pool: LentBuffers, lane: Lane
    ) -> None:
        self._wire, self._chunks, self._local_buffers, self._pool = wire, chunks, local_buffers, pool
        self._lane = lane
        self._arrivals: dict[int, Ticket[dict[int, Buffer]]] = {}
        self._filled_buffers: dict[int, Buffer] = {}
        """Used by the lane only: for each stage, the buffer that the stage's latest receive has filled."""
        self._last: Ticket[dict[int, Buffer]] | None = None
        self.sent_elements = 0

    def move(self, shifts: Sequence[tuple[Action, int]], released: frozenset[int]) -> None:
        """Run ``shifts`` (pairs of action and peer) in the background; then release the weights of stages ``released``.

        All receives are posted before the first receive is waited for.
        """
        self._last = ticket = self._lane.submit(lambda: self._moved(shifts, released))
        for action, _ in shifts:
            if action.kind.startswith("RECV"):
                self._arrivals[action.stage] = ticket

    def of(self, stage: int) -> torch.Tensor:
        """Return a stage's flat weights, once they have arrived."""
        if stage in self._local_buffers:
            return self._local_buffers[stage].flat
        return self._cut(stage, self._arrivals[stage].wait()[stage])

    def release(self, stage: int) -> None:
        """Release a stage's received weights."""
        self._pool.give(self._arrivals.pop(stage).wait()[stage])

    def finish(self) -> None:
        """Wait until all shifts are done and this rank's own weights may change."""
        if self._last is not None:
            self._last.wait()
        for buffer in self._local_buffers.values():
            self._wire.settle(buffer)

    def close(self) -> None:
        """End the lane."""
        self._lane.close()

    def _moved(self, shifts: Sequence[tuple[Action, int]], released: frozenset[int]) -> dict[int, Buffer]:
        waits: dict[Action, Callable[[], None]] = {}
        # Transfers are posted in the order of the list, so that ranks whose hosts wait for their devices close no
        # circle: see partool.schedule.weipipe.with_shifts.
        for action, peer in shifts:
            if action.kind.startswith("RECV"):
                waits[action] = self._post(action, peer)
            elif peer == 0:
                self._send(action, peer, self._wire.ring.deal)
        for action, peer in shifts:
            if action in waits:
                waits[action]()
            elif peer != 0:
                self._send(action, peer, self._wire.ring.relay)
        for stage in released:
            self._pool.give(self._filled_buffers[stage])
        return dict(self._filled_buffers)

    def _post(self, action: Action, peer: int) -> Callable[[], None]:
        buffer = self._pool.take(self._wire.timeout_s)
        if buffer is None:
            raise TransferError(self._wire.ring.rank, action, peer, "no buffer is free to receive it")
        self._wire.settle(buffer)
        self._filled_buffers[action.stage] = buffer
        group = self._wire.ring.deal if self._wire.ring.rank == 0 else self._wire.ring.relay
        return self._wire.receive(self._cut(action.stage, buffer), group, action, peer)

    def _send(self, action: Action, peer: int, group: Group) -> None:
        buffer = (
            self._local_buffers[action.stage]
            if action.stage in self._local_buffers
            else self._filled_buffers[action.stage]
        )
        flat = self._cut(action.stage, buffer)
        self._wire.send(buffer, flat, group, action, peer)
        self.sent_elements += flat.numel()

    def _cut(self, stage: int, buffer: Buffer) -> torch.Tensor:
        return buffer.flat[: self._chunks[stage].weight_elements]


class Gradients:
    """Sums stages' gradients: this rank adds its part to the received sum, and sends it on unless it owns the stage.

    All sums are computed in the order of the action list, so that results are reproducible bit by bit.
    """

    def __init__(self, wire: Wire, chunks: Sequence[Chunk], home: Mapping[int, torch.Tensor], lane: Lane) -> None:
        self._wire, self._chunks, self._home = wire, chunks, home
        example = next(iter(home.values()))
        most = max(chunk.gradient_elements for chunk in chunks)
        self._pool = LentBuffers(GRADIENT_COPIES - 1, most, example.dtype, example.device)
        self._inbox = torch.empty(most, dtype=example.dtype, device=example.device)
        self._lane = lane
        self._jobs: deque[Ticket[None]] = deque()
        self._sums: dict[int, Buffer] = {}
        """Used by the lane only: sums that are not sent yet."""
        self.sent_elements = 0

    def room(self) -> Buffer:
        """Return a buffer for a stage's gradients, to be handed to :meth:`add`."""
        while (buffer := self._pool.take(0)) is None:
            self._jobs.popleft().wait()
        if buffer.added is not None:
            buffer.added.wait()
            buffer.added = None
        self._wire.settle(buffer)
        return buffer

    def add(self, stage: int, buffer: Buffer) -> None:
        """Add this rank's gradients of one micro-batch to the stage's sum."""
        buffer.added = self._submit(lambda: self._added(stage, buffer))

    def shift(self, action: Action, peer: int) -> None:
        """For a receive, add the received sum of a stage to this rank's sum; for a send, send this rank's sum."""
        if self._chunks[action.stage].gradient_elements:
            job = self._received if action.kind == "RECV_G" else self._sent
            self._submit(lambda: job(action, peer))

    def finish(self) -> None:
        """Wait until this rank has sent all sums of other ranks' stages and received all sums of its own stages."""
        while self._jobs:
            self._jobs.popleft().wait()

    def close(self) -> None:
        """End the lane."""
        self._lane.close()

    def _submit(self, job: Callable[[], None]) -> Ticket[None]:
        while len(self._jobs) > 2 * GRADIENT_COPIES and self._jobs[0].ended:
            self._jobs.popleft().wait()
        ticket = self._lane.submit(job)
        self._jobs.append(ticket)
        return ticket

    def _added(self, stage: int, buffer: Buffer) -> None:
        flat = self._cut(stage, buffer.flat)
        if stage in self._home:
            self._home[stage].add_(flat)
        elif stage in self._sums:
            self._cut(stage, self._sums[stage].flat).add_(flat)
        else:
            self._sums[stage] = buffer
            return
        self._pool.give(buffer)

    def _received(self, action: Action, peer: int) -> None:
        ring, stage = self._wire.ring, action.stage
        group = ring.home if peer == ring.size - 1 else ring.gradients
        flat = self._cut(stage, self._inbox)
        self._wire.receive(flat, group, action, peer)()
        into = self._home[stage] if stage in self._home else self._cut(stage, self._sums[stage].flat)
        into.add_(flat)

    def _sent(self, action: Action, peer: int) -> None:
        ring, buffer = self._wire.ring, self._sums.pop(action.stage)
        flat = self._cut(action.stage, buffer.flat)
        self._wire.send(buffer, flat, ring.home if ring.rank == ring.size - 1 else ring.gradients, action, peer)
        self.sent_elements += flat.numel()
        self._pool.give(buffer)

    def _cut(self, stage: int, flat: torch.Tensor) -> torch.Tensor:
        return flat[: self._chunks[stage].gradient_elements]


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0]
