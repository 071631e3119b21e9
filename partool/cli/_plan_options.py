"""The options of ``partool plan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from partool.cli._against_runs import AgainstRuns, Calibrate
from partool.cli._load import Output, TrustCode
from partool.cli._verify import RANK_LIMIT_S, RankLimit

_OF_RUNS = ("runs", "calibrate", "breakdown", "out", "output", "rank_limit")
"""Options that go with ``--against-runs``."""


@dataclass(frozen=True)
class PlanOptions:
    """What the command line asks for; each field's annotation holds its help text."""

    specs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="SPEC...",
            help="The spec (YAML), a plan (JSON) to show, or files of one run of another training system.",
        ),
    ] = None
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None
    output: Annotated[Output, typer.Option("--output", help="text, json, or findings as github or sarif.")] = "text"
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the plan to this file.")] = None
    html: Annotated[Path | None, typer.Option("--html", help="Also write a report as one HTML page.")] = None
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Also write the schedule in time, for Perfetto.")
    ] = None
    check: Annotated[bool, typer.Option("--check", help="Only findings and the exit code; takes many specs.")] = False
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False
    against: Annotated[
        Path | None, typer.Option("--against", help="Compare with this plan; exit 10 if it differs.")
    ] = None
    diff: Annotated[
        Path | None, typer.Option("--diff", help="Show what differs from this plan, predictions side by side.")
    ] = None
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            help="key=a,b,c: the best plan for each value; repeatable. Of sequence_length also the longest that fits "
            "with each way to share sequences.",
        ),
    ] = None
    improved: Annotated[
        bool,
        typer.Option(
            "--improve", help="Open the layout, and say what to change: in the engine's words if it is not ours."
        ),
    ] = False
    smallest: Annotated[bool, typer.Option("--smallest", help="Plan the smallest cluster that fits.")] = False
    largest: Annotated[
        Literal["micro_batch", "sequence_length", "global_batch", "model"] | None,
        typer.Option("--largest", help="Plan the largest value of this that fits; of a model, the most layers."),
    ] = None
    why: Annotated[bool, typer.Option("--why", help="All reasons for the layout.")] = False
    table: Annotated[
        bool, typer.Option("--table", help="Memory and time by term, and the layouts that were not chosen.")
    ] = False
    everything: Annotated[bool, typer.Option("--all", help="The screen, its tables, all reasons and all warnings.")] = (
        False
    )
    breakdown: Annotated[bool, typer.Option("--breakdown", help="All parts of time and memory.")] = False
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace this model's memory with the runtime (needs torch), once more.")
    ] = False
    show: Annotated[
        Literal["gemms", "kernels", "layout", "environment", "timeline", "tensor"] | None,
        typer.Option(
            "--show",
            help="Matrix products of a rank, how well tuned the kernels are that compute them, stages, variables with "
            "origin, the pipeline in time, how tensor ranks share every parameter.",
        ),
    ] = None
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Dry-run the code of all ranks that differ, without devices (needs torch)."),
    ] = False
    rank_limit: RankLimit = RANK_LIMIT_S
    trust_code: TrustCode = False
    runs: AgainstRuns = None
    calibrate: Calibrate = False

    @property
    def changes(self) -> list[str]:
        """Values of ``--set``, over the spec."""
        return list(self.overrides or [])

    @property
    def views(self) -> dict[str, bool]:
        """The views of a plan's text that are asked for, as fields of :class:`partool.report.View`."""
        return {"why": self.why, "table": self.table, "everything": self.everything}

    @property
    def beyond_runs(self) -> bool:
        """True if there is a spec, or an option that does not go with ``--against-runs``."""
        return any(value for name, value in vars(self).items() if name not in _OF_RUNS)
