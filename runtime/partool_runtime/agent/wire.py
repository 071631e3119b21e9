"""Signed messages between the agents of a run, over TCP: one agent listens, each other agent keeps a connection to it.

A message is a frame of length (4 bytes, big-endian), tag (HMAC-SHA256, RFC 2104) and body. The listener greets with
a random number, the connecting agent answers with another; the tags of all later messages use a key derived from the
run's key, both numbers, the run and the node, and cover the direction and a counter. So a message is valid only once,
in its order, on its connection; a replayed, truncated or forged message ends that connection and nothing else.
Bodies are not encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict, cast

from partool_runtime.agent.interfaces import is_loopback, is_own, plain

_TAG_BYTES = 32
_HEAD_BYTES = 4 + _TAG_BYTES
_UNSIGNED = bytes(_TAG_BYTES)
_MOST_OPENING_BYTES = 4096
_MOST_BYTES = 1 << 20
_OPENING_S = 5.0
"""Maximum seconds for a greeting and its answer, and for the rest of a frame that has begun."""
_MOST_WAITING = 256
"""Maximum number of connections that have not proven the key yet."""


class WireError(Exception):
    """Bytes on a connection that are not a message of this run."""


class OtherRunError(WireError):
    """The listener reports that it belongs to another run."""


def tag(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 tag of ``parts``; the tag also depends on how the bytes are divided into parts."""
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def frame(mark: bytes, body: bytes) -> bytes:
    """Return a message in the form in which it is sent."""
    return len(body).to_bytes(4, "big") + mark + body


@dataclass(slots=True)
class _Session:
    """Computes and checks the tags of one connection, once its two random numbers are known."""

    key: bytes
    sent: int = 0
    heard: int = 0

    @classmethod
    def of(cls, key: bytes, run: str, node: int, numbers: tuple[str, str]) -> _Session:
        return cls(tag(key, b"session", run.encode(), str(node).encode(), *(each.encode() for each in numbers)))

    def seal(self, side: bytes, body: bytes) -> bytes:
        """Return the next message from ``side`` (:data:`_HEAD` or :data:`_VISITOR`), framed for sending."""
        self.sent += 1
        return frame(tag(self.key, side, str(self.sent).encode(), body), body)

    def check(self, side: bytes, mark: bytes, body: bytes) -> None:
        """Raise WireError unless this is the next message from ``side``."""
        self.heard += 1
        if not hmac.compare_digest(mark, tag(self.key, side, str(self.heard).encode(), body)):
            raise WireError("it is not signed with this run's key")


_HEAD, _VISITOR = b"head", b"visitor"


class Introduction(TypedDict):
    """What an agent tells node 0 about itself."""

    run: str
    node: int
    token: str
    host: str
    plan_hash: str
    """Hash of its plan, or an empty text."""
    process: int


class Admission(TypedDict, total=False):
    """Node 0's answer to an introduction: nothing where it admits the agent."""

    wait: str
    """Why the agent's place is not free yet."""
    refused: tuple[str, str]
    """Code and text of the reason why the agent cannot join."""


class Visitor:
    """A connection to node 0, as the connecting agent holds it; methods raise OSError or WireError if it fails."""

    def __init__(self, connection: socket.socket, session: _Session, timeout_s: float) -> None:
        self._socket = connection
        self._session = session
        self._timeout_s = timeout_s
        self.head = plain(str(connection.getpeername()[0]))
        """Address of node 0 as this node sees it."""

    @classmethod
    def come(cls, connection: socket.socket, key: bytes, who: Introduction, timeout_s: float) -> tuple[Self, Any]:
        """Introduce this agent by ``who``, which holds its run and node; returns the connection and node 0's answer."""
        try:
            greeting = _fields(_receive(connection, _MOST_OPENING_BYTES, timeout_s)[1], run=str, number=str)
        except WireError:
            raise WireError("it answers, but not as an agent") from None
        if greeting["run"] != who["run"]:
            raise OtherRunError(_name(greeting["run"]))
        number = secrets.token_hex(16)
        body = json.dumps(who | {"number": number}).encode()
        connection.sendall(frame(tag(key, b"hello", greeting["number"].encode(), body), body))
        session = _Session.of(key, who["run"], who["node"], (greeting["number"], number))
        visitor = cls(connection, session, timeout_s)
        try:
            return visitor, json.loads(visitor._hear())
        except (WireError, ConnectionError):
            message = "it has another key: all nodes need the same PARTOOL_AGENT_KEY, or one run's folder"
            raise WireError(message) from None

    def exchange(self, body: bytes) -> bytes:
        """Send a message and return the answer."""
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(self._session.seal(_VISITOR, body))
        return self._hear()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _hear(self) -> bytes:
        mark, body = _receive(self._socket, _MOST_BYTES, self._timeout_s)
        self._session.check(_HEAD, mark, body)
        return body


@dataclass(slots=True)
class _Line:
    """A connection of another agent, as node 0 holds it."""

    socket: socket.socket
    address: str
    number: str
    since: float
    """Time when the connection was made, or when an incomplete frame began."""
    node: int = -1
    """Number of the node; negative until the node has proven the key."""
    session: _Session | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    last: bool = False
    """True if the connection ends once the outbox has been sent."""


@dataclass(slots=True)
class Desk:
    """Listener for the agents of a run: serves all connections in a single thread, and blocks on none of them."""

    key: bytes
    run: str
    listeners: list[socket.socket]
    admit: Callable[[Introduction], Admission]
    """Called for an agent that has proven the key. An empty result admits the agent; any other result is sent to the
    agent as a refusal.
    """
    answer: Callable[[int, bytes], bytes]
    """Returns the answer to a node's message; a ValueError, KeyError or TypeError ends the node's connection."""
    strange: Callable[[str], None]
    """Called with the address of a connection that sent anything but messages of this run."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        for listener in self.listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def serve(self, wait_s: float) -> None:
        """Receive and answer pending messages, waiting up to ``wait_s`` seconds for the first message."""
        for key, events in self._selector.select(wait_s):
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                self._accept(key.fileobj)
            elif key.data.socket.fileno() >= 0:  # the connection was not closed meanwhile
                self._attend(key.data, events)
        now = time.monotonic()
        for line in self._all():
            waits = line.node < 0 or line.last or line.inbox or line.outbox
            if waits and now - line.since > _OPENING_S:
                self._drop(line)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # the peer has disconnected, or no descriptor is free until another connection ends
            return
        connection.setblocking(False)
        line = _Line(connection, str(address[0]), secrets.token_hex(16), time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, line)
        line.outbox += frame(_UNSIGNED, json.dumps({"run": self.run, "number": line.number}).encode())
        self._flush(line)
        waiting = [each for each in self._all() if each.node < 0]
        if len(waiting) > _MOST_WAITING:
            crowd = Counter(each.address for each in waiting).most_common(1)[0][0]
            self._drop(min((each for each in waiting if each.address == crowd), key=lambda each: each.since))

    def _attend(self, line: _Line, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._hear(line)
            self._flush(line)
        except WireError:
            self._drop(line)
            self.strange(line.address)
        except (OSError, ValueError, KeyError, TypeError):
            self._drop(line)

    def _hear(self, line: _Line) -> None:
        try:
            data = line.socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        if line.last:
            return
        if line.node >= 0 and not line.inbox:
            line.since = time.monotonic()
        line.inbox += data
        while not line.last and (parts := _take(line.inbox, _MOST_OPENING_BYTES if line.node < 0 else _MOST_BYTES)):
            if line.session is None:
                self._open(line, *parts)
            else:
                line.session.check(_VISITOR, *parts)
                self._say(line, self.answer(line.node, parts[1]))

    def _open(self, line: _Line, mark: bytes, body: bytes) -> None:
        """Handle an agent's introduction."""
        if not hmac.compare_digest(mark, tag(self.key, b"hello", line.number.encode(), body)):
            raise WireError("it is not signed with this run's key")
        who = _fields(body, run=str, number=str, node=int)
        if who["run"] != self.run:
            raise WireError("it is signed for another run")
        line.session = _Session.of(self.key, self.run, who["node"], (line.number, who["number"]))
        line.node = max(0, who["node"])
        answer = self.admit(cast("Introduction", who))
        line.last = bool(answer)
        self._say(line, json.dumps(answer).encode())
        if not answer:
            for other in self._all():
                if other is not line and other.node == line.node and not other.last:
                    self._drop(other)  # an older connection, which this agent has lost

    def _say(self, line: _Line, body: bytes) -> None:
        assert line.session is not None
        line.since = time.monotonic()
        line.outbox += line.session.seal(_HEAD, body)
        if len(line.outbox) > 2 * _MOST_BYTES:
            raise WireError("it does not listen")

    def _flush(self, line: _Line) -> None:
        if line.outbox:
            try:
                del line.outbox[: line.socket.send(line.outbox)]
            except BlockingIOError:
                pass
            except OSError:
                self._drop(line)
                return
        if line.last and not line.outbox:
            self._drop(line)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.outbox else 0)
        self._selector.modify(line.socket, wanted, line)

    def _all(self) -> list[_Line]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _drop(self, line: _Line) -> None:
        if line.socket.fileno() >= 0:
            self._selector.unregister(line.socket)
            line.socket.close()


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on the addresses of this machine to which ``host`` resolves, or on all addresses in the cases below.

    A name that resolves only to the loopback address (127.0.1.1 in many hosts files), to another machine (a service
    with a separate address) or to nothing yet does not tell on which address the other nodes connect.
    """
    addresses = _addresses(host)
    machine_addresses = [address for address in addresses if is_own(address) and not is_loopback(address)]
    if addresses and all(map(is_loopback, addresses)) and (host == "localhost" or host in addresses):
        machine_addresses = addresses
    elif len(machine_addresses) < len([address for address in addresses if not is_loopback(address)]):
        machine_addresses = []
    sockets: list[socket.socket] = []
    try:
        for address in machine_addresses or [""]:
            sockets.append(listen_at(address, port))
    except OSError as error:
        for each in sockets:
            each.close()
        if not machine_addresses or error.errno == errno.EADDRINUSE:
            raise
        return [listen_at("", port)]
    return sockets


def listen_at(address: str, port: int) -> socket.socket:
    """Listen on one address of this machine; an empty text means all addresses."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in address or both else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both)


def _addresses(host: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(plain(str(entry[4][0])) for entry in entries))


def _take(inbox: bytearray, most_bytes: int) -> tuple[bytes, bytes] | None:
    """Remove and return the first whole frame of the received bytes; None if no frame is complete.

    Raises WireError if the frame is too long.
    """
    if len(inbox) < 4:
        return None
    length = int.from_bytes(inbox[:4], "big")
    if length > most_bytes:
        raise WireError("it is too long")
    if len(inbox) < _HEAD_BYTES + length:
        return None
    mark, body = bytes(inbox[4:_HEAD_BYTES]), bytes(inbox[_HEAD_BYTES : _HEAD_BYTES + length])
    del inbox[: _HEAD_BYTES + length]
    return mark, body


def _receive(connection: socket.socket, most_bytes: int, timeout_s: float) -> tuple[bytes, bytes]:
    """Receive a whole frame; raises TimeoutError after ``timeout_s``, even if bytes keep arriving."""
    end = time.monotonic() + timeout_s
    inbox = bytearray()
    while (parts := _take(inbox, most_bytes)) is None:
        wanted = _HEAD_BYTES if len(inbox) < 4 else _HEAD_BYTES + int.from_bytes(inbox[:4], "big")
        remaining_s = end - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no answer")
        connection.settimeout(remaining_s)
        data = connection.recv(min(wanted - len(inbox), 1 << 16))
        if not data:
            raise ConnectionResetError("the connection was closed")
        inbox += data
    return parts


def _fields(body: bytes, **types: type) -> dict[str, Any]:
    """Return the JSON object in ``body``; raises WireError unless it has the fields and types in ``types``."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise WireError("it is no JSON") from None
    if not isinstance(message, dict) or any(type(message.get(name)) is not kind for name, kind in types.items()):
        raise WireError("fields are missing")
    return message


def _name(run: str) -> str:
    """Return ``run NAME`` for the run name that a stranger sent, or ``another run`` if the name is invalid."""
    plain = run.isascii() and run.replace("-", "").replace("_", "").replace(".", "").isalnum()
    return f"run {run}" if plain and len(run) <= 100 else "another run"
