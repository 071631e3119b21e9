"""Find faults in single actions (cells) of a schedule; messages write actions as a file's cells do: ``2F0``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from partool.schedule.actions import COMPUTE, SHIFTS, Action, Kind, Schedule
from partool.schedule.text import cell

NO_STAGE = "there is no stage"
_NAMED = 2
"""Maximum number of actions that a message names; of further actions the message states only the number."""


class ScheduleFault(NamedTuple):
    """A fault of a schedule. The rank, and the position in the rank's list, are -1 if no single action is at fault."""

    message: str
    rank: int = -1
    at: int = -1


def named(actions: Sequence[Action]) -> str:
    """Return the actions as text, such as ``1F2``, ``1F2 and 1F3``, or ``1F2, 1F3 and 4 more``."""
    cells = [cell(action) for action in actions]
    if len(cells) > _NAMED:
        return f"{', '.join(cells[:_NAMED])} and {len(cells) - _NAMED} more"
    return " and ".join(cells)


def are(actions: Sequence[Action]) -> str:
    """Return "is" or "are", by the number of actions."""
    return "is" if len(actions) == 1 else "are"


def cell_faults(schedule: Schedule, before: Set[Action]) -> Iterator[ScheduleFault]:
    """Yield a fault for each action that does not belong in the schedule or that appears more than once.

    ``before`` are the compute actions that were executed before the action lists begin.
    """
    wanted = _wanted(schedule, before)
    for rank, actions in enumerate(schedule.lists):
        positions: dict[tuple[Kind, int, str], list[int]] = defaultdict(list)
        for at, action in enumerate(actions):
            if reason := _foreign(schedule, action, wanted):
                positions[action.kind, action.stage, reason].append(at)
        for (_, _, reason), places in positions.items():
            yield ScheduleFault(f"{named([actions[at] for at in places])}: {reason}", rank, places[0])
    yield from _doubled(schedule, before)


def missing(schedule: Schedule, before: Set[Action]) -> list[Action]:
    """Return the compute actions of a full step that are neither in a rank's list nor in ``before``."""
    present = _present(schedule, before)
    return [action for action in _wanted(schedule, before) if action not in present]


def missing_words(schedule: Schedule, lost: Iterable[Action]) -> Iterator[ScheduleFault]:
    """Yield faults that name the missing actions ``lost``, grouped by stage and kind."""
    alike: dict[tuple[int, Kind], list[Action]] = defaultdict(list)
    for action in lost:
        alike[action.stage, action.kind].append(action)
    for (stage, _), actions in alike.items():
        # If weights are sent around a ring, the rank of a micro-batch follows from the action lists alone.
        rank = schedule.placement[stage] if schedule.moves == "activations" else -1
        yield ScheduleFault(f"{named(actions)} {are(actions)} missing", rank)


def _present(schedule: Schedule, before: Iterable[Action]) -> set[Action]:
    return {action for actions in (before, *schedule.lists) for action in actions}


def _wanted(schedule: Schedule, before: Set[Action]) -> dict[Action, None]:
    """Return the compute actions of a full step, as the keys of a mapping sorted by stage and micro-batch.

    A backward pass counts as split into two actions if the lists contain one of the two.
    """
    present = _present(schedule, before)
    actions: dict[Action, None] = {}
    for stage in range(schedule.stages):
        for batch in range(schedule.micro_batches):
            split = Action("I", stage, batch) in present or Action("W", stage, batch) in present
            backward: tuple[Kind, ...] = () if stage < schedule.trained_from else ("I", "W") if split else ("B",)
            actions |= {Action(kind, stage, batch): None for kind in ("F", *backward)}
    return actions


def _foreign(schedule: Schedule, action: Action, wanted: dict[Action, None]) -> str:
    """Return the reason why an action does not belong in the schedule; empty if the action belongs in it."""
    if action in wanted or action.kind in SHIFTS or not 0 <= action.stage < schedule.stages:
        return ""
    last = schedule.micro_batches - 1
    if not 0 <= action.micro_batch <= last:
        others = f"are only micro-batches 0 to {last}" if last else "is only micro-batch 0"
        return f"there {others}"
    if action.kind not in COMPUTE:
        return ""
    if action.stage < schedule.trained_from:
        return f"stage {action.stage} is frozen and has no backward pass"
    return "a backward pass is whole or in halves, not both"


def _doubled(schedule: Schedule, before: Set[Action]) -> Iterator[ScheduleFault]:
    places: dict[Action, list[tuple[int, int]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.lists):
        for at, action in enumerate(actions):
            places[action].append((rank, at))
    alike: dict[tuple[Kind, int, int], list[Action]] = defaultdict(list)
    for action, positions in places.items():
        if len(positions) + (action in before) > 1:
            alike[action.kind, action.stage, positions[-1][0]].append(action)
    # Partool may have added the transfers next to compute actions; their faults follow from faults of compute actions.
    for same in sorted(alike.values(), key=lambda actions: actions[0].kind not in COMPUTE):
        positions = places[same[0]]
        rank, at = positions[-1]
        if same[0] in before:
            how = "was done before"
        elif all(other == rank for other, _ in positions):
            how = f"is there {len(positions)} times"
        else:
            how = f"is on rank {positions[0][0]} and on rank {rank}"
        more = f"; likewise {len(same) - 1} more of its kind" if len(same) > 1 else ""
        yield ScheduleFault(f"{cell(same[0])} {how}{more}", rank, at)
