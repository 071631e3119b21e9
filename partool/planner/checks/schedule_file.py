"""A schedule of the user's own: read, and checked like the ones that partool makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.schedule import Schedule, ScheduleTextError, cell, from_text, problems, rows_of
from partool.spec.parallel import ScheduleFile
from partool.spec.spec import Spec

_PATH = ("parallel", "pipeline", "schedule")
_SHOWN = 8
"""Problems of one file that are shown; the rest is counted."""


def read_schedule(spec: Spec, base_dir: Path) -> tuple[Schedule | None, list[Diagnostic]]:
    """Return the schedule in the file that a spec names, None where it names none, and what is wrong with it."""
    named = spec.parallel.pipeline.schedule
    if not isinstance(named, ScheduleFile):
        return None, []
    file = base_dir / named.file
    help = "one row per rank, one action per cell, such as 0F3; "
    help += "partool schedule 1f1b --ranks 2 --micro-batches 4 --out my.csv writes one"
    try:
        text = file.read_text(encoding="utf-8")
        schedule = from_text(text)
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}"
        help = "paths start at the spec's folder"
        return None, [Diagnostic("PT432", message, path=(*_PATH, "file"), help=help)]
    except ScheduleTextError as error:
        where = "".join(f", {name} {at}" for name, at in (("row", error.row), ("column", error.column)) if at)
        return None, [Diagnostic("PT432", f"{named.file}{where}: {error}", path=(*_PATH, "file"), help=help)]
    except ValueError as error:
        message = f"{named.file} is no text: {error}"
        return None, [Diagnostic("PT432", message, path=(*_PATH, "file"), help=help)]
    return schedule, list(_unsound(named.file, text, schedule))


def _unsound(name: str, text: str, schedule: Schedule) -> Iterator[Diagnostic]:
    found = problems(schedule)
    rows = rows_of(text)
    for problem in found[:_SHOWN]:
        where = ""
        if 0 <= problem.rank < len(rows):
            actions = schedule.lists[problem.rank]
            here = f" at {cell(actions[problem.at])}" if 0 <= problem.at < len(actions) else ""
            where = f", row {rows[problem.rank]}{here}"
        help = "partool schedule --check says the same without a spec"
        yield Diagnostic("PT433", f"{name}{where}: {problem.message}", path=(*_PATH, "file"), help=help)
    if len(found) > _SHOWN:
        message = f"{name}: {len(found) - _SHOWN} more problems"
        yield Diagnostic("PT433", message, path=(*_PATH, "file"), help="mend the first ones; others follow from them")
