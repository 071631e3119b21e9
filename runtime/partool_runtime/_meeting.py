"""What the agents of several nodes tell each other, and the thread that carries it through a store of torch.

Node 0 hosts the store. Every node writes its own state under a key of its own; node 0 reads them all and writes one
notice that the others read, so that the traffic grows with the nodes and not with their square. Only the thread
touches the store: where a peer is gone without a word, calls into torch may block for ever.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not typed as exported

from partool_runtime._node_messages import Notice, State, Timing, dump
from partool_runtime._options import Place
from partool_runtime.errors import ConfigurationError

_PREFIX = "partool/"
_HOST, _NOTICE, _REFUSALS = (_PREFIX + name for name in ("host", "notice", "refusals"))
_PROBE_TIMEOUT_S = 5.0
_URGENT_S = 0.1
_URGENT_S_PER_NODE = 0.0005
"""Node 0 answers a few thousand questions per second."""


@dataclass(slots=True)
class Peer:
    """Another node, as heard of last."""

    state: State
    seen: float
    """On this node's monotonic clock."""
    seen_at: float
    """Unix time."""


@dataclass(slots=True)
class Meeting:
    """What the thread has heard, and what it is to say.

    Each field is replaced as a whole, and by one thread only: ``mine`` and, on node 0, ``notice`` by the main thread,
    everything else by this one.
    """

    place: Place
    run: str
    plan_hash: str
    """Empty if this node's plan cannot be used: it joins to say so."""
    timing: Timing
    say: Callable[[str], None]
    mine: State = field(default_factory=lambda: State(uuid.uuid4().hex, socket.gethostname()))
    notice: Notice = field(default_factory=Notice)
    notice_seen: float = 0.0
    """When it last changed, on this node's monotonic clock."""
    peers: dict[int, Peer] = field(default_factory=dict)
    """On node 0: who has come."""
    head: str = ""
    """Address of node 0 as this node sees it."""
    joined: bool = False
    obstacle: str = ""
    """What keeps this node from joining."""
    refused: ConfigurationError | None = None
    lost: str = ""
    """Why the store cannot be reached any more."""
    leave: threading.Event = field(default_factory=threading.Event)
    changed: threading.Event = field(default_factory=threading.Event)
    """Set to have the thread speak at once."""

    def start(self) -> threading.Thread:
        """Start the thread."""
        target = self._host if self.place.node_rank == 0 else self._visit
        thread = threading.Thread(target=self._guard, args=(target,), name="nodes", daemon=True)
        thread.start()
        return thread

    def _guard(self, target: Callable[[], None]) -> None:
        # Signals that the main thread blocks for a while must wait for it, not come in here (nor in torch's threads,
        # which inherit this).
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            target()
        except ConfigurationError as error:
            self.refused = error
        except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
            self.lost = _short(error)

    def _pause(self) -> None:
        """Wait until the next sign of life; not for long where everybody waits for the news: at start and end."""
        notice = self.notice
        urgent = not notice.attempt or notice.trouble or notice.stopping or self.mine.outcome is not None
        least_s = max(_URGENT_S, self.place.nodes * _URGENT_S_PER_NODE)
        self.changed.wait(min(least_s, self.timing.beat_s) if urgent else self.timing.beat_s)
        self.changed.clear()

    # Node 0

    def _host(self) -> None:
        store = self._listen()
        identity = {"run": self.run, "plan_hash": self.plan_hash, "host": self.mine.host}
        store.set(_HOST, json.dumps(identity))
        self.joined = True
        refusals = beat = 0
        while True:
            leaving = self.leave.is_set()
            self._collect(store)
            refusals = self._hear_refusals(store, refusals)
            beat += 1
            store.set(_NOTICE, dump(replace(self.notice, beat=beat)))
            if leaving:
                return
            self._pause()

    def _listen(self) -> TCPStore:
        """Open the store on all addresses; it is reached from here by the loopback, whatever the host's name does."""
        give_up = time.monotonic() + self.timing.stranger_s
        while True:
            try:
                store = TCPStore(
                    "127.0.0.1", self.place.port, is_master=True, wait_for_workers=False, timeout=self._timeout
                )
                self.obstacle = ""
                return store
            except RuntimeError as error:
                if "EADDRINUSE" not in str(error) or time.monotonic() > give_up or self.leave.is_set():
                    raise RuntimeError(f"cannot listen on port {self.place.port}: {_short(error)}") from None
                self.obstacle = f"port {self.place.port} is in use on this node"
                self._pause()

    def _collect(self, store: TCPStore) -> None:
        peers = dict(self.peers)
        for node in range(1, self.place.nodes):
            if node not in peers and not store.check([_state(node)]):
                continue
            state = State.load(store.get(_state(node)))
            if node not in peers or peers[node].state.beat != state.beat:
                peers[node] = Peer(state, time.monotonic(), time.time())
        self.peers = peers

    def _hear_refusals(self, store: TCPStore, heard: int) -> int:
        count = store.add(_REFUSALS, 0)
        for number in range(heard + 1, count + 1):
            code, message, fatal = json.loads(store.get(f"{_REFUSALS}/{number}"))
            self.say(f"refused: {message}")
            if fatal:
                self.refused = ConfigurationError(code, message, "see the messages of the nodes")
        return int(count)

    # The others

    def _visit(self) -> None:
        store = self._join()
        self.joined = True
        beat = 0
        while True:
            leaving = self.leave.is_set()
            beat += 1
            store.set(_state(self.place.node_rank), dump(replace(self.mine, beat=beat, head=self.head)))
            self._read_notice(store)
            if leaving:
                return
            self._pause()

    def _read_notice(self, store: TCPStore) -> None:
        notice = Notice.load(store.get(_NOTICE))
        if notice.beat != self.notice.beat:
            self.notice_seen = time.monotonic()
            self.notice = notice

    def _join(self) -> TCPStore:
        """Connect until node 0 is there, is of this run, and has no other agent in this one's place."""
        give_up = time.monotonic() + self.timing.stranger_s
        while True:
            store = self._connect()
            try:
                host = json.loads(store.get(_HOST))
                if host["run"] != self.run:
                    what = f"it belongs to run {self.run}, the agent at {self._endpoint} to run {host['run']}"
                    if time.monotonic() >= give_up:
                        self._refuse(store, "PT583", what, fatal=False)
                    self.obstacle = what
                elif "" not in (host["plan_hash"], self.plan_hash) and host["plan_hash"] != self.plan_hash:
                    what = f"its plan is {self.plan_hash[:12]}, that of node 0 {host['plan_hash'][:12]}"
                    self._refuse(store, "PT580", what)
                elif self._claim(store):
                    self.notice_seen = time.monotonic()
                    return store
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                self.obstacle = _short(error)
            del store
            self._pause()

    def _connect(self) -> TCPStore:
        while not self.leave.is_set():
            try:
                with socket.create_connection((self.place.host, self.place.port), _PROBE_TIMEOUT_S) as probe:
                    self.head = str(probe.getpeername()[0])
                self.obstacle = "it answers, but not as an agent"
                store = TCPStore(self.place.host, self.place.port, is_master=False, timeout=self._timeout)
                self.obstacle = ""
                return store
            except socket.gaierror as error:
                self.obstacle = f"{self.place.host} does not resolve ({error.strerror})"
            except OSError as error:
                self.obstacle = f"{error.strerror or error}"
            except RuntimeError as error:
                self.obstacle = _short(error)
            self._pause()
        raise RuntimeError("left before node 0 was there")

    def _claim(self, store: TCPStore) -> bool:
        """Take this node's place. False if it is taken by an agent that is ending, or of an attempt that is."""
        node = self.place.node_rank
        holder = store.compare_set(f"{_PREFIX}claim/{node}", "", self.mine.token).decode()
        if holder == self.mine.token:
            return True
        self.obstacle = f"node rank {node} is taken in a run that has begun or is ending"
        end, beats = time.monotonic() + self.timing.silent_s, set()
        while time.monotonic() < end and not self.leave.is_set():
            if Notice.load(store.get(_NOTICE)).over:
                return False
            if store.check([_state(node)]):
                state = State.load(store.get(_state(node)))
                beats.add(state.beat)
                if len(beats) > 2:
                    self._refuse(store, "PT583", f"--node-rank {node} is {state.host}'s already")
            self._pause()
        return False

    def _refuse(self, store: TCPStore, code: str, what: str, *, fatal: bool = True) -> None:
        """Say on both sides why this agent does not join."""
        who = f"the agent on {self.mine.host} (--node-rank {self.place.node_rank}, process {os.getpid()})"
        number = store.add(_REFUSALS + "/last", 1)
        store.set(f"{_REFUSALS}/{number}", json.dumps([code, f"{who}: {what}", fatal]))
        store.add(_REFUSALS, 1)
        raise ConfigurationError(code, f"node 0 at {self._endpoint} does not take this agent: {what}", _HELP[code])

    @property
    def _endpoint(self) -> str:
        return f"{self.place.host}:{self.place.port}"

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.timing.silent_s)


_HELP = {
    "PT580": "every node needs the same plan.json",
    "PT583": "one agent per node, each with a --node-rank of its own, and a port for each run",
}


def _state(node: int) -> str:
    return f"{_PREFIX}state/{node}"


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
