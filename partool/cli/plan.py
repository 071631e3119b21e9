"""``partool plan``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from partool.cli._against_runs import against_runs, specs_or_exit
from partool.cli._files import printing, write_or_exit
from partool.cli._foreign import is_plan, one_run
from partool.cli._load import (
    Output,
    answer_or_exit,
    check_specs,
    load_plan_or_exit,
    longest_sequences,
    read_plan_or_exit,
    varied,
)
from partool.cli._options import takes
from partool.cli._plan_options import PlanOptions
from partool.cli._verify import exit_on_error, exit_on_faults, verified_plan
from partool.plan.terminal import one_stream, say
from partool.plan.types import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from partool.planner.longest import Longest

_DIFFERENT = 10
_ERRORS = 1


@takes(PlanOptions)
def command(options: PlanOptions) -> None:
    """Check a spec, find the layout, predict memory and time, and say why."""
    if options.runs is not None:
        refused, every = options.beyond_runs, options.breakdown
        against_runs(
            options.runs, options.output, options.out, calibrate=options.calibrate, every=every, others=refused
        )
        return
    specs = specs_or_exit(options.specs, calibrate=options.calibrate)
    _refuse_together(options)
    _refuse_views(options)
    if options.check:
        raise typer.Exit(check_specs(specs, options.changes, options.output, options.strict))
    _refuse_several(specs, searches=bool(options.vary or options.smallest or options.largest))
    if options.improved:
        _improve(specs, options)
    elif options.vary:
        spec = specs[0]
        rows = varied(spec, options.changes, options.vary)
        _print_varied(rows, longest_sequences(spec, options.changes, options.vary), options.output)
    else:
        _plan(specs, options)


def _plan(specs: list[Path], options: PlanOptions) -> None:
    """Plan a spec, write the files that are asked for, and print the plan or its differences from another plan."""
    spec, *also = specs
    previous = read_plan_or_exit(options.against) if options.against else None
    older = read_plan_or_exit(options.diff) if options.diff else None
    changes = options.changes
    if options.smallest or options.largest:
        changes += answer_or_exit(spec, changes, "smallest" if options.smallest else options.largest or "")
    # PT491 is only a warning here, so that the table shows the missing kernels; a plan of --out may be launched.
    forgive = ("PT491",) if options.show == "kernels" and options.out is None else ()
    plan = load_plan_or_exit(
        spec, changes, options.output, options.strict, trace=options.trace, forgive=forgive, also=also
    )
    plan, failed = verified_plan(plan, options.rank_limit) if options.verify else (plan, None)
    out = options.out
    if out is not None:
        write_or_exit(plan.to_json(), out)
    words = _words([out] if out else specs, [] if out else changes, trust_code=options.trust_code)
    _reports(plan, options.html, options.timeline, words)
    if previous is None and older is None:
        _show(plan, words, options, findings_shown=not is_plan(spec) and one_stream())
    exit_on_error(failed)
    exit_on_faults(plan, strict=options.strict)
    if previous is not None:
        _against(previous, plan, options.output)
    elif older is not None:
        _diff(older, plan, options.output)


def _show(plan: Plan, words: list[str], options: PlanOptions, *, findings_shown: bool) -> None:
    if options.output == "json":
        say(_as_json(plan, options.show, shlex.join(words)), nl=False)
    elif options.output == "text":
        _print(
            plan, words, options.show, breakdown=options.breakdown, findings_shown=findings_shown, views=options.views
        )


def _refuse_together(options: PlanOptions) -> None:
    if options.verify and (options.check or options.vary):
        raise typer.BadParameter("--verify goes with one plan, not with --check or --vary")


def _refuse_views(options: PlanOptions) -> None:
    others = (options.check, options.vary, options.improved, options.against, options.diff, options.breakdown)
    if any(options.views.values()) and (any((*others, options.show)) or options.output != "text"):
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


def _improve(files: list[Path], options: PlanOptions) -> None:
    from partool.cli._improve import improve
    from partool.cli._load import loaded_or_exit

    if options.vary or options.smallest or options.largest or options.verify or options.html:
        raise typer.BadParameter("--improve goes alone with --set, --out and --output")
    spec, *also = files
    changes, output = options.changes, options.output
    improve(spec, *loaded_or_exit(spec, changes, output, also), changes, output=output, out=options.out)


def _print(
    plan: Plan, words: list[str], show: str | None, *, breakdown: bool, findings_shown: bool, views: dict[str, bool]
) -> None:
    from partool.report import View, render_plan

    with printing() as console:
        if show or breakdown:
            _print_part(console, plan, shlex.join(words), show)
        else:
            render_plan(plan, console, source=words, findings_shown=findings_shown, view=View(**views))


def _print_part(console: Console, plan: Plan, source: str, show: str | None) -> None:
    """Print what ``--show`` names, or without it the parts of time and memory (``--breakdown``)."""
    from partool.report import environment, tables

    if show == "gemms":
        from partool.report.gemms import render_gemms

        render_gemms(plan, console)
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
    from partool.report import environment

    if show == "gemms":
        from partool.report.gemms import gemm_rows

        return json.dumps(gemm_rows(plan), indent=2) + "\n"
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

    comparison = tables.comparison(old, new)
    moved, figures = ", ".join(comparison["moved"]), tables.moved_figures(comparison)
    if output == "json":
        say(json.dumps(comparison, indent=2))
    elif not comparison["same"]:
        say("\n".join([*comparison["differences"], *figures]))
        say(f"inputs that moved: {moved or 'none'}")
    if not comparison["same"]:
        raise typer.Exit(_DIFFERENT)
    if output != "json":
        same = (
            f"the plans run the same; {comparison['verified']}" if comparison["verified"] else "the plans are the same"
        )
        say(same + (f", though inputs moved: {moved}" if moved else ""), err=True)
        if figures:
            say("\n".join(figures))


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
