"""Actions of pipeline ranks. An action names a stage, never a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal[
    "F", "B", "I", "W",
    "SEND_F", "RECV_F", "SEND_B", "RECV_B",
    "SEND_FW", "RECV_FW", "SEND_BW", "RECV_BW", "SEND_G", "RECV_G",
]  # fmt: skip
"""F: forward pass; B: backward pass; I and W: the two parts of a split backward pass, which compute gradients of inputs
(I) and of weights (W). Transfers send activations (F) and gradients (B) between neighbouring stages. If weights are
sent around a ring of ranks instead, shifts send a stage's weights for forward passes (FW) and for backward passes (BW),
and the stage's summed gradients (G)."""
COMPUTE: frozenset[str] = frozenset({"F", "B", "I", "W"})
SHIFTS: frozenset[str] = frozenset({"SEND_FW", "RECV_FW", "SEND_BW", "RECV_BW", "SEND_G", "RECV_G"})


class Action(NamedTuple):
    """One action of one stage on one micro-batch. The stage of a transfer is the stage that sends or receives.

    Shifts have no micro-batch: ``micro_batch`` holds the number of a turn, and ``stage`` names the stage whose weights
    or gradients move. The send and the receive of a shift have the same number, and no other shift of their kind and
    stage has this number.
    """

    kind: Kind
    stage: int
    micro_batch: int


Order = tuple[tuple[Action, ...], ...]
"""One list per rank, of compute actions only or of all actions, in the order in which the rank executes them."""


@dataclass(frozen=True)
class Schedule:
    """One list of actions per rank, and the rank of each stage."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    """Number of stages per rank."""
    placement: tuple[int, ...]
    """Rank of each stage; if weights are sent around a ring, the rank that keeps the stage's parameters (the owner)."""
    lists: Order
    """Actions of each rank, in the order in which the rank executes them."""
    moves: Literal["activations", "weights"] = "activations"
    """Kind of tensors sent between ranks: activations, so that each stage stays on its rank, or weights, so that each
    micro-batch stays on its rank."""
    trained_from: int = 0
    """First stage with a backward pass; the stages before it are frozen and only run forward."""

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.placement)

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return tuple(stage for stage, where in enumerate(self.placement) if where == rank)

    @cached_property
    def shift_ranks(self) -> dict[Action, int]:
        """Return shift → the rank whose list contains the shift; if several lists do, the highest of these ranks."""
        return {action: rank for rank, actions in enumerate(self.lists) for action in actions if action.kind in SHIFTS}


def peer(schedule: Schedule, rank: int, action: Action) -> tuple[int, Action]:
    """Return the rank and the action at the other end of a rank's transfer.

    Activations and gradients are exchanged with the ranks of neighbouring stages. The other end of a shift is on the
    rank whose list contains it. The returned rank is -1 if there is no neighbouring stage, or no other end of a shift.
    """
    kind, stage, batch = action
    other: Kind = kind.replace("SEND", "RECV") if kind.startswith("SEND") else kind.replace("RECV", "SEND")  # type: ignore[assignment]
    if kind in SHIFTS:
        end = Action(other, stage, batch)
        return schedule.shift_ranks.get(end, -1), end
    step = 1 if kind in ("SEND_F", "RECV_B") else -1
    neighbour = stage + step
    return schedule.placement[neighbour] if 0 <= neighbour < schedule.stages else -1, Action(other, neighbour, batch)


def with_transfers(order: Order, placement: Sequence[int]) -> Order:
    """Return the compute actions with transfers: a send follows each action whose result another rank needs.

    Messages between two ranks carry no names and arrive in the order in which they are sent. A receive therefore
    stands before the action that needs the message, or even before an earlier action that needs a later message from
    the same rank.
    """
    need_at = _needs(order, placement)
    before: list[defaultdict[int, list[Action]]] = [defaultdict(list) for _ in order]
    for (_, to), messages in _sent(order, placement).items():
        at = len(order[to])
        for message in reversed(messages):
            at = min(at, need_at.get(message, at))
            before[to][at].insert(0, message)
    return tuple(
        tuple(
            step
            for at, action in enumerate(actions)
            for step in (*before[rank][at], action, *_sends(action, placement))
        )
        for rank, actions in enumerate(order)
    )


def _needs(order: Order, placement: Sequence[int]) -> dict[Action, int]:
    """Return receive action → position, in the receiving rank's list, of the first action that needs the message."""
    first_users: dict[Action, int] = {}
    for actions in order:
        for at, (kind, stage, batch) in enumerate(actions):
            if kind == "F" and stage > 0 and placement[stage - 1] != placement[stage]:
                first_users.setdefault(Action("RECV_F", stage, batch), at)
            if kind in ("B", "I") and stage < len(placement) - 1 and placement[stage + 1] != placement[stage]:
                first_users.setdefault(Action("RECV_B", stage, batch), at)
    return first_users


def _sent(order: Order, placement: Sequence[int]) -> dict[tuple[int, int], list[Action]]:
    """Return the receive actions of the messages from each rank to each other rank, in the order of the sends."""
    messages: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(order):
        for action in actions:
            for kind, stage, batch in _sends(action, placement):
                receive = Action("RECV_F", stage + 1, batch) if kind == "SEND_F" else Action("RECV_B", stage - 1, batch)
                messages[rank, placement[receive.stage]].append(receive)
    return messages


def _sends(action: Action, placement: Sequence[int]) -> list[Action]:
    kind, stage, batch = action
    if kind == "F" and stage < len(placement) - 1 and placement[stage + 1] != placement[stage]:
        return [Action("SEND_F", stage, batch)]
    if kind in ("B", "I") and stage > 0 and placement[stage - 1] != placement[stage]:
        return [Action("SEND_B", stage, batch)]
    return []
