"""When a rank posts its receives, so that no rank waits for ever where devices wait for all that they were given.

A posted receive occupies its device until the message arrives, and so does a send until its receive is posted. If an
action makes the host wait for the whole device (a kernel is loaded on first use, the allocator frees memory), the rank
waits for all transfers that it has posted. Receives posted far ahead then close circles: two ranks wait for messages
that the other one sends later.

The receives of :func:`posts` close none, whichever actions wait. Let all actions be in one order in which every action
follows those that it needs. A receive is posted before its rank's first action that follows the send in this order. A
rank that waits before an action then needs only messages that were sent earlier in the order, and receives that are
posted where another rank has finished what precedes the send in the order; so of all ranks that wait, the one whose
action comes first can go on. The order is that of the times at which actions start in a simulation: a receive is posted
as soon as its rank has begun what it does while the message's sender works.

Lists that send weights around a ring follow such an order themselves: :func:`partool.schedule.weipipe.with_shifts`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from partool.schedule.actions import COMPUTE, Action, Kind, Schedule, peer
from partool.schedule.steps import Needs

_TIMES: dict[Kind, int] = {"F": 2, "B": 4, "I": 2, "W": 2}
"""Duration of each kind of compute action; any durations give an order that is safe."""
Posts = dict[int, tuple[Action, ...]]
"""Position in a rank's list → receives that are posted before the action at this position, in the order of sending; the
list's length stands for its end."""


def posts(schedule: Schedule, executed: Iterable[Action] = ()) -> tuple[Posts, ...]:
    """Return, for each rank, the receives that it posts before each action of its list.

    ``executed`` are compute actions that ran before the lists begin. Raises ``ValueError`` where weights are sent
    instead of activations, or where actions wait for each other in a cycle.
    """
    if schedule.moves != "activations":
        raise ValueError(f"{schedule.name} passes weights round: its lists say when transfers are posted")
    order = _Order(schedule, executed)
    order.run()
    return tuple({at: tuple(receives) for at, receives in rank.items()} for rank in order.posts)


def connected(placement: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) pairs of ranks that need a channel: the ranks of adjacent stages, both ways."""
    pairs = {(a, b) for a, b in pairwise(placement) if a != b}
    return sorted(pairs | {(b, a) for a, b in pairs})


class _Order:
    """Simulation that executes actions in the order of their start times; sends start with the action before them."""

    def __init__(self, schedule: Schedule, executed: Iterable[Action]) -> None:
        before = frozenset(action for action in executed if action.kind in COMPUTE)
        self._schedule, self._needs = schedule, Needs(schedule, before)
        self._at = [0] * schedule.ranks
        """Position of each rank's next action."""
        self._free = [0] * schedule.ranks
        """Time at which each rank has executed its actions so far."""
        self._arrived: dict[Action, int] = {}
        """Time of each message, by its receive."""
        self._waiting: dict[Action, int] = {}
        """Rank that waits for a message."""
        self._inbound = {
            action for actions in schedule.lists for action in actions if action.kind in ("RECV_F", "RECV_B")
        }
        self._heap: list[tuple[int, int]] = []
        self.posts: list[defaultdict[int, list[Action]]] = [defaultdict(list) for _ in schedule.lists]

    def run(self) -> None:
        """Execute all actions."""
        for rank in range(self._schedule.ranks):
            self._ready(rank, 0)
        while self._heap:
            started, rank = heapq.heappop(self._heap)
            self._execute(rank, started)
        for rank, actions in enumerate(self._schedule.lists):
            if self._at[rank] < len(actions):
                raise ValueError(f"the lists cannot finish: rank {rank} waits")

    def _ready(self, rank: int, started: int) -> None:
        """Queue a rank's next action, unless it waits for a message; ``started`` is when the action before started."""
        at, actions = self._at[rank], self._schedule.lists[rank]
        if at == len(actions):
            return
        if actions[at].kind not in COMPUTE:
            heapq.heappush(self._heap, (started, rank))
            return
        needed = [need for need in self._needs.of(actions[at]) if need in self._inbound]
        missing = next((need for need in needed if need not in self._arrived), None)
        if missing is not None:
            self._waiting[missing] = rank
            return
        start = max([self._free[rank], *(self._arrived[need] for need in needed)])
        heapq.heappush(self._heap, (start, rank))

    def _execute(self, rank: int, started: int) -> None:
        action = self._schedule.lists[rank][self._at[rank]]
        self._at[rank] += 1
        if action.kind in COMPUTE:
            self._free[rank] = started + _TIMES[action.kind]
        elif action.kind.startswith("SEND"):
            self._sent(rank, action)
        self._ready(rank, started)

    def _sent(self, rank: int, action: Action) -> None:
        to, receive = peer(self._schedule, rank, action)
        self._arrived[receive] = self._free[rank]
        self.posts[to][self._at[to]].append(receive)
        waiting = self._waiting.pop(receive, None)
        if waiting is not None:
            self._ready(waiting, self._free[rank])
