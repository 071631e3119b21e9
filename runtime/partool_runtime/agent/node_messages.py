"""What agents of several nodes tell each other, and how long they wait."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """How long agents wait for each other."""

    beat_s: float = 1.0
    """Between two signs of life."""
    silent_s: float = 15.0
    """Without a sign of life a node counts as gone."""
    arrival_s: float = 600.0
    """For all nodes to come together: images are pulled and pods start minutes apart."""
    notice_s: float = 30.0
    """Between two messages about who is missing."""
    farewell_s: float = 10.0
    """For the others to hear how the run ended, before node 0 goes."""
    stranger_s: float = 30.0
    """For another run's agent, or one that is ending, to free the address."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended on one node."""

    node: int
    host: str
    code: int
    reason: str = ""
    text: str = ""
    """For the user, many lines."""
    time: float = 0.0
    """Unix time of the first failure on that node."""
    lost_peer: bool = False
    """True if that failure was the loss of another rank: somebody else's failure came first."""
    asked: str = ""
    """Name of the stop signal that the agent got."""
    early: bool = False
    """True if the ranks there were ended, as asked, before their first step: the loss of them is no failure."""
    signature: str = ""
    """The failure without the numbers that differ from one attempt to the next."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the run ended, the same for all nodes."""

    code: int
    reason: str
    text: str = ""
    node: int = 0
    """Node whose failure came first."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a node, as it reports it."""

    token: str
    host: str
    head: str = ""
    """Address of node 0 as this node sees it."""
    beat: int = 0
    trouble: str = ""
    """Why the ranks here have failed, or are about to be ended."""
    stopping: bool = False
    """True once a rank here has stopped after a checkpoint."""
    early: bool = False
    """True once the ranks here were ended, as asked, before their first step."""
    outcome: Outcome | None = None
    read: bool = False
    """True once the verdict has been read."""

    @classmethod
    def load(cls, text: bytes) -> State:
        """Read what :func:`dump` wrote."""
        fields = json.loads(text)
        outcome = fields.pop("outcome")
        return cls(**fields, outcome=Outcome(**outcome) if outcome else None)


@dataclass(frozen=True, slots=True)
class Notice:
    """Message of node 0 to all nodes."""

    beat: int = 0
    missing: tuple[int, ...] = ()
    attempt: int = 0
    """Number of the attempt that is to start; 0 as long as nodes are missing."""
    head: str = ""
    """Address of node 0 as the others see it."""
    store: tuple[str, int] = ("", 0)
    """Where the ranks meet."""
    trouble: str = ""
    stopping: bool = False
    early: bool = False
    verdict: Verdict | None = None

    @classmethod
    def load(cls, text: bytes) -> Notice:
        """Read what :func:`dump` wrote."""
        fields = json.loads(text)
        verdict, missing, store = fields.pop("verdict"), tuple(fields.pop("missing")), tuple(fields.pop("store"))
        return cls(**fields, missing=missing, store=store, verdict=Verdict(**verdict) if verdict else None)

    @property
    def over(self) -> bool:
        """True if nobody can join any more."""
        return bool(self.attempt or self.trouble or self.stopping or self.verdict)


def dump(record: State | Notice) -> str:
    """Return a record as text, for its ``load``."""
    return json.dumps(asdict(record))
