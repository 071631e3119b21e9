"""Messages between the agents of several nodes, and the time limits for waiting."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from partool_runtime.agent.standing import Standing
from partool_runtime.agent.supervision import FINISH_GRACE_S


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Time limits and intervals of the agents' messages, in seconds."""

    beat_s: float = 1.0
    """Interval between two messages."""
    silent_s: float = 15.0
    """Time without a message after which a node counts as gone."""
    arrival_s: float = 600.0
    """Time for all nodes to join: images are pulled and pods start minutes apart."""
    notice_s: float = 30.0
    """Interval between two reports of missing nodes."""
    farewell_s: float = 10.0
    """Time for the other nodes to read the result before node 0 ends."""
    finish_s: float = FINISH_GRACE_S
    """Time for the other ranks to end after the first rank has finished all steps."""
    stranger_s: float = 30.0
    """Time within which another run's agent, or an agent that is ending, must free the address."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the run on one node."""

    node: int
    host: str
    code: int
    reason: str = ""
    text: str = ""
    """Text of several lines for the user."""
    time: float = 0.0
    """Unix time of the first failure on the node."""
    lost_peer: bool = False
    """True if the first failure on the node was the loss of a peer rank; the cause is then a failure elsewhere."""
    asked: str = ""
    """Name of the stop signal that the agent got."""
    early: bool = False
    """True if the node's ranks were ended before their first step, as requested; their end is no failure."""
    overdue: bool = False
    """True if the node's ranks were asked to stop, and were killed before a checkpoint was complete."""
    signature: str = ""
    """The failure's text without the numbers that differ between attempts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the run, the same for all nodes."""

    code: int
    reason: str
    text: str = ""
    node: int = 0
    """Node with the first failure."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a node, as the node reports it."""

    token: str
    host: str
    head: str = ""
    """Address of node 0 as this node sees it."""
    beat: int = 0
    trouble: str = ""
    """Reason why the ranks of the node have failed or are about to be ended."""
    stopping: bool = False
    """True once a rank of the node has stopped after a checkpoint."""
    early: bool = False
    """True once the ranks of the node were ended, as requested, before their first step."""
    stalled: bool = False
    """True if the trouble is a rank that makes no progress."""
    standing: Standing | None = None
    """The rank of the node that is the furthest behind."""
    patient: bool = True
    """True if a rank of the node has not passed the watchdog's limit."""
    outcome: Outcome | None = None
    read: bool = False
    """True once the node has received the result of the run."""

    @classmethod
    def load(cls, text: bytes) -> State:
        """Parse the text that :func:`dump` wrote."""
        fields = json.loads(text)
        outcome, standing = fields.pop("outcome"), fields.pop("standing")
        return cls(
            **fields,
            outcome=Outcome(**outcome) if outcome else None,
            standing=Standing(**standing) if standing else None,
        )


@dataclass(frozen=True, slots=True)
class Notice:
    """Message of node 0 to all nodes."""

    beat: int = 0
    missing: tuple[int, ...] = ()
    attempt: int = 0
    """Number of the attempt to start; 0 as long as nodes are missing."""
    head: str = ""
    """Address of node 0 as the other nodes see it."""
    store: tuple[str, int] = ("", 0)
    """Host and port of the store at which the ranks meet."""
    trouble: str = ""
    stopping: bool = False
    early: bool = False
    stalled: bool = False
    finished: bool = False
    """True once all ranks of a node have finished all steps."""
    standing: Standing | None = None
    """The rank of all nodes that is the furthest behind."""
    patient: tuple[int, ...] = ()
    """Nodes of which a rank has not passed the watchdog's limit."""
    verdict: Verdict | None = None

    @classmethod
    def load(cls, text: bytes) -> Notice:
        """Parse the text that :func:`dump` wrote."""
        fields = json.loads(text)
        verdict, missing, store = fields.pop("verdict"), tuple(fields.pop("missing")), tuple(fields.pop("store"))
        standing, patient = fields.pop("standing"), tuple(fields.pop("patient"))
        return cls(
            **fields,
            patient=patient,
            missing=missing,
            store=store,
            standing=Standing(**standing) if standing else None,
            verdict=Verdict(**verdict) if verdict else None,
        )

    @property
    def over(self) -> bool:
        """True if no node can join any more."""
        return bool(self.attempt or self.trouble or self.stopping or self.verdict)


def dump(record: State | Notice) -> str:
    """Return a record as text, which the ``load`` method of the record's class parses."""
    return json.dumps(asdict(record))
