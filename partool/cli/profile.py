"""``partool profile``."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from partool.cli._fail import fail
from partool.cli._files import printing
from partool.cli._load import read_plan_or_exit
from partool.cli._runs import find_run_or_exit, reaching, reading_records
from partool.launch.targets import target_of
from partool.plan.profiling import (
    MOST_STEPS,
    ProfileRequest,
    folder_of,
    request_file,
    trace_file,
    traces,
    write_request,
)
from partool.plan.terminal import say
from partool.strategies.targets import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

    from partool.launch.store import Run
    from partool.plan.types import Plan

_RANKS = re.compile(r"(\d+)(?:-(\d+))?")
_POLL_S = 0.5


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")] = "last",
    *,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MOST_STEPS, help="How many steps.")] = 2,
    ranks: Annotated[str, typer.Option("--ranks", help="A rank, or a range such as 0-3.")] = "0",
    memory: Annotated[bool, typer.Option("--memory", help="Also write a snapshot of the GPU's memory.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only show what is there, without a new profile.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the traces.")] = 600.0,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
) -> None:
    """Profile the next steps of a running job, and say where their time goes."""
    stored = find_run_or_exit(run)
    plan = read_plan_or_exit(stored.plan_file)
    if not show:
        first, last = _ranks(ranks, plan.layout.mesh.world_size)
        if memory and plan.devices.backend == "cpu":
            fail("PT635", "--memory is for GPUs, and the run is on CPUs", "leave --memory out", 2)
        before = {path for _, _, path in traces(stored.path)}
        _ask(stored, plan, ProfileRequest(steps=steps, first_rank=first, last_rank=last, memory=memory))
        _wait(stored, before, first, last, timeout_s)
    listed = traces(stored.path)
    if not listed:
        help = "partool profile RUN, while the run trains, or telemetry: {profile: {steps: [10, 12]}}"
        fail("PT636", f"{stored.id} has no profile", help, 1)
    _show(stored, plan, listed, output)


def _ranks(text: str, world_size: int) -> tuple[int, int]:
    match = _RANKS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not first <= last < world_size:
        help = f"--ranks 0, or --ranks 0-{world_size - 1}"
        fail("PT635", f"--ranks {text}: the run has ranks 0 to {world_size - 1}", help, 2)
    return first, last


def _ask(stored: Run, plan: Plan, request: ProfileRequest) -> None:
    with reaching(stored):
        state = target_of(stored).status(stored).state
        if state != "running":
            fail("PT636", f"{stored.id} does not train now ({state})", "partool profile --show shows what is there", 1)
        if not TARGETS[plan.launch.target].sees_files:
            message = f"{stored.id} runs where this machine's files are not seen, so it cannot be asked"
            fail("PT636", message, "telemetry: {profile: {steps: [10, 12]}} in the spec profiles these steps", 1)
    try:
        write_request(stored.path, request)
    except OSError as error:
        fail("PT636", f"cannot write {request_file(stored.path)}: {error.strerror}", "", 1)


def _wait(stored: Run, before: set[Path], first: int, last: int, timeout_s: float) -> None:
    """Wait until all ranks have written their traces; ends the command if the run ends before, or after the time."""
    say(f"partool: asked {stored.id}; waiting for its next steps", err=True)
    until_s = time.monotonic() + timeout_s
    wanted = set(range(first, last + 1))
    while time.monotonic() < until_s:
        fresh = [(steps, rank) for steps, rank, path in traces(stored.path) if path not in before]
        if any(wanted <= {rank for steps, rank in fresh if steps == each} for each, _ in fresh):
            return
        with reaching(stored):
            ended = not target_of(stored).status(stored).active
        if ended:
            request_file(stored.path).unlink(missing_ok=True)
            fail("PT636", f"{stored.id} ended before its ranks had written a profile", f"partool report {stored.id}", 1)
        time.sleep(_POLL_S)
    help = "a longer --timeout; steps that exchange nothing between ranks answer no request"
    fail("PT636", f"{stored.id} has written no profile for {timeout_s:g} s", help, 1)


def _show(stored: Run, plan: Plan, listed: list[tuple[tuple[int, int], int, Path]], output: str) -> None:
    """Show the newest profile: its first rank in words, and where the traces are."""
    from partool.report.profile_words import profile_data, render_profile
    from partool.report.step_profile import read_profile

    newest = max(listed, key=lambda one: one[2].stat().st_mtime)[0]
    ranks = sorted((rank, path) for steps, rank, path in listed if steps == newest)
    folder = folder_of(stored.path, *newest)
    with reading_records():
        profiles = [(rank, read_profile(path)) for rank, path in ranks]
    if output == "json":
        data = {str(rank): profile_data(profile, plan) for rank, profile in profiles}
        say(json.dumps({"run": stored.id, "folder": str(folder), "ranks": data}, indent=2))
        return
    with printing() as console:
        for rank, profile in profiles:
            render_profile(profile, plan, f"{stored.id}, rank {rank}", console)
        console.print(f"Traces for https://ui.perfetto.dev: {trace_file(folder, ranks[0][0])}", soft_wrap=True)
