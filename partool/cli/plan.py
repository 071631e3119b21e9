"""``partool plan``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from partool.cli._against_runs import AgainstRuns, Calibrate, against_runs, specs_or_exit
from partool.cli._files import printing, write_or_exit
from partool.cli._foreign import is_plan, one_run
from partool.cli._load import (
    Output,
    TrustCode,
    answer_or_exit,
    check_specs,
    load_plan_or_exit,
    longest_sequences,
    read_plan_or_exit,
    varied,
)
from partool.cli._verify import RANK_LIMIT_S, RankLimit, exit_on_error, exit_on_faults, verified_plan
from partool.plan.terminal import one_stream, say
from partool.plan.types import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from partool.planner.longest import Longest

_DIFFERENT = 10
_ERRORS = 1


def command(
    specs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SPEC...",
            help="The spec (YAML), a plan (JSON) to show, or files of one run of another training system.",
        ),
    ] = None,
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    output: Annotated[Output, typer.Option("--output", help="text, json, or findings as github or sarif.")] = "text",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the plan to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a report as one HTML page.")] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Also write the schedule in time, for Perfetto.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only findings and the exit code; takes many specs.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    against: Annotated[
        Path | None, typer.Option("--against", help="Compare with this plan; exit 10 if it differs.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option("--diff", help="Show what differs from this plan, predictions side by side.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            help="key=a,b,c: the best plan for each value; repeatable. Of sequence_length also the longest that fits "
            "with each way to share sequences.",
        ),
    ] = None,
    improved: Annotated[
        bool,
        typer.Option(
            "--improve", help="Open the layout, and say what to change: in the engine's words if it is not ours."
        ),
    ] = False,
    smallest: Annotated[bool, typer.Option("--smallest", help="Plan the smallest cluster that fits.")] = False,
    largest: Annotated[
        Literal["micro_batch", "sequence_length", "global_batch", "model"] | None,
        typer.Option("--largest", help="Plan the largest value of this that fits; of a model, the most layers."),
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="All reasons for the layout.")] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Memory and time by term, and the layouts that were not chosen.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="The screen, its tables, all reasons and all warnings.")
    ] = False,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="All parts of time and memory.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace this model's memory with the runtime (needs torch), once more.")
    ] = False,
    show: Annotated[
        Literal["gemms", "kernels", "layout", "environment", "timeline", "tensor"] | None,
        typer.Option(
            "--show",
            help="Matrix products of a rank, how well tuned the kernels are that compute them, stages, variables with "
            "origin, the pipeline in time, how tensor ranks share every parameter.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Dry-run the code of all ranks that differ, without devices (needs torch)."),
    ] = False,
    rank_limit: RankLimit = RANK_LIMIT_S,
    trust_code: TrustCode = False,
    runs: AgainstRuns = None,
    calibrate: Calibrate = False,
) -> None:
    """Check a spec, find the layout, predict memory and time, and say why."""
    if runs is not None:
        others = (specs, overrides, html, timeline, check, strict, against, diff, vary, improved, smallest, largest)
        refused = any((*others, why, table, everything, trace, show, verify, trust_code))
        against_runs(runs, output, out, calibrate=calibrate, every=breakdown, others=refused)
        return
    specs = specs_or_exit(specs, calibrate=calibrate)
    _refuse_together(verify and (check or vary))
    views = {"why": why, "table": table, "whole": everything}
    _refuse_views(views, check or vary or improved or against or diff or breakdown or show or output != "text")
    if check:
        raise typer.Exit(check_specs(specs, overrides or [], output, strict))
    _refuse_several(specs, searches=bool(vary or smallest or largest))
    spec, *also = specs
    if improved:
        _improve(specs, overrides or [], output, out, others=bool(vary or smallest or largest or verify or html))
        return
    if vary:
        rows = varied(spec, overrides or [], vary)
        _print_varied(rows, longest_sequences(spec, overrides or [], vary), output)
        return
    previous = read_plan_or_exit(against) if against else None
    older = read_plan_or_exit(diff) if diff else None
    changes = list(overrides or [])
    if smallest or largest:
        changes += answer_or_exit(spec, changes, "smallest" if smallest else largest or "")
    # PT491 is only a warning here, so that the table shows the missing kernels; a plan of --out may be launched.
    forgive = ("PT491",) if show == "kernels" and out is None else ()
    plan = load_plan_or_exit(spec, changes, output, strict, trace=trace, forgive=forgive, also=also)
    plan, failed = verified_plan(plan, rank_limit) if verify else (plan, None)
    if out is not None:
        write_or_exit(plan.to_json(), out)
    words = _words([out] if out else specs, [] if out else changes, trust_code=trust_code)
    _reports(plan, html, timeline, words)
    if previous is not None or older is not None:
        exit_on_error(failed)
        exit_on_faults(plan, strict=strict)
    if previous is not None:
        _against(previous, plan, output)
        return
    if older is not None:
        _diff(older, plan, output)
        return
    if output == "json":
        say(_as_json(plan, show, shlex.join(words)), nl=False)
    elif output == "text":
        _print(plan, words, show, breakdown=breakdown, told=not is_plan(spec) and one_stream(), views=views)
    exit_on_error(failed)
    exit_on_faults(plan, strict=strict)


def _refuse_together(asked: object) -> None:
    if asked:
        raise typer.BadParameter("--verify goes with one plan, not with --check or --vary")


def _refuse_views(views: dict[str, bool], others: object) -> None:
    if any(views.values()) and others:
        raise typer.BadParameter(
            "--why, --table and --all are views of a plan's text: leave out --check, --vary, --improve, --against, "
            "--diff, --breakdown, --show and --output"
        )


def _refuse_several(specs: list[Path], *, searches: bool) -> None:
    if len(specs) > 1 and not one_run(specs):
        others = "and several files if all are of one run of another training system"
        raise typer.BadParameter(f"several specs go only together with --check, {others}")
    if len(specs) > 1 and searches:
        raise typer.BadParameter(
            "--vary, --smallest and --largest take a spec: partool import makes one of these files"
        )


def _improve(files: list[Path], overrides: list[str], output: Output, out: Path | None, *, others: bool) -> None:
    from partool.cli._improve import improve
    from partool.cli._load import loaded_or_exit

    if others:
        raise typer.BadParameter("--improve goes alone with --set, --out and --output")
    spec, *also = files
    improve(spec, *loaded_or_exit(spec, overrides, output, also), overrides, output=output, out=out)


def _print(
    plan: Plan, words: list[str], show: str | None, *, breakdown: bool, told: bool, views: dict[str, bool]
) -> None:
    from partool.report import View, render_plan

    with printing() as console:
        if show or breakdown:
            _print_part(console, plan, shlex.join(words), show)
        else:
            render_plan(plan, console, source=words, told=told, view=View(**views))


def _print_part(console: Console, plan: Plan, source: str, show: str | None) -> None:
    """Print what ``--show`` names, or without it the parts of time and memory (``--breakdown``)."""
    from partool.report import environment, tables

    if show == "gemms":
        tables.render_gemms(plan, console)
    elif show == "kernels":
        _print_kernels(plan, console, source)
    elif show == "layout":
        tables.render_layout(plan, console)
    elif show == "environment":
        environment.render_environment(plan, console)
    elif show == "timeline":
        _print_timeline(plan, console)
    elif show == "tensor":
        _print_tensor(plan, console)
    else:
        tables.render_breakdown(plan, console)


def _print_timeline(plan: Plan, console: Console) -> None:
    from partool.report.terminal_timeline import render_plan_timeline

    render_plan_timeline(plan, console)


def _print_tensor(plan: Plan, console: Console) -> None:
    from partool.report.tensor import render_tensor

    render_tensor(plan, console)


def _print_kernels(plan: Plan, console: Console, source: str) -> None:
    from partool.report.kernels import render_kernels

    with _tables():
        render_kernels(plan, console, source)


@contextmanager
def _tables() -> Iterator[None]:
    """Return a context manager that ends the command if a plan's kernel tables cannot be read.

    A plan from another machine may name tables that are missing on this machine.
    """
    from partool.cli._fail import fail
    from partool_kernels.registry.tables import TableError

    try:
        yield
    except TableError as error:
        fail("PT492", str(error), "kernels.tuned names files and folders with configurations", _ERRORS)


def _as_json(plan: Plan, show: str | None, source: str) -> str:
    if show is None:
        return plan.to_json()
    from partool.report import environment, tables

    if show == "gemms":
        return json.dumps(tables.gemm_rows(plan), indent=2) + "\n"
    if show == "kernels":
        from partool.report.kernels import kernel_data

        with _tables():
            return json.dumps(kernel_data(plan, source), indent=2) + "\n"
    if show == "layout":
        return json.dumps(plan.layout.model_dump(mode="json"), indent=2) + "\n"
    if show == "environment":
        return json.dumps(environment.as_data(plan), indent=2) + "\n"
    if show == "timeline":
        from partool.report.trace import plan_trace

        return json.dumps(plan_trace(plan)) + "\n"
    if show == "tensor":
        from partool.report.tensor import tensor_data

        return json.dumps(tensor_data(plan), indent=2) + "\n"
    return plan.to_json()


def _against(old: Plan, new: Plan, output: Output) -> None:
    from partool.report import tables

    found = tables.comparison(old, new)
    moved = ", ".join(found["moved"])
    if output == "json":
        say(json.dumps(found, indent=2))
    elif not found["same"]:
        say("\n".join(found["differences"]))
        say(f"inputs that moved: {moved or 'none'}")
    if not found["same"]:
        raise typer.Exit(_DIFFERENT)
    if output != "json":
        same = f"the plans run the same; {found['verified']}" if found["verified"] else "the plans are the same"
        say(same + (f", though inputs moved: {moved}" if moved else ""), err=True)


def _diff(old: Plan, new: Plan, output: Output) -> None:
    from partool.report import tables

    if output == "json":
        say(json.dumps(tables.comparison(old, new), indent=2))
    else:
        with printing() as console:
            tables.render_comparison(old, new, console)


def _print_varied(
    rows: list[tuple[list[str], Plan | None, str]],
    longest: list[tuple[list[str], Longest, Plan | None]],
    output: Output,
) -> None:
    from partool.report import tables
    from partool.report.longest import longest_rows, render_longest

    if output == "json":
        say(json.dumps([*tables.varied_rows(rows), *longest_rows(longest)], indent=2))
        return
    with printing() as console:
        tables.render_varied(rows, console)
        if longest:
            render_longest(longest, console)


def _words(files: list[Path], changes: list[str], *, trust_code: bool) -> list[str]:
    """Return the words by which other commands name the plan: files, and the options that change them."""
    words = [*map(str, files), *(word for change in changes for word in ("--set", change))]
    return [*words, *(["--trust-remote-code"] if trust_code else [])]


def _reports(plan: Plan, html: Path | None, timeline: Path | None, words: list[str]) -> None:
    if html is not None:
        from partool.report.html import render_html

        write_or_exit(render_html(plan, words), html)
        say(f"partool: wrote {html}", err=True)
    if timeline is not None:
        from partool.report.trace import plan_trace

        write_or_exit(json.dumps(plan_trace(plan)) + "\n", timeline)
