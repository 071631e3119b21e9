"""``partool report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from partool.cli._fail import fail
from partool.cli._files import printing, write_or_exit
from partool.cli._load import read_plan_or_exit, refuse_foreign
from partool.cli._runs import find_run_or_exit, reading_records
from partool.cli._upload import TrackerChoice, upload_or_exit
from partool.plan.run import STATUS_FILE
from partool.plan.terminal import say
from partool.plan.types import Plan

if TYPE_CHECKING:
    from partool.launch.store import Run
    from partool.report.executed import Comparison


def command(
    run: Annotated[str, typer.Argument(help="Id, the beginning of one, a name, or last.")] = "last",
    *,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="The step to draw; else one of usual length.")
    ] = None,
    pipeline: Annotated[int, typer.Option("--pipeline", min=0, help="Which of the data-parallel pipelines.")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="Also write the report as one HTML page.")] = None,
    timeline: Annotated[Path | None, typer.Option("--timeline", help="Also write the timelines, for Perfetto.")] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
    to: Annotated[
        TrackerChoice | None, typer.Option("--to", help="Only send the figures to a tracker that has not got them.")
    ] = None,
) -> None:
    """Show a run: what was trained and how it ended, its curves, every term beside its plan, its pipeline in time."""
    from partool.plan.evaluation_result import read_result
    from partool.report.curves import read_history
    from partool.report.experts import expert_loads
    from partool.report.headline import headline, headline_data
    from partool.report.pairs import pair_reports
    from partool.report.run import comparison_data, comparison_trace, read_summary
    from partool.report.samples import sample_data

    refuse_foreign(Path(run))
    stored = find_run_or_exit(run)
    plan = read_plan_or_exit(stored.plan_file)
    if to is not None:
        upload_or_exit(stored.path, plan, to)
        return
    with reading_records():
        comparison, note = _comparison(stored, plan, pipeline, step)
        summary, loads, result = read_summary(stored.path), expert_loads(stored.path), read_result(stored.path)
        pairs, history = pair_reports(stored.path), read_history(stored.path)
    asked = step is not None or pipeline > 0 or timeline is not None
    if comparison is None and asked:
        fail("PT515", note, "partool report without --step, --pipeline and --timeline shows what is there", 1)
    status = stored.status() if (stored.path / STATUS_FILE).is_file() else None  # may be elsewhere for a cluster's run
    head = headline(plan, history, status)
    if html is not None:
        from partool.report.html_run import render_run_html

        shown = render_run_html(
            plan, stored.id, summary, comparison, note,
            head=head, status=status, loads=loads, pairs=pairs, result=result,
        )  # fmt: skip
        write_or_exit(shown, html)
    if timeline is not None and comparison is not None:
        write_or_exit(json.dumps(comparison_trace(plan, comparison)) + "\n", timeline)
    if output == "json":
        data = {
            "run": stored.id,
            "state": status.state if status is not None else None,
            "reason": status.reason if status is not None else None,
            "training": headline_data(plan, history),
            "summary": summary.model_dump() if summary is not None else None,
            "pipeline": comparison_data(comparison) if comparison is not None else None,
            "experts": [load.model_dump() for load in loads] or None,
            "samples": sample_data(history) or None,
            "preferences": [each.model_dump() for each in pairs] or None,
            "evaluation": result.model_dump() if result is not None else None,
            "note": note or None,
        }
        say(json.dumps(data, indent=2))
        return
    from partool.report.run import render_run

    with printing() as console:
        render_run(
            stored.id, summary, comparison, note, console,
            head=head, status=status, loads=loads, pairs=pairs, result=result,
        )  # fmt: skip


def _comparison(run: Run, plan: Plan, pipeline: int, step: int | None) -> tuple[Comparison | None, str]:
    """Return the comparison of an executed step with its simulations, or None and the reason why there is none."""
    from partool.report.executed import compare
    from partool.report.logged import NothingExecutedError

    try:
        return compare(run.path, plan, pipeline, step), ""
    except NothingExecutedError as error:
        return None, str(error)
