"""The telemetry section: absolute paths, and profiles of steps that the run has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.plan.profiling import MOST_STEPS
from partool.plan.types import Plan
from partool.spec.targets.slurm.site_profile import from_folder
from partool.spec.telemetry import TelemetrySpec, TrackerSpec
from partool.strategies.trackers import TRACKERS

_SQLITE = "sqlite:///"
"""Beginning of the address of an SQLite file; a fourth slash begins an absolute path."""


def resolve_telemetry(telemetry: TelemetrySpec, base_dir: Path) -> TelemetrySpec:
    """Return the section with absolute paths; relative ones start from ``base_dir``, the spec's folder."""
    trackers = [_resolved(tracker, base_dir) for tracker in telemetry.trackers]
    return telemetry.model_copy(update={"trackers": trackers})


def _resolved(tracker: TrackerSpec, base_dir: Path) -> TrackerSpec:
    uri = tracker.uri
    if uri is None:
        return tracker
    if not TRACKERS[tracker.name].uri_begins:
        uri = str(from_folder(uri, base_dir))
    elif uri.startswith(_SQLITE):
        uri = _SQLITE + str(from_folder(uri.removeprefix(_SQLITE), base_dir))
    return tracker.model_copy(update={"uri": uri})


def check_profile(plan: Plan) -> Iterator[Diagnostic]:
    """Yield errors for a profile of steps or ranks that the run does not have, and of memory that no GPU has."""
    profile, path = plan.telemetry.profile, ("telemetry", "profile")
    if profile is None:
        return
    (first, last), steps = profile.steps, plan.training.steps
    if not first <= last <= steps or last - first >= MOST_STEPS:
        usual = f"[{min(10, steps)}, {min(12, steps)}]"
        message = (
            f"steps {first} to {last}: the training has steps 1 to {steps:,}, and a profile at most {MOST_STEPS:,}"
        )
        yield Diagnostic("PT633", message, path=(*path, "steps"), help=f"write [first, last], such as {usual}")
    if (rank := max(profile.ranks)) >= (world := plan.layout.mesh.world_size):
        message = f"rank {rank}: the plan has ranks 0 to {world - 1}"
        yield Diagnostic("PT633", message, path=(*path, "ranks"), help="use ranks that the plan has, such as [0]")
    if profile.memory and plan.devices.backend == "cpu":
        message = "snapshots are of GPU memory, and the plan is for CPUs"
        yield Diagnostic("PT634", message, path=(*path, "memory"), help="leave memory out")
