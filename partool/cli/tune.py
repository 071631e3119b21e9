"""``partool tune``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from partool.cli._fail import fail
from partool.cli._load import TrustCode, load_plan_or_exit
from partool.plan.terminal import open_console, say
from partool.spec.numbers import duration_s

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Event = dict[str, Any]
_NO_GPU = 3
_INTERRUPTED, _TERMINATED = 130, 143


class _TerminatedError(BaseException):
    """Raised on SIGTERM, so that the measuring process is ended before this process."""


def _terminated(number: int, frame: object) -> None:
    raise _TerminatedError


def command(
    spec: Annotated[
        Path | None, typer.Argument(help="A spec (YAML) or a plan (JSON); without one, kernels' typical shapes.")
    ] = None,
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    kernel: Annotated[list[str] | None, typer.Option("--kernel", help="Only this one; repeatable.")] = None,
    budget: Annotated[str, typer.Option("--budget", help="A duration: 30min, 2h.")] = "30min",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of tables, added to.")] = Path("tuned"),
    again: Annotated[bool, typer.Option("--again", help="Measure again what has been measured already.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Measure nothing: show what would run, and how much is ruled out before.")
    ] = False,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
    trust_code: TrustCode = False,
) -> None:
    """Measure which configurations of kernels are fastest on this GPU for a plan's shapes, and write tables."""
    from partool.launch.tune import Tuning, requests_of
    from partool_kernels.registry import KERNELS

    seconds = duration_s(budget)
    if seconds is None:
        raise typer.BadParameter(f"--budget {budget}: a number and s, min, h or d")
    for name in kernel or ():
        if name not in KERNELS:
            near = [each for each in sorted(KERNELS) if each.startswith(name)] or get_close_matches(name, KERNELS, n=1)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise typer.BadParameter(f"--kernel {name}: {meant}there are {', '.join(sorted(KERNELS))}")
    if spec is None and overrides:
        raise typer.BadParameter("--set is about a spec")
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out {out}: it is no folder")
    tuning = Tuning(out, seconds, again=again, dry_run=dry_run, kernels=tuple(kernel or ()))
    requests = None
    if spec is not None:
        plan = load_plan_or_exit(spec, overrides or [], forgive=("PT491", "PT492"))
        requests = requests_of(plan, tuning)
        if not requests:
            asked = sorted({line["kernel"] for line in requests_of(plan, replace(tuning, kernels=()))})
            of = f"this plan asks for {', '.join(asked)}" if asked else "all is measured or comes from libraries"
            say(f"partool: nothing to measure: {of}; partool plan --show kernels tells more", err=True)
            return
    _follow(requests, tuning, output)


def _follow(requests: list[Event] | None, tuning: Any, output: str) -> None:
    from partool.launch.tune import TuneError, tune

    written = 0
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _bar(len(requests or ())) as bar, closing(tune(requests, tuning)) as events:
            for event in events:
                written += event["event"] == "result"
                bar.take(event)
                if output == "json":
                    say(json.dumps(event))
                elif text := message_of(event):
                    bar.say(text)
    except TuneError as error:
        if error.exit_code == _NO_GPU:
            help = "--dry-run measures nothing and needs no GPU; the tables of this version are used as they are"
            fail("PT495", f"kernels cannot be tuned here: {error}", help, _NO_GPU)
        fail("PT496", f"tuning ended: {error}", "started again it goes on where it ended", error.exit_code)
    except (KeyboardInterrupt, _TerminatedError) as stopped:
        kept = "" if tuning.dry_run else f"; {_entries(written, tuning.out)}, started again it goes on"
        say(f"partool: interrupted{kept}", err=True)
        code = _INTERRUPTED if isinstance(stopped, KeyboardInterrupt) else _TERMINATED
        raise typer.Exit(code) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if not tuning.dry_run:
        say(f"partool: {_entries(written, tuning.out)}", err=True)
        if written:
            say(f"  help: kernels: {{tuned: [{tuning.out}]}} in a spec uses them", err=True)


def _entries(written: int, out: Path) -> str:
    return f"wrote {written} entr{'y' if written == 1 else 'ies'} to {out}"


def message_of(event: Event) -> str:
    """Return a message about an event of the measurement; empty if the progress bar already shows the event."""
    kind = event["event"]
    if kind == "start":
        measured = f", {event['known']} known" if event["known"] else ""
        return f"{event['device']} ({event['architecture']}): {event['requests']} to measure{measured}"
    if kind == "result":
        gain = event["default_s"] / event["time_s"]
        verdict = "the default is best" if event["default"] else f"{gain:.2f}x the default's speed"
        times = f"{_short(event['time_s'])}, torch {_short(event['reference_s'])}"
        return f"{_asked(event)}: {times}; {verdict}, {event['tried']} tried"
    if kind == "skipped":
        return f"{event['kernel']}: nothing written: {event['reason']}"
    if kind == "restarted":
        return f"the GPU faulted ({event['reason']}), going on in a new process"
    if kind == "rehearsed":
        reasons = "; ".join(f"{count} {reason}" for reason, count in event["reasons"].items())
        refused = f"{event['refused']} ruled out" + (f" ({reasons})" if reasons else "")
        candidates = f"{event['candidates']} of {event['grid']} tried first"
        return f"{_asked(event)} on {event['architecture']}: {candidates}, {refused}"
    if kind == "end" and not event["finished"]:
        return f"the budget is used up, {event['left']} left"
    return ""


def _asked(event: Event) -> str:
    widths = " ".join(f"{name}={size}" for name, size in event["shape"].items())
    flags = f" {','.join(event['flags'])}" if event["flags"] else ""
    return f"{event['kernel']}{flags} {','.join(event['dtypes'])} {widths} rows={event['rows']}".replace("  ", " ")


def _short(seconds: float) -> str:
    from partool.report.units import seconds as in_words

    return in_words(seconds)


class _Bar:
    """Progress bar of finished requests and tried configurations; hidden where standard error is no terminal."""

    def __init__(self, progress: Progress, requests: int) -> None:
        self._progress = progress
        self._all: TaskID = progress.add_task("requests", total=requests or None)
        self._one: TaskID = progress.add_task("", total=None)

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self._progress.update(self._all, total=event["requests"], completed=0)
        elif kind == "request":
            self._progress.reset(self._one, description=_asked(event), total=None)
        elif kind == "timed":
            self._progress.update(self._one, completed=event["done"], total=event["of"])
        elif kind in ("result", "skipped", "rehearsed"):
            self._progress.advance(self._all)

    def say(self, text: str) -> None:
        say(text)


@contextmanager
def _bar(requests: int) -> Iterator[_Bar]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Lines are printed above the bar if both are on the terminal; if standard output is a file, they go there.
    shown, both = console.is_terminal, sys.stdout.isatty()
    with Progress(*columns, console=console, disable=not shown, transient=True, redirect_stdout=both) as progress:
        yield _Bar(progress, requests)
