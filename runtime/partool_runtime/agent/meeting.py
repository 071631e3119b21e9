"""Messages between the agents of several nodes, and the thread that sends and receives them.

Node 0 listens. Every other node repeatedly sends its state to node 0, which answers each time with a notice. The notice
is the same for all nodes, so that traffic grows linearly with the nodes. Only the thread uses the connections; the main
thread reads the state that the thread received.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from partool_runtime.agent.clock import AwakeClock
from partool_runtime.agent.node_messages import Notice, State, WaitTimes, dump
from partool_runtime.agent.options import AgentPlace
from partool_runtime.agent.wire import Admission, Desk, Introduction, OtherRunError, Visitor, WireError, listen
from partool_runtime.errors import ConfigurationError

_PROBE_TIMEOUT_S = 5.0
_ANSWER_S = 5.0
"""Maximum seconds to wait for an answer, at most a third of ``silent_s``: connections may be lost silently."""
_URGENT_S = 0.1
_URGENT_S_PER_NODE = 0.0005
"""Multiplied by the number of nodes: the minimum seconds between urgent messages of one node. Node 0 answers a few
thousand messages per second.
"""
_MOST_STRANGERS = 5
"""Maximum number of addresses outside the run that are reported."""


@dataclass(slots=True)
class Peer:
    """The last report of another node."""

    state: State
    seen: float
    """Time of the report, on this node's clock."""
    seen_at: float
    """Unix time of the report."""


@dataclass(slots=True)
class Meeting:
    """Messages that the thread has received, and messages that the thread will send.

    Each field is replaced as a whole, and by one thread only: ``mine`` and, on node 0, ``notice`` by the main thread,
    all other fields by the thread that sends and receives.
    """

    place: AgentPlace
    run: str
    plan_hash: str
    """Hash of the plan; empty if this node cannot use its plan and joins only to report this error."""
    key: bytes
    """Secret key of the run, shared by its agents only."""
    timing: WaitTimes
    say: Callable[[str], None]
    clock: AwakeClock = field(default_factory=AwakeClock)
    mine: State = field(default_factory=lambda: State(uuid.uuid4().hex, socket.gethostname()))
    notice: Notice = field(default_factory=Notice)
    notice_seen: float = 0.0
    """Time of the last notice, on this node's clock."""
    peers: dict[int, Peer] = field(default_factory=dict)
    """On node 0: the nodes that have joined."""
    head: str = ""
    """Address of node 0 as this node sees it."""
    joined: bool = False
    obstacle: str = ""
    """Reason why this node cannot join."""
    refused: ConfigurationError | None = None
    lost: str = ""
    """Reason why the other nodes cannot be reached any more."""
    leave: threading.Event = field(default_factory=threading.Event)
    changed: threading.Event = field(default_factory=threading.Event)
    """Event that makes the thread send at once when it is set."""
    _holders: dict[int, str] = field(default_factory=dict)
    """On node 0: for each node, the token of the agent that holds the node's place."""
    _strangers: set[str] = field(default_factory=set)
    _beat: int = 0

    def start(self) -> threading.Thread:
        """Start the thread."""
        target = self._host if self.place.node_rank == 0 else self._visit
        thread = threading.Thread(target=self._guard, args=(target,), name="nodes", daemon=True)
        thread.start()
        return thread

    def _guard(self, target: Callable[[], None]) -> None:
        # A signal that the main thread blocks for a while must stay pending, and not be delivered to this thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            target()
        except ConfigurationError as error:
            self.refused = error
        except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
            self.lost = _short(error)

    def _pause(self) -> None:
        """Wait until the next message is due; the wait is short at start and end, when all nodes wait for messages."""
        notice = self.notice
        urgent = not notice.attempt or notice.trouble or notice.stopping or self.mine.outcome is not None
        least_s = max(_URGENT_S, self.place.nodes * _URGENT_S_PER_NODE)
        self.changed.wait(min(least_s, self.timing.beat_s) if urgent else self.timing.beat_s)
        self.changed.clear()
        self.clock.now()

    # Node 0

    def _host(self) -> None:
        with Desk(self.key, self.run, self._listen(), self._admit, self._answer, self._refuse_stranger) as desk:
            self.joined = True
            while not self.leave.is_set():
                desk.serve(min(_URGENT_S, self.timing.beat_s))
                self.clock.now()

    def _listen(self) -> list[socket.socket]:
        give_up = self.clock.now() + self.timing.stranger_s
        while True:
            try:
                listeners = listen(self.place.host, self.place.port)
                self.obstacle = ""
                return listeners
            except OSError as error:
                why = error.strerror or str(error)
                if self.clock.now() > give_up or self.leave.is_set():
                    raise RuntimeError(f"cannot listen on port {self.place.port}: {why}") from None
                self.obstacle = f"port {self.place.port} on this node: {why}"
                self._pause()

    def _admit(self, who: Introduction) -> Admission:
        """Give an agent the place that it requests and return an empty result, or return the reason for a refusal."""
        node, token, host, plan_hash = who["node"], str(who["token"]), str(who["host"]), str(who["plan_hash"])
        if not 1 <= node < self.place.nodes:
            return self._refuse(who, "PT583", f"there is no node {node} of {self.place.nodes} for it")
        if "" not in (plan_hash, self.plan_hash) and plan_hash != self.plan_hash:
            return self._refuse(who, "PT580", f"its plan is {plan_hash[:12]}, that of node 0 {self.plan_hash[:12]}")
        if self._holders.get(node, token) != token:
            if self.notice.over:
                return {"wait": f"node rank {node} is taken in a run that has begun or is ending"}
            peer = self.peers.get(node)
            if peer is None or self.clock.now() - peer.seen <= self.timing.silent_s:
                whose = peer.state.host if peer is not None else host
                return self._refuse(who, "PT583", f"--node-rank {node} is {whose}'s already")
        self._holders[node] = token
        return {}

    def _refuse(self, who: Introduction, code: str, what: str) -> Admission:
        """Report here, and to the refused agent, why an agent of this run cannot join; the run then cannot continue."""
        message = f"the agent on {who['host']} (--node-rank {who['node']}, process {who['process']}): {what}"
        self.say(f"refused: {message}")
        self.refused = ConfigurationError(code, message, "see the messages of the nodes")
        return {"refused": (code, what)}

    def _answer(self, node: int, body: bytes) -> bytes:
        state = State.load(body)
        if self._holders.get(node) == state.token:
            self.peers = self.peers | {node: Peer(state, self.clock.now(), time.time())}
        self._beat += 1
        return dump(replace(self.notice, beat=self._beat)).encode()

    def _refuse_stranger(self, address: str) -> None:
        """Report, once per address, that a process is not of this run; quote nothing that the process sent."""
        if address not in self._strangers and len(self._strangers) < _MOST_STRANGERS:
            self._strangers.add(address)
            self.say(f"refused a connection from {address}: its message is not signed with this run's key")

    # The other nodes

    def _visit(self) -> None:
        visitor = self._join()
        self.joined = True
        while True:
            leaving = self.leave.is_set()
            self._beat += 1
            try:
                mine = replace(self.mine, beat=self._beat, head=self.head)
                self.notice = Notice.load(visitor.exchange(dump(mine).encode()))
                self.notice_seen = self.clock.now()
            except (OSError, WireError):
                visitor.close()
                if leaving:
                    return
                visitor = self._join()
                continue
            if leaving:
                visitor.close()
                return
            self._pause()

    def _join(self) -> Visitor:
        """Connect until node 0 listens and belongs to this run, and no other agent holds this node's place.

        Raises RuntimeError if another run keeps holding the address, or if nothing listens at it any more after a
        connection was lost.
        """
        begin = self.clock.now()
        while not self.leave.is_set():
            try:
                if (visitor := self._knock()) is not None:
                    return visitor
            except OtherRunError as other:
                self.obstacle = f"this agent belongs to run {self.run}, the one at {self._endpoint} to {other}"
                if self.clock.now() >= begin + self.timing.stranger_s:
                    raise RuntimeError(f"PT583: {self.obstacle}; {_HELP['PT583']}") from None
            except WireError as error:
                self.obstacle = str(error)
            except socket.gaierror as error:
                self.obstacle = f"{self.place.host} does not resolve ({error.strerror})"
            except ConnectionRefusedError as error:
                self.obstacle = error.strerror or str(error)
                if self.joined and self.clock.now() >= begin + min(3 * self.timing.beat_s, self.timing.silent_s):
                    raise RuntimeError("node 0 does not listen any more") from None
            except OSError as error:
                self.obstacle = error.strerror or str(error)
            self._pause()
        raise RuntimeError("left before node 0 was there")

    def _knock(self) -> Visitor | None:
        """Request this node's place from node 0; return None if the place is not free yet."""
        connection = socket.create_connection((self.place.host, self.place.port), _PROBE_TIMEOUT_S)
        who: Introduction = {
            "run": self.run, "node": self.place.node_rank, "token": self.mine.token, "host": self.mine.host,
            "plan_hash": self.plan_hash, "process": os.getpid(),
        }  # fmt: skip
        try:
            visitor, answer = Visitor.come(connection, self.key, who, min(_ANSWER_S, self.timing.silent_s / 3))
            if code_and_what := answer.get("refused"):
                code, what = code_and_what
                message = f"node 0 at {self._endpoint} does not take this agent: {what}"
                raise ConfigurationError(code, message, _HELP.get(code, ""))
            if answer:
                self.obstacle = answer["wait"]
                connection.close()
                return None
        except BaseException:
            connection.close()
            raise
        self.head, self.obstacle, self.notice_seen = visitor.head, "", self.clock.now()
        return visitor

    @property
    def _endpoint(self) -> str:
        return f"{self.place.host}:{self.place.port}"


_HELP = {
    "PT580": "every node needs the same plan.json",
    "PT583": "one agent per node, each with a --node-rank of its own, and a port for each run",
}


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
