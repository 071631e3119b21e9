"""Point-to-point transfers between pipeline ranks; buffers are reused, and waits limited."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from partool.schedule import Action, cell, connected
from partool.schedule.actions import SHIFTS
from partool_runtime.groups import Groups, Parts
from partool_runtime.parallel.pipeline.types import Boundary
from partool_runtime.torch_internals import collectives
from partool_runtime.torch_internals.tensors import storage_users

TIMEOUT_S = 600.0
"""Default for ``timeout_s``, the longest time in seconds that a rank waits for a message."""
POLLED_S, PAUSE_S = 100e-6, 50e-6
"""Seconds for which a rank asks without pause whether a transfer on a GPU is complete, and the pause between later
questions: ranks that ask without pause take a core each from the threads that feed their devices."""
MOST_BLOCKS = 4
"""Largest number of thread blocks of one transfer on a GPU, each of which takes the place of computation while the
transfer waits for its sender. NCCL takes up to 32 for a message within a node by itself. ``NCCL_MAX_CTAS`` in the
environment has priority (NCCL user guide, ncclConfig_t.maxCTAs)."""
UNFINISHED_SENDS = 8
"""Maximum number of sends in flight per peer; when it is reached, a rank waits for the oldest send and frees it."""


class TransferError(RuntimeError):
    """A transfer failed because the peer hangs or has ended. Another attempt may succeed."""

    def __init__(self, rank: int, action: Action, peer: int, reason: str) -> None:
        way = "to" if action.kind.startswith("SEND") else "from"
        which = "turn" if action.kind in SHIFTS else "micro-batch"
        super().__init__(
            f"pipeline rank {rank}, {cell(action)} (stage {action.stage}, {which} {action.micro_batch}) "
            f"{way} pipeline rank {peer}: {reason}"
        )
        self.rank, self.action, self.peer, self.reason = rank, action, peer, reason


class Received(NamedTuple):
    """A received message, and the time when it arrived."""

    action: Action
    x_BSH: torch.Tensor  # noqa: N815
    posted_s: float
    there_s: float


@dataclass(frozen=True)
class Lines:
    """Process groups between the ranks of one pipeline."""

    ranks: tuple[int, ...]
    """Global rank of each pipeline rank."""
    groups: Mapping[tuple[int, int], dist.ProcessGroup]
    """Process group of each (sending, receiving) pair of pipeline ranks."""


def open_lines(
    groups: Groups, pipelines: Parts, placement: Sequence[int] = (), *, timeout_s: float = TIMEOUT_S
) -> Lines:
    """Return the process groups of this rank's pipeline.

    Every rank of the world calls this with the same lists of global ranks, each in the order of its pipeline.
    ``timeout_s`` is the longest wait, as in :class:`Wires`; the backend's timeout is longer, so that the error can name
    the action that waits. ``placement`` is the pipeline rank of each stage, which determines the ranks that exchange
    messages; if it is empty, each rank has one stage. With gloo one group carries messages to higher ranks, another
    messages to lower ranks. NCCL executes the operations of a communicator one after the other, so with NCCL every
    ordered pair of ranks that exchange messages has a separate communicator: a receive that is posted ahead blocks no
    send, and messages that cross need not be posted together.
    """
    mine = next((pipeline for pipeline in pipelines if dist.get_rank() in pipeline), None)
    if mine is None:
        raise ValueError(f"rank {dist.get_rank()} is in none of the pipelines {pipelines}")
    open_one = partial(groups.of, timeout=backend_limit(timeout_s), most_blocks=MOST_BLOCKS)
    if not groups.in_order:
        up, down = (open_one(pipelines, f"pipeline {way}") for way in ("up", "down"))
        places = range(len(mine))
        pairs = {(a, b): up if b > a else down for a in places for b in places if a != b}
    else:
        pairs = _pairs(pipelines, placement or range(len(mine)), mine.index(dist.get_rank()), open_one)
    return Lines(tuple(mine), {pair: group for pair, group in pairs.items() if group is not None})


def backend_limit(timeout_s: float) -> timedelta:
    """Return the backend's timeout of a transfer; it is long because receives are posted long before they are used."""
    return timedelta(seconds=3 * timeout_s + 60)


def _pairs(
    pipelines: Parts, placement: Sequence[int], place: int, open_one: Callable[..., dist.ProcessGroup | None]
) -> dict[tuple[int, int], dist.ProcessGroup | None]:
    """Return the groups of the ordered pairs that contain this rank's ``place``; pairs of one round are disjoint."""
    groups: dict[tuple[int, int], dist.ProcessGroup | None] = {}
    for number, together in enumerate(rounds(connected(placement))):
        parts = [(pipeline[a], pipeline[b]) for pipeline in pipelines for a, b in together]
        group = open_one(parts, f"pipeline round {number}")
        groups |= {pair: group for pair in together if place in pair}
    return groups


def rounds(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the pairs in rounds of pairs without a common rank; each pair joins the first round that is free."""
    matchings: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = (each for each in matchings if not any(set(pair) & set(other) for other in each))
        together = next(free, None)
        if together is None:
            matchings.append(together := [])
        together.append(pair)
    return matchings


class Wires:
    """All channels between one rank of a pipeline and the other ranks.

    Sends do not block their rank. The receives of an action list are known in advance (:meth:`begin`) and are posted in
    the order of sending. A wait longer than ``timeout_s`` raises :class:`TransferError`.
    """

    def __init__(self, rank: int, lines: Lines, boundary: Boundary, *, timeout_s: float = TIMEOUT_S) -> None:
        self.rank, self._lines, self.boundary, self.timeout_s = rank, lines, boundary, timeout_s
        self._limit = timedelta(seconds=timeout_s)
        self._polls = boundary.device.type != "cpu"
        self._buffers = _Buffers(boundary)
        self._inbound: dict[int, _Inbound] = {}
        self._sent: defaultdict[int, deque[tuple[dist.Work, torch.Tensor, Action]]] = defaultdict(deque)
        self.sent_messages = 0
        self.sent_bytes = 0

    def begin(self, inbound: Mapping[int, Sequence[Action]]) -> None:
        """Start a list of actions; ``inbound`` holds the list's receives by sender, in the order of sending."""
        self._inbound = {sender: _Inbound(self, sender, actions) for sender, actions in inbound.items()}

    def send(self, x: torch.Tensor, peer: int, action: Action) -> None:
        """Start to send ``x`` to a rank. The caller must no longer change ``x``, which is held until the send ends."""
        under_way = self._sent[peer]
        while under_way and (
            len(under_way) >= UNFINISHED_SENDS or (self._polls and collectives.is_complete(under_way[0][0]))
        ):
            oldest, _, what = under_way.popleft()
            self._wait(oldest, what, peer)
        try:
            work = dist.isend(x, self._lines.ranks[peer], group=self._group(self.rank, peer))
        except RuntimeError as error:
            raise TransferError(self.rank, action, peer, _reason(error)) from error
        assert work is not None
        under_way.append((work, x, action))
        self.sent_messages += 1
        self.sent_bytes += x.numel() * x.itemsize

    def post(self, messages: Sequence[tuple[int, int]]) -> None:
        """Post receives, given as sender and number of the sender's message; a sender's messages in their order."""
        for sender, place in messages:
            self._inbound[sender].post(place)

    def take(self, sender: int, place: int) -> Received:
        """Wait for the sender's message number ``place``; its memory is reused once nothing references the message."""
        return self._inbound[sender].take(place)

    def receive(self, x: torch.Tensor, peer: int, action: Action) -> None:
        """Receive into ``x``, which may have any shape, and wait for the data; the peer calls :meth:`send`."""
        self._wait(self._posted(x, peer, action), action, peer)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for peer, under_way in self._sent.items():
            while under_way:
                work, _, action = under_way.popleft()
                self._wait(work, action, peer)

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup:
        group = self._lines.groups.get((sender, receiver))
        if group is None:
            raise ValueError(f"no wire goes from pipeline rank {sender} to {receiver}")
        return group

    def _posted(self, x: torch.Tensor, peer: int, action: Action) -> dist.Work:
        try:
            work = dist.irecv(x, self._lines.ranks[peer], group=self._group(peer, self.rank))
        except RuntimeError as error:
            raise TransferError(self.rank, action, peer, _reason(error)) from error
        assert work is not None
        return work

    def _wait(self, work: dist.Work, action: Action, peer: int) -> None:
        started_s = time.monotonic()
        try:
            if self._polls:
                self._poll(work, started_s, action, peer)
            work.wait(self._limit)
        except TransferError:
            raise
        except RuntimeError as error:
            timed_out = time.monotonic() - started_s >= self.timeout_s
            raise TransferError(
                self.rank, action, peer, self._timeout_message() if timed_out else _reason(error)
            ) from error

    def _poll(self, work: dist.Work, started_s: float, action: Action, peer: int) -> None:
        # On a GPU a wait only orders streams: the host would continue, and a dead peer would cause an error elsewhere.
        while not collectives.is_complete(work):
            waited_s = time.monotonic() - started_s
            if waited_s > self.timeout_s:
                raise TransferError(self.rank, action, peer, self._timeout_message())
            time.sleep(0 if waited_s < POLLED_S else PAUSE_S)

    def _timeout_message(self) -> str:
        return f"nothing moved for {self.timeout_s:g} s: the peer hangs, or waits for another rank that does"


class _Inbound:
    """The messages from one sender during one action list."""

    def __init__(self, wires: Wires, sender: int, actions: Sequence[Action]) -> None:
        self._wires, self._sender, self._actions = wires, sender, actions
        self._posted: dict[int, tuple[dist.Work, torch.Tensor, float]] = {}

    def post(self, place: int) -> None:
        buffer = self._wires._buffers.take()
        work = self._wires._posted(buffer, self._sender, self._actions[place])
        self._posted[place] = work, buffer, time.perf_counter()

    def take(self, place: int) -> Received:
        work, buffer, posted_s = self._posted.pop(place)
        self._wires._wait(work, self._actions[place], self._sender)
        return Received(self._actions[place], self._wires._buffers.lend(buffer), posted_s, time.perf_counter())


class _Buffers:
    """Memory of messages, which is reused once no tensor and no autograd graph holds it.

    Buffers are not returned explicitly, because another tensor may share a gradient's memory. Instead the number of
    holders of a buffer's storage is read.
    """

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
    """Return the first sentence of a backend's error, without the source location."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return line.rpartition("] ")[2].partition(". ")[0] if line.startswith("[") else line
