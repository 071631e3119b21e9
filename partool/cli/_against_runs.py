"""``partool plan --against-runs``: runs that others measured, compared with what plans would have said."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from partool.catalog.profile_file import Profile, ProfileError, home, save_profile
from partool.cli._fail import fail
from partool.cli._files import write_or_exit
from partool.cli._load import Output
from partool.cli._watch import live_line
from partool.plan.terminal import say

if TYPE_CHECKING:
    from partool.replay.audit import Audit
    from partool.replay.fit import Fitted

AgainstRuns = Annotated[
    Path | None,
    typer.Option(
        "--against-runs",
        help="Compare with these measured runs (CSV), of any training system; needs no SPEC. Says which mechanism is "
        "off, and fits scalars. --breakdown lists all rows, --out writes JSON.",
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option("--calibrate", help="With --against-runs: write the scalars into the calibration beside the runs."),
]
_FAILED, _USAGE, _ENVIRONMENT = 1, 2, 3


def specs_or_exit(specs: list[Path] | None, *, calibrate: bool) -> list[Path]:
    """Return the specs of a command that has no table of runs; ends the command if there are none."""
    if calibrate:
        raise typer.BadParameter("--calibrate goes with --against-runs")
    if not specs:
        help = "partool init writes a spec to start from; partool plan --help says more"
        say(f"error: partool plan needs SPEC...\n  help: {help}", err=True)
        raise typer.Exit(_USAGE)
    return specs


def against_runs(file: Path, output: Output, out: Path | None, *, calibrate: bool, every: bool, others: bool) -> None:
    """Print the errors of predictions of a table of runs; write the scalars if ``calibrate``, else say what would be.

    ``every`` lists all rows. ``others`` is True if the command line asks for more than goes with a table of runs.
    """
    if others:
        raise typer.BadParameter(
            "--against-runs takes no SPEC, and goes with --calibrate, --breakdown, --out, --output"
        )
    if output not in ("text", "json"):
        raise typer.BadParameter(f"--output {output} is for findings of specs; --against-runs writes text or json")
    from partool.replay.blame import blamed
    from partool.replay.fit import fitted
    from partool.report.replayed import audit_data, audit_lines, joined, written_lines

    audit = _audited(file)
    off, fits = blamed(audit.priced), fitted(audit.priced)
    profiles = _profiles(fits)
    data = json.dumps(audit_data(audit, off, fits, profiles), indent=1)
    if out is not None:
        write_or_exit(data + "\n", out)
    if calibrate:
        _save(profiles)
    say(data if output == "json" else joined(audit_lines(audit, off, fits, every=every)))
    if not audit.priced and not audit.out_of_memory:
        _nothing(file, audit)
    for line in written_lines(profiles, written=calibrate):
        say(line, err=True)
    if calibrate and not profiles:
        help = "three rows of a code base that leave nothing open: docs/guide/own-runs.md says what a row has to state"
        fail("PT288", f"the rows of {file} give no scalar that a plan can use; nothing is written", help, _FAILED)


def _audited(file: Path) -> Audit:
    from partool.replay.audit import audit
    from partool.replay.table import RunTableError

    at = [0, 0]

    def count(finished: int, rows: int) -> None:
        at[:] = finished, rows

    try:
        with live_line(lambda _: f"partool: {at[0]:,} of {at[1]:,} rows", sys.stderr):
            return audit(file, count)
    except RunTableError as error:
        fail(error.code, error.message, error.help, _FAILED)


def _profiles(fits: list[Fitted]) -> dict[Path, Profile]:
    from partool.replay.fit import profiles
    from partool.version import __version__

    created = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return profiles(fits, home(), version=__version__, created=created)
    except ProfileError as error:
        fail(error.code, error.message, "move the file away, or measure this machine anew: partool calibrate", _FAILED)


def _save(profiles: Mapping[Path, Profile]) -> None:
    for path, profile in profiles.items():
        try:
            save_profile(profile, path)
        except OSError as error:
            fail("PT002", f"{path} cannot be written: {error.strerror}", "choose another PARTOOL_HOME", _ENVIRONMENT)


def _nothing(file: Path, audit: Audit) -> NoReturn:
    lines = f"line {audit.unread[0].line}: {audit.unread[0].reason}"
    help = "docs/guide/own-runs.md says what a row has to state"
    fail("PT288", f"none of the {audit.rows} rows of {file} can be compared; {lines}", help, _FAILED)
