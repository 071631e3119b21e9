"""What the agents of several nodes agree on: who is present, the attempt number, the first failure and the result."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Self

from partool_runtime.agent.interfaces import is_loopback, is_own
from partool_runtime.agent.meeting import Meeting, Peer
from partool_runtime.agent.node_messages import Outcome, Verdict, WaitTimes
from partool_runtime.agent.options import AgentPlace
from partool_runtime.agent.standing import Standing
from partool_runtime.errors import EXIT_CONFIGURATION, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED

_LOOK_S = 0.05


class NodesError(Exception):
    """The nodes did not all join, or lost contact before the ranks started; another attempt may succeed."""


class StoppedError(Exception):
    """A node was requested to stop before the ranks started."""


def combined(codes: Iterable[int]) -> int:
    """Return the common exit code of all agents of a run, given the exit code on each node."""
    distinct = set(codes)
    if EXIT_CONFIGURATION in distinct:
        return EXIT_CONFIGURATION
    if distinct <= {EXIT_DONE}:
        return EXIT_DONE
    return EXIT_PREEMPTED if distinct <= {EXIT_DONE, EXIT_PREEMPTED} else EXIT_FAILED


class Board:
    """The main thread's interface to the messages of the nodes (:class:`Meeting`).

    ``say`` shows the user a message. Without a ``plan_hash`` this node joins only to report that it cannot run the
    plan.
    """

    def __init__(
        self, place: AgentPlace, run: str, plan_hash: str, key: bytes, *, timing: WaitTimes, say: Callable[[str], None]
    ) -> None:
        self._place = place
        self._timing = timing
        self._say = say
        self._meeting = Meeting(place, run, plan_hash, key, timing, say)
        if not plan_hash:  # sent with the first message, so that no node starts ranks that wait for this node
            self._meeting.mine = replace(self._meeting.mine, trouble="the plan cannot be used")
        self._thread = self._meeting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._meeting.leave.set()
        self._meeting.changed.set()
        self._thread.join(self._timing.farewell_s if self._meeting.notice.verdict else self._timing.beat_s)

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Wait until every node has joined.

        Raises ConfigurationError if this agent is refused, or on node 0 if a required agent was refused;
        StoppedError if any node was requested to stop; NodesError if nodes are missing at the time limit.
        """
        begin = self._now()
        notice = begin + self._timing.notice_s
        while not self._complete():
            now = self._now()
            if self._meeting.refused:
                raise self._meeting.refused
            if stopped() or self.stopping():
                raise StoppedError
            if why := self.trouble() or self._meeting.lost:
                raise NodesError(why)
            if now >= begin + self._timing.arrival_s:
                raise NodesError(f"gave up after {self._timing.arrival_s:g} s: {self._waiting_for()}")
            if now >= notice:
                notice += self._timing.notice_s
                self._say(f"{self._waiting_for()} ({now - begin:.0f} s)")
            time.sleep(_LOOK_S)

    def begin(self, attempt: int, open_store: Callable[[str], int]) -> None:
        """On node 0: let all nodes start the ranks of this attempt.

        ``open_store`` opens the ranks' store at an address of this machine (empty: at all addresses) and returns its
        port. A single address is used if all other nodes connected to this address.
        """
        seen = list(dict.fromkeys(peer.state.head for peer in self._meeting.peers.values()))
        reachable = [address for address in seen if address and not is_loopback(address)]
        head = (reachable or [*seen, ""])[0]
        only = head if len(seen) == 1 and "%" not in head and is_own(head) else ""
        store = (only or self._place.host, open_store(only))
        self._meeting.notice = replace(self._meeting.notice, attempt=attempt, head=head, store=store, missing=())

    @property
    def met(self) -> bool:
        """True once all nodes have joined (on node 0), node 0 has answered (on other nodes), or joining has failed."""
        meeting = self._meeting
        if meeting.refused or meeting.lost:
            return True
        return meeting.notice.beat > 0 if self._place.node_rank else len(meeting.peers) == self._place.nodes - 1

    @property
    def attempt(self) -> int:
        """Number of the attempt, as sent by node 0."""
        return self._meeting.notice.attempt

    @property
    def head(self) -> str:
        """Address of node 0 as this node sees it, or on node 0 as the other nodes see it."""
        return self._meeting.head or self._meeting.notice.head

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the store at which the ranks meet, as sent by node 0."""
        return self._meeting.notice.store

    def report(self, trouble: str, stopping: bool, *, early: bool = False, stalled: bool = False) -> None:
        """Report that ranks here failed, stopped after a checkpoint, or ended before their first step (``early``).

        ``stalled`` is True if the trouble is a rank that makes no progress.
        """
        mine = self._meeting.mine
        if (trouble and not mine.trouble) or (stopping and not mine.stopping):
            self._meeting.mine = replace(
                mine,
                trouble=mine.trouble or trouble,
                stopping=mine.stopping or stopping,
                early=mine.early or early,
                stalled=mine.stalled or stalled,
            )
            self._spread()
            self._meeting.changed.set()

    def trouble(self) -> str:
        """Return the reason why the ranks of this node must end, such as another node's failure; empty if none."""
        if self._place.node_rank:
            return self._meeting.notice.trouble or self._lost_head()
        for node, peer in sorted(self._meeting.peers.items()):
            if peer.state.trouble:
                return f"{_name(node, peer)} had failed"
            if self._gone(peer):
                return f"{_name(node, peer)} vanished"
        return ""

    def stopping(self) -> bool:
        """Return True if ranks of another node have stopped after a checkpoint."""
        if self._place.node_rank:
            return self._meeting.notice.stopping
        return any(peer.state.stopping for peer in self._meeting.peers.values())

    def early(self) -> bool:
        """Return True if ranks of another node were ended, as requested, before their first step."""
        if self._place.node_rank:
            return self._meeting.notice.early
        return any(peer.state.early for peer in self._meeting.peers.values())

    def stalled(self) -> bool:
        """Return True if a rank of another node makes no progress."""
        if self._place.node_rank:
            return self._meeting.notice.stalled
        return any(peer.state.stalled for peer in self._meeting.peers.values())

    def finished(self) -> bool:
        """Return True if all ranks of another node have finished all steps."""
        if self._place.node_rank:
            return self._meeting.notice.finished
        return any(_succeeded(peer.state.outcome) for peer in self._meeting.peers.values())

    def patient(self) -> bool:
        """Return True if a rank of another node has not passed the watchdog's limit."""
        if self._place.node_rank:
            return any(node != self._place.node_rank for node in self._meeting.notice.patient)
        return any(peer.state.patient for peer in self._meeting.peers.values())

    def exchange(self, standing: Standing | None, patient: bool) -> Standing | None:
        """Send which rank of this node is the furthest behind; return the rank of the other nodes that is.

        ``patient`` is True if a rank of this node has not passed the watchdog's limit.
        """
        self._meeting.mine = replace(self._meeting.mine, standing=standing, patient=patient)
        if self._place.node_rank == 0:
            return _behind(peer.state.standing for peer in self._meeting.peers.values())
        common = self._meeting.notice.standing
        return None if common is None or standing is None or common.where == standing.where else common

    def relay(self) -> None:
        """On node 0: forward reports of nodes to all nodes; must be called often."""
        if self._place.node_rank == 0:
            self._spread()

    def collect(self, mine: Outcome, limit_s: float, hurry: Callable[[], bool]) -> list[Outcome]:
        """On node 0: wait for the outcomes of all nodes that joined, and return them, this node's outcome first.

        Once a node failed or stopped, the other nodes have ``limit_s`` seconds; before that there is no limit. A node
        that is gone counts as failed.
        """
        self._post(mine)
        end: float | None = None
        while waited_for := [peer for peer in self._meeting.peers.values() if not self._settled(peer)]:
            outcomes = [peer.state.outcome for peer in self._meeting.peers.values()]
            if end is None and any(outcome is not None and outcome.code != EXIT_DONE for outcome in [mine, *outcomes]):
                end = self._now() + limit_s
            self._spread()
            if hurry() or (end is not None and self._now() >= end and waited_for):
                break
            time.sleep(_LOOK_S)
        return [mine] + [self._outcome(node, peer) for node, peer in sorted(self._meeting.peers.items())]

    def announce(self, verdict: Verdict) -> None:
        """On node 0: send the run's result to all nodes, and give them time to read it."""
        self._meeting.notice = replace(self._meeting.notice, verdict=verdict)
        self._meeting.changed.set()
        end = self._now() + self._timing.farewell_s
        while self._now() < end and not self._meeting.lost:
            peers = self._meeting.peers.values()
            if all(peer.state.read or self._gone(peer) for peer in peers):
                return
            time.sleep(_LOOK_S)

    def hear(self, mine: Outcome, hurry: Callable[[], bool]) -> Verdict | None:
        """On the other nodes: send this node's outcome and wait for the run's result; None if node 0 is gone."""
        self._post(mine)
        if not self._meeting.joined:
            return None
        while not self._meeting.notice.verdict:
            if self._meeting.refused or self._lost_head() or hurry():
                return None
            time.sleep(_LOOK_S)
        self._meeting.mine = replace(self._meeting.mine, read=True)
        return self._meeting.notice.verdict

    def _now(self) -> float:
        return self._meeting.clock.now()

    def _complete(self) -> bool:
        meeting = self._meeting
        if self._place.node_rank:
            return meeting.notice.attempt > 0
        missing = tuple(node for node in range(1, self._place.nodes) if node not in meeting.peers)
        if missing != meeting.notice.missing:
            meeting.notice = replace(meeting.notice, missing=missing)
        self._spread()
        return not missing and not meeting.refused and not meeting.notice.trouble and not meeting.notice.stopping

    def _spread(self) -> None:
        """On node 0: copy those reports of nodes that concern all nodes into the notice, the message to all nodes."""
        meeting = self._meeting
        if self._place.node_rank:
            return
        own_failure = f"node 0 ({meeting.mine.host}) had failed" if meeting.mine.trouble else ""
        trouble = meeting.notice.trouble or own_failure or self.trouble()
        stopping = meeting.notice.stopping or meeting.mine.stopping or self.stopping()
        early = meeting.notice.early or meeting.mine.early or self.early()
        finished = meeting.notice.finished or self.finished() or _succeeded(meeting.mine.outcome)
        stalled = meeting.notice.stalled or meeting.mine.stalled or self.stalled()
        standing = _behind([meeting.mine.standing, *(peer.state.standing for peer in meeting.peers.values())])
        states = {0: meeting.mine} | {node: peer.state for node, peer in sorted(meeting.peers.items())}
        patient = tuple(node for node, state in states.items() if state.patient)
        before, meeting.notice = meeting.notice, replace(meeting.notice, standing=standing, patient=patient)
        changed = replace(
            meeting.notice, trouble=trouble, stopping=stopping, early=early, stalled=stalled, finished=finished
        )
        if changed != replace(before, standing=standing, patient=patient):
            meeting.notice = changed
            meeting.changed.set()

    def _post(self, mine: Outcome) -> None:
        failed = mine.code not in (EXIT_DONE, EXIT_PREEMPTED)
        self.report(mine.reason if failed else "", mine.code == EXIT_PREEMPTED, early=mine.early)
        self._meeting.mine = replace(self._meeting.mine, outcome=mine)
        self._meeting.changed.set()

    def _waiting_for(self) -> str:
        meeting, place = self._meeting, self._place
        if meeting.obstacle and place.node_rank == 0:
            return meeting.obstacle
        if not meeting.joined and place.node_rank:
            return f"waiting for node 0 at {place.host}:{place.port}: {meeting.obstacle or 'no answer yet'}"
        missing = meeting.notice.missing
        if not missing:
            return "waiting for node 0 to begin"
        text = f"waiting for {'node' if len(missing) == 1 else 'nodes'} {', '.join(map(str, missing))} of {place.nodes}"
        if place.node_rank == 0 and not _is_here(place.host):
            text += f"; {place.host} is no address of this machine: was every agent started with --node-rank 0?"
        return text

    def _gone(self, peer: Peer) -> bool:
        return self._now() - peer.seen > self._timing.silent_s and peer.state.outcome is None

    def _settled(self, peer: Peer) -> bool:
        return peer.state.outcome is not None or self._gone(peer)

    def _lost_head(self) -> str:
        meeting = self._meeting
        if meeting.lost and not meeting.joined:
            return meeting.lost
        silent = meeting.notice.beat and self._now() - meeting.notice_seen > self._timing.silent_s
        return f"node 0 ({self._place.host}) vanished" if meeting.lost or silent else ""

    def _outcome(self, node: int, peer: Peer) -> Outcome:
        if peer.state.outcome is not None:
            return peer.state.outcome
        what = "vanished: its agent was killed, or the network to it is down" if self._gone(peer) else "does not end"
        reason = f"{_name(node, peer)} {what}"
        return Outcome(node, peer.state.host, EXIT_FAILED, reason, f"partool: {reason}", time=peer.seen_at)


def _behind(standings: Iterable[Standing | None]) -> Standing | None:
    """Return the rank that is the furthest behind; None if no rank has told anything."""
    return min((each for each in standings if each is not None), key=lambda each: each.order, default=None)


def _succeeded(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.code == EXIT_DONE


def _name(node: int, peer: Peer) -> str:
    return f"node {node} ({peer.state.host})"


def _is_here(host: str) -> bool:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(is_own(str(entry[4][0])) for entry in entries)
