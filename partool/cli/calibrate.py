"""``partool calibrate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from partool.catalog.profile_file import PROFILE_FILE, Profile, ProfileError, home, load_profile, save_profile
from partool.cli._fail import fail
from partool.plan.terminal import say

SIZES = {True: "quick", False: "full"}
"""Value of ``--quick`` → the runtime's name for this size of measurement."""
_ENVIRONMENT = 3


def command(
    runs: Annotated[
        Path | None, typer.Argument(help="With --from-runs: the rows; default measured_runs.csv beside the runs.")
    ] = None,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Profile to write; default calibration.json beside the runs.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute instead of minutes.")] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks at work at once; default all accelerators, or 2.")
    ] = None,
    keep_partial: Annotated[
        bool, typer.Option("--keep-partial", help="When interrupted, write what has been measured.")
    ] = False,
    from_runs: Annotated[
        bool, typer.Option("--from-runs", help="Measure nothing: fit finished runs, predicted against measured.")
    ] = False,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
) -> None:
    """Measure this machine, or learn from its finished runs, so that plans predict it better."""
    if runs is not None and not from_runs:
        raise typer.BadParameter("rows are read only with --from-runs")
    if from_runs and (quick or ranks is not None or keep_partial):
        raise typer.BadParameter("--from-runs measures nothing; --quick, --ranks and --keep-partial do not go with it")
    path = out or home() / PROFILE_FILE
    profile = _fitted(runs, path) if from_runs else _measured(quick, ranks, keep_partial)
    try:
        save_profile(profile, path)
    except OSError as error:
        fail("PT002", f"{path} cannot be written: {error.strerror}", "choose another --out", _ENVIRONMENT)
    if output == "json":
        say(json.dumps(profile.model_dump(mode="json"), indent=1))
    else:
        from partool.report.calibration import calibration_text

        say(calibration_text(profile))
    say(f"partool: wrote {path}", err=True)


def _measured(quick: bool, ranks: int | None, keep_partial: bool) -> Profile:
    from partool.launch.calibrate import INTERRUPTED, MeasureError, measure
    from partool.launch.local.target import LocalTarget
    from partool.launch.target import LaunchError

    try:
        LocalTarget().check()
        profile = measure(SIZES[quick], ranks)
    except LaunchError as error:
        fail(error.code, error.message, error.help, error.exit_code)
    except MeasureError as error:
        fail("PT284", str(error), "its messages stand above; partool calibrate --ranks 1 needs the least", _ENVIRONMENT)
    if profile.complete or (keep_partial and profile.measurements):
        return profile
    say("partool: interrupted, nothing written; --keep-partial keeps what has been measured", err=True)
    raise typer.Exit(INTERRUPTED)


def _fitted(runs: Path | None, path: Path) -> Profile:
    """Return the profile at ``path`` with scalars (measured over predicted values) fitted to the measured ``runs``."""
    from partool.launch.calibrate import empty_profile
    from partool.plan.run_fit import fit_scalars
    from partool.plan.run_rows import RUNS_FILE, read_rows
    from partool.version import __version__

    file = runs or home() / RUNS_FILE
    try:
        profile = load_profile(path) if path.exists() else empty_profile()
        rows = read_rows(file)
    except ProfileError as error:
        fail(error.code, error.message, "partool calibrate measures this machine anew", 1)
    except OSError as error:
        fail("PT285", f"{file} cannot be read: {error.strerror}", "every finished run adds a row: partool launch", 1)
    fit = fit_scalars(
        rows, accelerator=profile.machine.accelerator, figures_hash=profile.figures_hash, version=__version__
    )
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(fit.left_out.items()))
    if not fit.scalars:
        help = "partool launch, with this calibration in place, and then again"
        fail(
            "PT285",
            f"none of the {len(rows)} rows of {file} can be used" + (f": {reasons}" if reasons else ""),
            help,
            1,
        )
    if reasons:
        say(f"partool: left out: {reasons}", err=True)
    fitted = {scalars.stack for scalars in fit.scalars}
    others = tuple(scalars for scalars in profile.scalars if scalars.stack not in fitted)
    return profile.model_copy(update={"scalars": (*fit.scalars, *others)})
