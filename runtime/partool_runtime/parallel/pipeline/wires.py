"""Point-to-point transfers between the ranks of a pipeline: posted ahead, in reused buffers, within a timeout."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from partool.schedule import Action, cell
from partool_runtime.parallel.pipeline.types import Boundary
from partool_runtime.torch_internals import storage_users

Group = dist.ProcessGroup


class TransferError(RuntimeError):
    """A transfer that did not happen: the peer hangs or is gone. A retry may help."""

    def __init__(self, rank: int, action: Action, peer: int, reason: str) -> None:
        way = f"to pipeline rank {peer}" if action.kind.startswith("SEND") else f"from pipeline rank {peer}"
        super().__init__(
            f"pipeline rank {rank}, {cell(action)} (stage {action.stage}, micro-batch {action.micro_batch}) {way}: "
            f"{reason}"
        )
        self.rank, self.action, self.peer, self.reason = rank, action, peer, reason


class Received(NamedTuple):
    """A message and when it was there."""

    action: Action
    x_BSH: torch.Tensor  # noqa: N815
    posted_s: float
    there_s: float


def open_groups(pipelines: Sequence[Sequence[int]]) -> tuple[Group, Group]:
    """Return the process groups of this rank's pipeline for messages to higher ranks and to lower ranks.

    Every rank of the world calls this with the same lists of global ranks. Messages that cross each other have a
    communicator each: on one, a GPU works transfers off in the order in which they are posted, and a send that waits
    for its receive would hold up the receive that the peer waits for.
    """
    mine: list[Group] = []
    for ranks in pipelines:
        both = [dist.new_group(list(ranks)) for _ in range(2)]
        if dist.get_rank() in ranks:
            mine = both
    if not mine:
        raise ValueError(f"rank {dist.get_rank()} is in none of the pipelines {pipelines}")
    return mine[0], mine[1]


class Wires:
    """All channels of one rank of a pipeline.

    Sends never hold their rank up. Receives of one step are known in advance (:meth:`begin`) and are posted in the
    order of the wire, up to ``depth`` ahead of the list.
    """

    def __init__(
        self, rank: int, groups: tuple[Group, Group], boundary: Boundary, *, timeout_s: float = 600.0, depth: int = 2
    ) -> None:
        self.rank, self._up, self._down = rank, *groups
        self.boundary = boundary
        self.timeout_s, self.depth = timeout_s, depth
        self._limit = timedelta(seconds=timeout_s)
        self._buffers = _Buffers(boundary)
        self._inbound: dict[int, _Inbound] = {}
        self._sent: deque[tuple[dist.Work, torch.Tensor, Action, int]] = deque()
        self.sent_messages = 0
        self.sent_bytes = 0

    def begin(self, inbound: Mapping[int, Sequence[Action]]) -> None:
        """Start a list: what will come, by sender, in the order in which it is sent."""
        self._inbound = {sender: _Inbound(self, sender, actions) for sender, actions in inbound.items()}
        for channel in self._inbound.values():
            channel.post(self.depth - 1)

    def send(self, x_BSH: torch.Tensor, peer: int, action: Action) -> None:
        """Send to a rank; the tensor must not change any more."""
        group = self._up if peer > self.rank else self._down
        try:
            work = dist.isend(x_BSH, group=group, group_dst=peer)
        except RuntimeError as error:
            raise TransferError(self.rank, action, peer, _reason(error)) from error
        assert work is not None
        self._sent.append((work, x_BSH, action, peer))
        self.sent_messages += 1
        self.sent_bytes += x_BSH.numel() * x_BSH.itemsize

    def expect(self, sender: int, index: int) -> None:
        """Have the ``index``-th message of a sender posted, and some more."""
        self._inbound[sender].post(index + self.depth)

    def take(self, sender: int, index: int) -> Received:
        """Wait for a message. Its memory is used again once nothing holds it."""
        return self._inbound[sender].take(index)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        while self._sent:
            work, _, action, peer = self._sent.popleft()
            self._wait(work, action, peer)

    def _receive(self, buffer: torch.Tensor, peer: int, action: Action) -> dist.Work:
        group = self._up if peer < self.rank else self._down
        try:
            work = dist.irecv(buffer, group=group, group_src=peer)
        except RuntimeError as error:
            raise TransferError(self.rank, action, peer, _reason(error)) from error
        assert work is not None
        return work

    def _wait(self, work: dist.Work, action: Action, peer: int) -> None:
        started_s = time.monotonic()
        try:
            if self.boundary.device.type != "cpu":
                self._poll(work, started_s, action, peer)
            work.wait(self._limit)
        except TransferError:
            raise
        except RuntimeError as error:
            late = time.monotonic() - started_s >= self.timeout_s
            raise TransferError(self.rank, action, peer, self._late() if late else _reason(error)) from error

    def _poll(self, work: dist.Work, started_s: float, action: Action, peer: int) -> None:
        # On a GPU waiting only orders streams: the host would run on, and a dead peer would show somewhere else.
        while not work.is_completed():
            if time.monotonic() - started_s > self.timeout_s:
                raise TransferError(self.rank, action, peer, self._late())
            time.sleep(0)

    def _late(self) -> str:
        return f"nothing moved for {self.timeout_s:g} s: the peer hangs, or waits for another rank that does"


class _Inbound:
    """The messages of one sender in one list."""

    def __init__(self, wires: Wires, sender: int, actions: Sequence[Action]) -> None:
        self._wires, self._sender, self._actions = wires, sender, actions
        self._posted: dict[int, tuple[dist.Work, torch.Tensor, float]] = {}
        self._next = 0

    def post(self, until: int) -> None:
        while self._next < min(until, len(self._actions)):
            buffer = self._wires._buffers.take()
            work = self._wires._receive(buffer, self._sender, self._actions[self._next])
            self._posted[self._next] = work, buffer, time.perf_counter()
            self._next += 1

    def take(self, index: int) -> Received:
        work, buffer, posted_s = self._posted.pop(index)
        self._wires._wait(work, self._actions[index], self._sender)
        return Received(self._actions[index], self._wires._buffers.lend(buffer), posted_s, time.perf_counter())


class _Buffers:
    """Memory of messages, lent until neither a tensor nor an autograd graph holds it."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._lent: deque[tuple[torch.Tensor, torch.UntypedStorage, int]] = deque()

    def take(self) -> torch.Tensor:
        for _ in range(len(self._lent)):
            buffer, storage, alone = self._lent.popleft()
            if storage_users(storage) == alone:
                return buffer
            self._lent.append((buffer, storage, alone))
        return torch.empty(self._boundary.shape, dtype=self._boundary.dtype, device=self._boundary.device)

    def lend(self, buffer: torch.Tensor) -> torch.Tensor:
        storage = buffer.untyped_storage()
        self._lent.append((buffer, storage, storage_users(storage)))
        return buffer.detach()


def _reason(error: BaseException) -> str:
    return str(error).splitlines()[0]
