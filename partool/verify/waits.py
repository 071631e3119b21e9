"""Execution model: ranks whose hosts wait, wherever they may, until their devices have completed all exchanges so far.

A rank issues its exchanges in order and does not wait for one by issuing it. It may wait before it issues the next one:
an operator between the two may need the result, or wait for the whole device (the allocator frees memory, a kernel is
loaded on first use, NCCL connects), and of two collectives the second one may be queued behind the first one on the
device. In this model every rank always waits. Only messages that are issued without an operator or a collective
between them are posted together, as one batch. A message is complete once both ends are posted, a collective once all
executed ranks of its group have issued it. Ranks that were not executed post their ends at once.

If all lists end in this model, they end whichever ranks wait and whenever: a rank that waits less posts no exchange
later. The order in which ranks are simulated does not matter for the same reason. Not modelled: messages of a batch
that are not coalesced and share one communicator, and collectives that need more of the device than is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from partool.plan.layout import Mesh
from partool.plan.rank_trace import COMPUTE, Collective, RankTrace
from partool.plan.types import Plan
from partool.verify.findings import MESSAGES, Channel, ExchangeFinding, places, ranks_in_words, words

_MOST = 4
"""Most ranks of a circle that a message describes."""


def stuck(plan: Plan, traces: Sequence[RankTrace]) -> list[ExchangeFinding]:
    """Return the circles in which ranks may wait for each other for ever, and ranks that wait for one that has ended.

    Each rank that is stuck belongs to one finding, in a circle or behind it. Where lists do not match
    (:func:`partool.verify.mismatches`), ranks wait as well.
    """
    model = _Model(traces)
    model.run()
    return _findings(model.waits(), plan.layout.mesh)


class _Wait(NamedTuple):
    """What a stuck rank waits for."""

    rank: int
    issued: Collective
    channel: Channel
    number: int
    """Index of the exchange in its channel."""
    missing: int
    """Rank that has not issued it."""


class _Meetings:
    """The exchanges of one channel: how many ends of each are posted, and by whom."""

    def __init__(self, channel: Channel, ends: int) -> None:
        self.channel, self.ends = channel, ends
        self.open: dict[int, list[tuple[int, int]]] = {}
        """Number of an exchange that is not complete → (rank, place in its order) of each end that is posted."""


class _Host:
    """One rank: its list, and how far it has come."""

    def __init__(self, trace: RankTrace) -> None:
        self.rank, self.order, self.vocabulary = trace.rank, trace.order, trace.vocabulary
        self.at = 0
        """Place of the next entry."""
        self.batch = True
        """False after a collective, until an operator runs."""
        self.waiting = 0
        """Exchanges that are posted and not complete."""
        self.messages = [each.kind in MESSAGES for each in trace.vocabulary]
        """For each entry of the vocabulary, whether it is a message."""
        self.ends: list[tuple[_Meetings, list[int]] | None] = []
        """For each entry of the vocabulary its channel and the number posted so far, in a list of one; None if no
        other rank of the channel was executed."""


class _Model:
    """All executed ranks."""

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self._hosts = {trace.rank: _Host(trace) for trace in traces}
        self._meetings: dict[Channel, _Meetings] = {}
        for host in self._hosts.values():
            counts: dict[Channel, list[int]] = {}
            for each in host.vocabulary:
                channel = Channel.of(each, host.rank)
                meetings = self._channel(channel)
                alone = meetings.ends < 2 or host.rank not in channel.members
                host.ends.append(None if alone else (meetings, counts.setdefault(channel, [0])))

    def _channel(self, channel: Channel) -> _Meetings:
        if channel not in self._meetings:
            ends = sum(rank in self._hosts for rank in channel.members)
            self._meetings[channel] = _Meetings(channel, ends)
        return self._meetings[channel]

    def run(self) -> None:
        """Let all ranks go on until none can."""
        ready = deque(self._hosts.values())
        while ready:
            host = ready.popleft()
            for rank in self._go_on(host):
                other = self._hosts[rank]
                other.waiting -= 1
                if not other.waiting:
                    ready.append(other)

    def _go_on(self, host: _Host) -> Iterable[int]:
        """Execute a rank's list up to its next wait; return the other ends of the exchanges that this completes."""
        freed: list[int] = []
        order, at, batch = host.order, host.at, host.batch
        while at < len(order):
            index = order[at]
            if index == COMPUTE:
                if host.waiting:
                    break
                batch, at = True, at + 1
                continue
            end = host.ends[index]
            message = host.messages[index]
            if host.waiting and not (message and batch):
                break
            batch = message
            if end is not None:
                self._post(host, at, end, freed)
            at += 1
        host.at, host.batch = at, batch
        return freed

    def _post(self, host: _Host, at: int, end: tuple[_Meetings, list[int]], freed: list[int]) -> None:
        """Post a rank's end of an exchange; add the ranks of the other ends to ``freed`` if this completes it."""
        meetings, count = end
        number = count[0]
        count[0] += 1
        posted = meetings.open.setdefault(number, [])
        posted.append((host.rank, at))
        if len(posted) < meetings.ends:
            host.waiting += 1
            return
        del meetings.open[number]
        freed += [rank for rank, _ in posted[:-1]]

    def waits(self) -> dict[int, _Wait]:
        """Return, for each rank that is stuck, the first exchange that it waits for."""
        first: dict[int, tuple[int, _Meetings, int]] = {}
        for meetings in self._meetings.values():
            for number, posted in meetings.open.items():
                for rank, at in posted:
                    if rank not in first or at < first[rank][0]:
                        first[rank] = at, meetings, number
        by_rank = {}
        for rank, (at, meetings, number) in sorted(first.items()):
            arrived = {each for each, _ in meetings.open[number]}
            others = (each for each in meetings.channel.members if each in self._hosts and each not in arrived)
            missing = next(others, rank)  # the rank itself has to receive what it sends to itself
            issued = self._hosts[rank].vocabulary[self._hosts[rank].order[at]]
            by_rank[rank] = _Wait(rank, issued, meetings.channel, number, missing)
        return by_rank


def _findings(waits: dict[int, _Wait], mesh: Mesh) -> list[ExchangeFinding]:
    """Follow what each rank waits for, to a circle or to a rank whose list has ended."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for rank in waits:
        path = [rank]
        while (after := waits[path[-1]].missing) in waits and after not in path:
            path.append(after)
        circle = path[path.index(after) :] if after in path else path[-1:]
        turn = circle.index(min(circle))
        behind = ends.setdefault(tuple(circle[turn:] + circle[:turn]), [])
        if rank not in circle:
            behind.append(rank)
    return [_finding([waits[rank] for rank in circle], behind, mesh) for circle, behind in sorted(ends.items())]


def _finding(circle: Sequence[_Wait], behind: Sequence[int], mesh: Mesh) -> ExchangeFinding:
    parts = [
        f"rank {wait.rank} may wait for {words(wait.issued)} (exchange {wait.number + 1} of {wait.channel.words}), "
        f"which rank {wait.missing} has not issued"
        for wait in circle[:_MOST]
    ]
    if len(circle) > _MOST:
        parts.append(f"and so on, {len(circle)} ranks in a circle")
    elif circle[-1].missing != circle[0].rank:
        parts.append(f"and the list of rank {circle[-1].missing} ends without it")
    if behind:
        parts.append(f"ranks that wait for them: {ranks_in_words(behind)}")
    first, ranks = circle[0], tuple(wait.rank for wait in circle)
    where = places([wait.channel.members for wait in circle], mesh)
    group, purpose = first.channel.group, first.channel.purpose
    return ExchangeFinding("PT597", "; ".join(parts), where, ranks, group, purpose, first.number + 1)
