"""A model of ranks whose hosts wait, at some actions, until the device has completed all transfers posted so far.

A receive completes once its send is posted, a send once its receive is posted: both occupy their device until then. A
rank posts receives before an action, waits for the messages that a compute action needs, may wait for its device within
the action, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from partool.schedule import COMPUTE, Action, Schedule, peer
from partool.schedule.posting import Posts
from partool.schedule.steps import Needs

Waits = Callable[[int, int], bool]
"""Function of rank and position: does the host wait for the device within this action?"""


def stuck(schedule: Schedule, posts: Sequence[Posts], waits: Waits, done: Collection[Action] = ()) -> list[int]:
    """Return the ranks that wait for ever; empty if all lists end."""
    needs = Needs(schedule, frozenset(done))
    at, posted = [0] * schedule.ranks, [False] * schedule.ranks
    sent: set[Action] = set()
    receiving: list[set[Action]] = [set() for _ in schedule.lists]
    sending: list[set[Action]] = [set() for _ in schedule.lists]
    inbound = {action for actions in schedule.lists for action in actions if action.kind in ("RECV_F", "RECV_B")}

    def goes_on(rank: int) -> bool:
        """Execute a rank's next action; return False if it has to wait."""
        actions, place = schedule.lists[rank], at[rank]
        if not posted[rank]:
            posted[rank] = True
            receiving[rank].update(posts[rank].get(place, ()))
            return True
        if place == len(actions):
            return False
        action = actions[place]
        if action.kind in COMPUTE:
            needed = {need for need in needs.of(action) if need in inbound}
            assert needed <= receiving[rank], f"{action} needs a receive that is not posted"
            if not needed <= sent:
                return False
        everywhere = set().union(*receiving)
        if waits(rank, place) and not (receiving[rank] <= sent and sending[rank] <= everywhere):
            return False
        if action.kind.startswith("SEND"):
            receive = peer(schedule, rank, action)[1]
            sent.add(receive)
            sending[rank].add(receive)
        at[rank], posted[rank] = place + 1, False
        return True

    while any(goes_on(rank) for rank in range(schedule.ranks)):
        pass
    return [rank for rank, place in enumerate(at) if place < len(schedule.lists[rank])]


def ahead(schedule: Schedule, depth: int) -> list[Posts]:
    """Return the posts of a rule that keeps ``depth`` receives per sender posted, or waiting to be used."""
    found: list[Posts] = []
    for rank, actions in enumerate(schedule.lists):
        senders: dict[int, list[tuple[int, Action]]] = {}
        for place, action in enumerate(actions):
            if action.kind.startswith("RECV"):
                senders.setdefault(peer(schedule, rank, action)[0], []).append((place, action))
        mine: dict[int, list[Action]] = {}
        for receives in senders.values():
            for number, (place, action) in enumerate(receives):
                begin = 0 if number < depth - 1 else receives[number - depth + 1][0]
                mine.setdefault(min(begin, place), []).append(action)
        found.append({place: tuple(some) for place, some in mine.items()})
    return found


def on_demand(schedule: Schedule) -> list[Posts]:
    """Return the posts of a rule that posts a receive where the list receives it."""
    return ahead(schedule, 1)
