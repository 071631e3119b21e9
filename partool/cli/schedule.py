"""``partool schedule``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from partool.cli._fail import fail
from partool.cli._files import printing, write_or_exit
from partool.plan.terminal import say
from partool.schedule import Schedule
from partool.strategies.schedules import SCHEDULES

if TYPE_CHECKING:
    from partool.report.drawing import Drawing

_ERRORS, _USAGE, _DIFFERENT = 1, 2, 10


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="A named schedule, or a file of lists; without it, the names."),
    ] = None,
    *,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Pipeline ranks (4).")] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", min=1, help="Micro-batches of a step (8).")
    ] = None,
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Stages per rank: interleaved.")] = None,
    waves: Annotated[int | None, typer.Option("--waves", min=1, help="Waves: hanayo.")] = None,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", min=1, help="Most micro-batches that a rank keeps.")
    ] = None,
    backward: Annotated[float, typer.Option("--backward", min=0.0, help="Backward pass, in forward passes.")] = 2.0,
    send: Annotated[float, typer.Option("--send", min=0.0, help="A transfer, in a rank's forward passes.")] = 0.0,
    check: Annotated[bool, typer.Option("--check", help="Only what is wrong, and the exit code.")] = False,
    diff: Annotated[str, typer.Option("--diff", help="Show what differs from this one; exit 10 if it does.")] = "",
    output: Annotated[
        Literal["text", "csv", "json"], typer.Option("--output", help="Picture, lists, or data.")
    ] = "text",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the lists to this file.")] = None,
    timeline: Annotated[Path | None, typer.Option("--timeline", help="Also write a trace, for Perfetto.")] = None,
) -> None:
    """Print, draw, check and compare pipeline schedules."""
    if name is None and not (check or diff or out is not None or timeline is not None):
        _list(output)
        return
    if not name:
        raise typer.BadParameter("which schedule, or which file of lists? partool schedule alone shows the names")
    sizes = _Sizes(ranks, micro_batches, chunks, waves, in_flight)
    given = sizes != _Sizes(None, None, None, None, None)
    if given and _is_file(name) and diff not in SCHEDULES:
        raise typer.BadParameter(f"{name} is a file and sets its own ranks, stages and micro-batches")
    if diff and not check:
        _diff(*_both(name, diff, sizes), output)
        return
    schedule = _schedule(name, sizes)
    if check:
        say(f"{name}: the schedule is sound", err=True)
        return
    from partool.report.schedule import in_units

    drawing = in_units(schedule, backward, send)
    _write(schedule, drawing, out, timeline)
    _show(schedule, drawing, output)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a schedule from the command line; None for a size that the user did not give."""

    ranks: int | None
    micro_batches: int | None
    chunks: int | None
    waves: int | None
    in_flight: int | None

    def like(self, schedule: Schedule, name: str) -> _Sizes:
        """Return a copy for the schedule called ``name``; sizes that are None are taken from ``schedule``."""
        ranks, micro_batches = self.ranks or schedule.ranks, self.micro_batches or schedule.micro_batches
        named = SCHEDULES.get(name)
        several = named is not None and named.chooses_stages and self.waves is None and schedule.chunks > 1
        chunks = self.chunks or (schedule.chunks if several else None)
        return replace(self, ranks=ranks, micro_batches=micro_batches, chunks=chunks)

    def stages_per_rank(self, name: str) -> int:
        """Return the number of stages per rank for the schedule called ``name``.

        It is the requested number, or without a request the smallest that the schedule supports.
        """
        if self.waves is not None:
            if SCHEDULES[name].stages != "2 per wave" or self.chunks is not None:
                raise typer.BadParameter("--waves belongs to hanayo, and goes without --chunks")
            return 2 * self.waves
        return self.chunks or SCHEDULES[name].least_stages


def _schedule(name: str, sizes: _Sizes) -> Schedule:
    """Return the built-in schedule called ``name``, or the schedule in the file ``name``.

    The command ends if there is no such schedule or if it is not valid.
    """
    if name in SCHEDULES:
        return _named(name, sizes)
    if _is_file(name):
        return _from_file(Path(name))
    import difflib

    near = difflib.get_close_matches(name, SCHEDULES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SCHEDULES)}; or a file"
    say(f"error: there is no schedule {name!r}\n  help: {hint}", err=True)
    raise typer.Exit(_USAGE)


def _both(name: str, other: str, sizes: _Sizes) -> tuple[Schedule, Schedule]:
    """Return the schedules ``name`` and ``other``; a built-in one takes missing sizes from one in a file."""
    if _is_file(other) and not _is_file(name):
        second = _schedule(other, sizes)
        return _schedule(name, sizes.like(second, name)), second
    first = _schedule(name, sizes)
    return first, _schedule(other, sizes.like(first, other) if _is_file(name) else sizes)


def _is_file(name: str) -> bool:
    return name not in SCHEDULES and (Path(name).suffix == ".csv" or Path(name).exists())


def _named(name: str, sizes: _Sizes) -> Schedule:
    from partool.schedule import check, generate, nearest

    ranks, micro_batches, cap = sizes.ranks or 4, sizes.micro_batches or 8, sizes.in_flight or 0
    chunks = sizes.stages_per_rank(name)
    if reason := check(name, ranks, micro_batches, chunks, cap):
        count = nearest(name, ranks, micro_batches, chunks)
        other = count not in (None, micro_batches)
        help = f"the nearest that works: --micro-batches {count}" if other else _sizes_help(name, chunks, cap)
        fail("PT430", reason, help, _ERRORS)
    return generate(name, ranks, micro_batches, chunks, cap)


def _sizes_help(name: str, chunks: int, cap: int) -> str:
    """Return help text that lists the sizes which the schedule called ``name`` supports."""
    if cap and not SCHEDULES[name].capped:
        capped = " and ".join(other for other, record in SCHEDULES.items() if record.capped)
        return f"leave out --in-flight; {capped} take it"
    if SCHEDULES[name].waves:
        return (
            f"--chunks {chunks - 1} or {chunks + 1}: two stages per wave, or say --waves" if chunks > 1 else "--waves 1"
        )
    if SCHEDULES[name].stages == "2":
        return "--chunks 2, or leave it out"
    return "leave out --chunks; interleaved takes several stages per rank, hanayo --waves"


def _from_file(path: Path) -> Schedule:
    """Return the user's schedule, read from a file of action lists and checked; ends the command if it is not valid."""
    from partool.schedule import ScheduleTextError, columns_of, from_text, problems, rows_of

    try:
        text = path.read_text(encoding="utf-8")
        schedule = from_text(text, path.stem)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        fail("PT432", f"{path} cannot be read: {reason}", "", _ERRORS)
    except ScheduleTextError as error:
        place = f"{path}, row {error.row}" if error.row else str(path)
        place += f", cell {error.column}" if error.column else ""
        fail("PT432", f"{place}: {error}", "cells such as 0F3, 1B0, 0SEND_F3; one row per rank", _ERRORS)
    faults = problems(schedule)
    rows, columns = rows_of(text), columns_of(text, schedule)
    for problem in faults:
        place = f"{path}, row {rows[problem.rank]}" if problem.rank >= 0 else str(path)
        column = columns[problem.rank][problem.at] if problem.at >= 0 else 0
        place += f", cell {column}" if column else ""
        say(f"error[PT433]: {place}: {problem.message}", err=True)
    if faults:
        say(f"{path}: not sound; partool explain PT433", err=True)
        raise typer.Exit(_ERRORS)
    return schedule


def _list(output: str) -> None:
    from partool.report.schedule import render_known

    if output == "json":
        words = ("stages", "micro_batches", "words", "source")
        records = {name: {word: getattr(record, word) for word in words} for name, record in SCHEDULES.items()}
        say(json.dumps(records, indent=2))
    else:
        with printing() as console:
            render_known(console)


def _diff(old: Schedule, new: Schedule, output: str) -> None:
    from partool.schedule import diff

    lines = diff(new, old)
    if output == "json":
        say(json.dumps({"same": not lines, "differences": lines}, indent=2))
    else:
        say("\n".join(lines) if lines else "the schedules are the same", err=not lines)
    if lines:
        raise typer.Exit(_DIFFERENT)


def _write(schedule: Schedule, drawing: Drawing, out: Path | None, timeline: Path | None) -> None:
    if out is not None:
        from partool.schedule import to_text

        write_or_exit(to_text(schedule), out)
    if timeline is not None:
        from partool.report.trace import process, trace

        title = f"{schedule.name}: times in forward passes of a rank, as seconds"
        write_or_exit(json.dumps(trace(process(drawing, title, 0), {"schedule": schedule.name})) + "\n", timeline)


def _show(schedule: Schedule, drawing: Drawing, output: str) -> None:
    if output == "csv":
        from partool.schedule import to_text

        say(to_text(schedule), nl=False)
        return
    from partool.report.schedule import render_schedule, schedule_data

    if output == "json":
        say(json.dumps(schedule_data(schedule, drawing)))
        return
    with printing() as console:
        render_schedule(schedule, drawing, console)
