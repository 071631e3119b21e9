"""Schedules as text: CSV with one row per rank and one action per cell, ``2F0`` or ``2SEND_F0``."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from typing import get_args

from partool.schedule.actions import COMPUTE, Action, Kind, Order, Schedule, with_transfers

_CELL = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d+)")


class ScheduleTextError(ValueError):
    """What is wrong with a schedule's text; ``row`` and ``column`` count from 1, 0 where no cell is to blame."""

    def __init__(self, message: str, row: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.row, self.column = row, column


def cell(action: Action) -> str:
    """Return an action as text: stage, kind, micro-batch."""
    return f"{action.stage}{action.kind}{action.micro_batch}"


def to_text(schedule: Schedule) -> str:
    """Return the lists as CSV, transfers included."""
    return "".join(",".join(cell(action) for action in actions) + "\n" for actions in schedule.lists)


def schedule_hash(schedule: Schedule) -> str:
    """Return the SHA-256 of what runs: what moves, the map of stages, the lists."""
    head = f"{schedule.moves} {schedule.trained_from} {','.join(map(str, schedule.placement))}\n"
    return hashlib.sha256((head + to_text(schedule)).encode()).hexdigest()


def from_text(text: str, name: str = "file") -> Schedule:
    """Read a schedule; lists without any transfer get theirs. Raises :class:`ScheduleTextError`.

    A stage belongs to the rank that computes it. The result may be unsound: see :func:`partool.schedule.validate`.
    """
    lists = tuple(
        tuple(read_cell(entry.strip(), row, column) for column, entry in enumerate(cells, 1) if entry.strip())
        for row, cells in enumerate(csv.reader(io.StringIO(text)), 1)
        if cells and not cells[0].lstrip().startswith("#")
    )
    placement = _placement(lists)
    if not any(action.kind not in COMPUTE for actions in lists for action in actions):
        lists = with_transfers(lists, placement)
    batches = 1 + max(action.micro_batch for actions in lists for action in actions)
    return Schedule(name, len(lists), batches, max(map(placement.count, placement)), placement, lists)


def read_cell(text: str, row: int = 0, column: int = 0) -> Action:
    """Read what :func:`cell` wrote; raises :class:`ScheduleTextError`."""
    found = _CELL.fullmatch(text)
    if found is None or found[2] not in get_args(Kind):
        raise ScheduleTextError(f"{text!r} is no action such as 0F3 or 1RECV_F0", row, column)
    return Action(found[2], int(found[1]), int(found[3]))  # type: ignore[arg-type]


def _placement(lists: Order) -> tuple[int, ...]:
    where: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for kind, stage, _ in actions:
            if kind in COMPUTE and where.setdefault(stage, rank) != rank:
                raise ScheduleTextError(
                    f"stage {stage} is computed on rank {where[stage]} and on rank {rank}", rank + 1
                )
    missing = sorted(set(range(max(where, default=0) + 1)) - where.keys())
    if missing:
        raise ScheduleTextError(f"no rank computes stage {missing[0]}" if where else "there are no actions")
    return tuple(where[stage] for stage in range(len(where)))
