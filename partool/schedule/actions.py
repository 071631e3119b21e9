"""What a pipeline rank does, action by action. Actions name stages, never ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Forward; backward; its two halves, the gradients of inputs and of weights; transfers of activations (F) and of
gradients (B) between neighbouring stages."""
COMPUTE: frozenset[str] = frozenset({"F", "B", "I", "W"})


class Action(NamedTuple):
    """One action of one stage on one micro-batch. A transfer names the stage that sends or receives."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """One list of actions per rank, and which rank runs which stage."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    """Stages per rank."""
    placement: tuple[int, ...]
    """Rank of each stage."""
    lists: tuple[tuple[Action, ...], ...]
    """Per rank, in the order in which it acts."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)


def with_transfers(order: tuple[tuple[Action, ...], ...], placement: tuple[int, ...]) -> tuple[tuple[Action, ...], ...]:
    """Return lists of compute actions with a receive before and a send after each one that needs it."""
    return tuple(tuple(step for action in rank for step in _around(action, placement)) for rank in order)


def _around(action: Action, placement: tuple[int, ...]) -> list[Action]:
    kind, stage, batch = action
    before, after = stage > 0, stage < len(placement) - 1
    from_before = before and placement[stage - 1] != placement[stage]
    from_after = after and placement[stage + 1] != placement[stage]
    steps: list[Action] = []
    if kind == "F":
        steps += [Action("RECV_F", stage, batch)] * from_before
        steps += [action] + [Action("SEND_F", stage, batch)] * from_after
    elif kind in ("B", "I"):
        steps += [Action("RECV_B", stage, batch)] * from_after
        steps += [action] + [Action("SEND_B", stage, batch)] * from_before
    else:
        steps.append(action)
    return steps
