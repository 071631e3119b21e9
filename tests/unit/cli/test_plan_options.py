"""The options of ``partool plan`` are one dataclass, from which typer's parameters follow."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from partool.cli import plan
from partool.cli._options import takes
from partool.cli._plan_options import PlanOptions

GO_WITH_RUNS = {"runs", "calibrate", "breakdown", "out", "output", "rank_limit"}


@dataclass(frozen=True)
class Few:
    place: Annotated[Path, typer.Argument(metavar="PLACE")]
    words: Annotated[list[str] | None, typer.Option("--word")] = None
    loud: Annotated[bool, typer.Option("--loud", help="Shout.")] = False


def test_a_dataclass_becomes_the_parameters_of_a_command() -> None:
    seen: list[Few] = []
    app = typer.Typer()
    app.command()(takes(Few)(seen.append))
    runner = CliRunner()
    assert runner.invoke(app, ["here", "--word", "a", "--word", "b", "--loud"]).exit_code == 0
    assert runner.invoke(app, ["there"]).exit_code == 0
    assert runner.invoke(app, ["--loud"]).exit_code == 2
    assert seen == [Few(Path("here"), ["a", "b"], loud=True), Few(Path("there"))]


def test_plan_takes_every_option() -> None:
    assert list(inspect.signature(plan.command).parameters) == [field.name for field in fields(PlanOptions)]
    assert plan.command.__doc__ == "Check a spec, find the layout, predict memory and time, and say why."


@pytest.mark.parametrize("name", [field.name for field in fields(PlanOptions)])
def test_options_that_do_not_go_with_runs_are_refused(name: str) -> None:
    options = replace(PlanOptions(runs=Path("runs.csv")), **{name: ["x"]})
    assert options.beyond_runs == (name not in GO_WITH_RUNS)
