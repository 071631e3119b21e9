"""The telemetry section with absolute paths."""

from __future__ import annotations

from pathlib import Path

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
