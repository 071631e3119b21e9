"""Attack ``agents``: strangers at the port where agents of several nodes meet, or between them, do not change the run.

Two boards meet through a relay that records their messages and can corrupt them. In each case a stranger connects to
node 0 once, or the relay corrupts a connection; both boards must still receive each other's beats and report no error.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from _attack import Attack
from ports import free_port

from partool_runtime.agent.node_messages import Outcome, WaitTimes
from partool_runtime.agent.nodes import Board
from partool_runtime.agent.options import AgentPlace
from partool_runtime.agent.together import judged

pytestmark = pytest.mark.timeout(4000)
QUICK = WaitTimes(beat_s=0.02, silent_s=3.0, arrival_s=20, notice_s=0.5, farewell_s=2, stranger_s=2)
KEY = b"the key of this run, and no other"
PATIENCE_S = 4.0


class Relay:
    """Network between node 1 and node 0: records all bytes, and passes a piece through ``spoil`` where it is set."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.recorded: list[bytes] = []
        """Bytes that came from node 1, one entry per connection."""
        self.answers: list[bytes] = []
        self.spoil: Callable[[bytes], bytes | None] | None = None
        """Applied once, to the next piece in either direction; a result of None ends the connection."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            inner, _ = self._listener.accept()
            with contextlib.suppress(OSError):
                outer = socket.create_connection(("127.0.0.1", self._target), 5)
                threading.Thread(target=self._carry, args=(inner, outer), daemon=True).start()
                continue
            inner.close()

    def _carry(self, inner: socket.socket, outer: socket.socket) -> None:
        said, heard = bytearray(), bytearray()
        with inner, outer, contextlib.suppress(OSError):
            while True:
                for source in select.select([inner, outer], [], [], 5)[0]:
                    piece = source.recv(1 << 16)
                    spoil, self.spoil = self.spoil, None
                    if spoil is not None and piece:
                        piece = spoil(piece) or b""
                    if not piece:
                        self.recorded = [*self.recorded, bytes(said)][-50:]
                        self.answers = [*self.answers, bytes(heard)][-50:]
                        return
                    if len(said) < 1 << 16:
                        (said if source is inner else heard).extend(piece)
                    (outer if source is inner else inner).sendall(piece)

    def close(self) -> None:
        self._listener.close()


class Run:
    """Two nodes whose boards have met."""

    def __init__(self) -> None:
        self.port = free_port()
        self.relay = Relay(self.port)
        self.said: list[str] = []
        ends = ((0, self.port), (1, self.relay.port))
        self.head, self.other = (
            Board(AgentPlace(2, node, "127.0.0.1", port), "run", "a" * 64, KEY, timing=QUICK, say=self.said.append)
            for node, port in ends
        )
        there = threading.Thread(target=self.other.gather, args=(lambda: False,))
        there.start()
        self.head.gather(lambda: False)
        self.head.begin(1, len)
        there.join(20)

    def judge(self) -> None:
        """Fail unless both boards receive a new beat of each other, and neither reports an error."""
        head, other = self.head._meeting, self.other._meeting
        peer, notice = head.peers[1].seen, other.notice.beat
        end = time.monotonic() + PATIENCE_S
        while not (head.peers[1].seen > peer and other.notice.beat > notice):
            assert time.monotonic() < end, "they do not hear each other any more"
            time.sleep(0.005)
        for board in (self.head, self.other):
            meeting = board._meeting
            trouble = (board.trouble(), board.stopping(), meeting.refused, meeting.lost)
            assert trouble == ("", False, None, ""), trouble

    def end(self) -> int:
        """End the run, with nothing wrong on either node; returns node 1's exit code."""
        verdicts = []
        mine = Outcome(1, "host-1", 0)
        hearing = threading.Thread(target=lambda: verdicts.append(self.other.hear(mine, lambda: False)))
        hearing.start()
        verdict = judged(self.head.collect(Outcome(0, "host-0", 0), 5, lambda: False))
        self.head.announce(verdict)
        hearing.join(10)
        assert verdicts == [verdict]
        return verdict.code


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run()
    yield found
    for board in (found.other, found.head):
        board.__exit__()
    found.relay.close()


def _flipped(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _words(rng: random.Random, run: Run) -> bytes:
    """Return the bytes that a stranger sends."""
    recorded = rng.choice(run.relay.recorded + run.relay.answers or [b"\x00"]) or b"\x00"
    length = rng.choice([0, 1, 36, 4096, 4097, 1 << 20, 1 << 31, (1 << 32) - 1]).to_bytes(4, "big")
    hello = b'{"run": "run", "node": %d, "number": "0", "token": "x", "host": "\x1b[2J", "plan_hash": "", "process": 1}'
    kinds: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(1, 5000)),
        lambda: recorded,
        lambda: recorded * 3,
        lambda: _flipped(rng, recorded),
        lambda: _cut(rng, recorded),
        lambda: length + rng.randbytes(rng.randrange(200)),
        lambda: len(hello).to_bytes(4, "big") + bytes(32) + hello % rng.randrange(-1, 3),
        lambda: b"GET / HTTP/1.1\r\nHost: node-0\r\n\r\n",
        lambda: b"\x16\x03\x01" + rng.randbytes(300),
        lambda: b"[" * 4000,
        lambda: b"",
    ]
    return rng.choice(kinds)()


def _stranger(rng: random.Random, run: Run, lingering: list[socket.socket]) -> None:
    """Send bytes to node 0: at once, byte by byte, or without ever closing the connection."""
    connection = socket.create_connection(("127.0.0.1", run.port), 5)
    connection.settimeout(0.2)
    data = _words(rng, run)
    with contextlib.suppress(OSError):
        if rng.random() < 0.5:
            connection.recv(1 << 12)  # the greeting
        if rng.random() < 0.3:
            for start in range(min(len(data), 20)):
                connection.sendall(data[start : start + 1])
        else:
            connection.sendall(data)
        if rng.random() < 0.2:
            connection.shutdown(socket.SHUT_WR)
    if rng.random() < 0.5:
        lingering.append(connection)  # stays open and sends no more
    else:
        connection.close()
    if len(lingering) > 300:
        for each in lingering:
            each.close()
        lingering.clear()


def test_strangers_change_nothing(run: Run) -> None:
    attack = Attack("agents")
    lingering: list[socket.socket] = []
    for number, rng in attack.cases():
        with attack.case(number, lambda rng=rng: f"said so far: {run.said[-5:]}"):  # type: ignore[misc]
            if rng.random() < 0.3:
                way = rng.choice([_flipped, _cut, lambda rng, data: data + data, lambda rng, data: None])
                run.relay.spoil = lambda data, rng=rng, way=way: way(rng, data)  # type: ignore[misc]
            else:
                _stranger(rng, run, lingering)
            run.judge()
    for each in lingering:
        each.close()
    assert run.end() == 0
    assert not any("\x1b" in line or not line.isprintable() for line in run.said)
    assert len(run.said) <= 8
    attack.judge()
