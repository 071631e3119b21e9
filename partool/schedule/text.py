"""Schedules as CSV text with one row per rank and one action per cell, such as ``2F0`` or ``2SEND_F0``."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import NamedTuple, get_args

from partool.schedule.actions import COMPUTE, Action, Kind, Order, Schedule, with_transfers

_CELL = re.compile(r"([0-9]{1,9})([A-Z]+(?:_[A-Z]+)?)([0-9]{1,9})")
_HEAD = re.compile(r"#\s*(moves|placement|trained_from|micro_batches)=(.*)")
_MOST = 100_000
"""Maximum number of micro-batches that the comment ``# micro_batches=`` may state."""
_LISTED = 8
"""Maximum number of stages that a message names."""
_IDLE = "-"
"""Text of the row of a rank without actions."""


class ScheduleTextError(ValueError):
    """A mistake in a schedule's text; ``row`` and ``column`` count from 1 and are 0 if no single cell is wrong."""

    def __init__(self, message: str, row: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.row, self.column = row, column


class _Cell(NamedTuple):
    action: Action
    row: int
    column: int


def cell(action: Action) -> str:
    """Return an action as text, stage before kind before micro-batch: ``2F0``."""
    return f"{action.stage}{action.kind}{action.micro_batch}"


def to_text(schedule: Schedule) -> str:
    """Return the action lists as CSV, with transfers; facts that the lists do not show precede them in comments.

    These are ``# moves=weights``, ``# placement=1 2 0`` (the rank of each stage, if weights are sent around a ring or a
    stage has nothing to do), ``# trained_from=1`` and ``# micro_batches=4`` (where few actions are left). A rank
    without actions has the one cell ``-``.
    """
    head = ["# moves=weights"] if schedule.moves == "weights" else []
    last = max((action.micro_batch for row in schedule.lists for action in row if _computes(action)), default=-1)
    if last + 1 != schedule.micro_batches or last >= sum(map(len, schedule.lists)):
        head.append(f"# micro_batches={schedule.micro_batches}")
    computed = {(action.stage, rank) for rank, row in enumerate(schedule.lists) for action in row if _computes(action)}
    if schedule.moves == "weights" or computed != set(enumerate(schedule.placement)):
        head.append(f"# placement={' '.join(map(str, schedule.placement))}")
    head += [f"# trained_from={schedule.trained_from}"] if schedule.trained_from else []
    rows = [",".join(cell(action) for action in actions) or _IDLE for actions in schedule.lists]
    return "".join(f"{line}\n" for line in (*head, *rows))


def schedule_hash(schedule: Schedule) -> str:
    """Return the SHA-256 of everything that decides what runs: moves, placement of stages, and action lists."""
    head = f"{schedule.moves} {schedule.trained_from} {','.join(map(str, schedule.placement))}\n"
    return hashlib.sha256((head + to_text(schedule)).encode()).hexdigest()


def from_text(text: str, name: str = "file") -> Schedule:
    """Read a schedule; transfers are added to lists that have none. Raises :class:`ScheduleTextError`.

    Rows are ranks; empty rows and cells are ignored, as are rows that begin with ``#``, except the comments of
    :func:`to_text`. A stage belongs to the rank that computes it unless a comment says otherwise. The result may be
    invalid: see :func:`partool.schedule.validate`.
    """
    head, numbered = _rows(text)
    rows = [row for _, row in numbered]
    cells = [entry for row in rows for entry in row]
    if not cells:
        raise ScheduleTextError("there are no actions")
    lists: Order = tuple(tuple(entry.action for entry in row) for row in rows)
    weights = _of_head(head, "moves", "activations") == "weights"
    placement = _placement(rows, head, weights)
    batches = _micro_batches(head, cells)
    wrong = next((entry for entry in cells if entry.action.stage >= len(placement)), None)
    if wrong:
        message = f"{cell(wrong.action)}: there is no stage {wrong.action.stage}, no row computes it"
        raise ScheduleTextError(message, wrong.row, wrong.column)
    if not weights and all(_computes(entry.action) for entry in cells):
        lists = with_transfers(lists, placement)
    return Schedule(
        name,
        ranks=len(lists),
        micro_batches=batches,
        chunks=max(map(placement.count, placement)),
        placement=placement,
        lists=lists,
        moves="weights" if weights else "activations",
        trained_from=_number(head, "trained_from", 0, len(placement)),
    )


def rows_of(text: str) -> tuple[int, ...]:
    """Return the row (from 1) of each rank's list in a text; raises :class:`ScheduleTextError` for malformed cells."""
    return tuple(number for number, _ in _rows(text)[1])


def columns_of(text: str, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the column (from 1) of each action of a schedule that was read from ``text``; 0 for added transfers."""
    by_rank = []
    for (_, entries), actions in zip(_rows(text)[1], schedule.lists, strict=True):
        rest, columns = iter(entries), []
        entry = next(rest, None)
        for action in actions:
            written = entry is not None and entry.action == action
            columns.append(entry.column if entry is not None and written else 0)
            entry = next(rest, None) if written else entry
        by_rank.append(tuple(columns))
    return tuple(by_rank)


def diff(one: Schedule, other: Schedule) -> list[str]:
    """Return one line per difference in sizes, in ranks of stages, or in action lists (cells are numbered from 1)."""
    differences = [
        f"{what}: {getattr(one, field)} -> {getattr(other, field)}"
        for what, field in (
            ("what moves", "moves"),
            ("ranks", "ranks"),
            ("stages", "stages"),
            ("micro-batches", "micro_batches"),
            ("first trained stage", "trained_from"),
        )
        if getattr(one, field) != getattr(other, field)
    ]
    for stage, (old, new) in enumerate(zip(one.placement, other.placement, strict=False)):
        differences += [f"stage {stage}: rank {old} -> rank {new}"] if old != new else []
    for rank, (before, now) in enumerate(zip_longest(one.lists, other.lists, fillvalue=())):
        old_cells, new_cells = list(map(cell, before)), list(map(cell, now))
        matcher = SequenceMatcher(a=old_cells, b=new_cells, autojunk=False)
        for what, start, stop, begin, end in matcher.get_opcodes():
            if what != "equal":
                place = f"cell {start + 1}" if stop - start <= 1 else f"cells {start + 1}-{stop}"
                place = f"before {place}" if start == stop else place
                parts = " ".join(old_cells[start:stop]) or "nothing", " ".join(new_cells[begin:end]) or "nothing"
                differences.append(f"rank {rank}, {place}: {' -> '.join(parts)}")
    return differences


def _computes(action: Action) -> bool:
    return action.kind in COMPUTE


def _rows(text: str) -> tuple[dict[str, tuple[str, int]], list[tuple[int, list[_Cell]]]]:
    """Return two things: comment key → (value, row number), and (row number, cells) of each rank."""
    head: dict[str, tuple[str, int]] = {}
    rows: list[tuple[int, list[_Cell]]] = []
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        columns = enumerate((entry.strip().strip('"') for entry in line.split(",")), 1)
        entries = [(entry, column) for column, entry in columns if entry]
        if line.lstrip().startswith("#"):
            if comment := _HEAD.fullmatch(line.strip()):
                head[comment[1]] = comment[2].strip(), number
        elif entries:
            alone = [entry for entry, _ in entries] == [_IDLE]
            cells = [] if alone else [_Cell(read_cell(entry, number, at), number, at) for entry, at in entries]
            rows.append((number, cells))
    return head, rows


def read_cell(text: str, row: int = 0, column: int = 0) -> Action:
    """Parse a cell that :func:`cell` wrote; raises :class:`ScheduleTextError`."""
    match = _CELL.fullmatch(text)
    if match is None or match[2] not in get_args(Kind):
        raise ScheduleTextError(f"{text[:40]!r} is no action such as 0F3 or 1RECV_F0", row, column)
    return Action(match[2], int(match[1]), int(match[3]))  # type: ignore[arg-type]


def _of_head(head: dict[str, tuple[str, int]], key: str, default: str) -> str:
    value, row = head.get(key, (default, 0))
    if key == "moves" and value not in ("activations", "weights"):
        raise ScheduleTextError(f"moves is activations or weights, not {value[:40]!r}", row)
    return value


def _number(head: dict[str, tuple[str, int]], key: str, default: int, most: int) -> int:
    value, row = head.get(key, (str(default), 0))
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) > most:
        raise ScheduleTextError(f"{key}: {value[:40]!r} is no number up to {most}", row)
    return int(value)


def _micro_batches(head: dict[str, tuple[str, int]], cells: list[_Cell]) -> int:
    """Return the number of micro-batches; refuses numbers so large that iterating over them would not end."""
    last = max(
        (entry for entry in cells if _computes(entry.action)), key=lambda entry: entry.action.micro_batch, default=None
    )
    named = "micro_batches" in head
    count = _number(head, "micro_batches", 0, _MOST) if named else len(cells)
    if last and last.action.micro_batch >= count:
        raise ScheduleTextError(f"{cell(last.action)}: there are fewer micro-batches than that", last.row, last.column)
    return count if named or not last else last.action.micro_batch + 1


def _placement(rows: list[list[_Cell]], head: dict[str, tuple[str, int]], weights: bool) -> tuple[int, ...]:
    computed = [(rank, entry) for rank, cells in enumerate(rows) for entry in cells if _computes(entry.action)]
    counts = Counter((entry.action.stage, rank) for rank, entry in computed)
    where: dict[int, int] = {}
    for stage, rank in counts:
        # The rank with most of a stage's cells owns the stage, so that a single deviating cell is the reported mistake.
        if counts[stage, rank] > counts.get((stage, where.get(stage, -1)), 0):
            where[stage] = rank
    for rank, (action, row, column) in computed:
        if where[action.stage] != rank and not weights:
            message = f"stage {action.stage} is computed on rank {where[action.stage]} and on rank {rank}"
            raise ScheduleTextError(f"{cell(action)}: {message}", row, column)
    if "placement" in head:
        return _named(*head["placement"], where, len(rows), weights)
    if weights:
        raise ScheduleTextError("where weights move, the rank that owns each stage is missing: # placement=1 2 0")
    missing = next((stage for stage in range(len(where)) if stage not in where), None)
    if missing is not None or not where:
        raise _no_stage(missing or 0, [entry for _, entry in computed])
    return tuple(where[stage] for stage in range(len(where)))


def _no_stage(missing: int, computed: list[_Cell]) -> ScheduleTextError:
    """Return the error if stage ``missing`` has no actions: a row is missing, or a cell names too high a stage."""
    counts = Counter(entry.action.stage for entry in computed)
    beyond = [entry for entry in computed if entry.action.stage > missing]
    if beyond and 2 * len(beyond) <= max(counts.values()):
        action, row, column = beyond[0]
        few = f"stage {missing - 1}" if missing else "no stage"
        return ScheduleTextError(f"{cell(action)}: the last stage of the other cells is {few}", row, column)
    others = ", ".join(map(str, sorted(counts)[:_LISTED])) + (", ..." if len(counts) > _LISTED else "")
    rows = f"the rows compute {others}" if counts else "no row computes anything"
    return ScheduleTextError(f"there is no stage {missing}: {rows}")


def _named(value: str, row: int, where: dict[int, int], ranks: int, weights: bool) -> tuple[int, ...]:
    """Return the rank of each stage that the comment ``# placement=`` names."""
    if not re.fullmatch("[0-9]{1,9}( +[0-9]{1,9})*", value):
        raise ScheduleTextError(f"{value[:40]!r} names no rank for each stage, such as 1 2 0", row)
    placement = tuple(map(int, value.split()))
    if max(placement) >= ranks or max(where, default=0) >= len(placement):
        raise ScheduleTextError(
            f"{value[:40]!r} places {len(placement)} stages on ranks up to {max(placement)} of {ranks}", row
        )
    wrong = next((stage for stage, rank in where.items() if placement[stage] != rank and not weights), None)
    if wrong is not None:
        raise ScheduleTextError(
            f"stage {wrong} is computed on rank {where[wrong]}, not on rank {placement[wrong]}", row
        )
    return placement
