"""Rules about trackers: each is listed once, with a place that it takes."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.spec import Spec
from partool.strategies.trackers import TRACKERS


def check_trackers(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for trackers that are listed twice, and for places that a tracker does not take."""
    seen = set[str]()
    for index, tracker in enumerate(spec.telemetry.trackers):
        path, record = ("telemetry", "trackers", index), TRACKERS[tracker.name]
        if tracker.name in seen:
            yield Diagnostic("PT247", f"{tracker.name} is listed twice", path=path, help="keep one of the two")
        seen.add(tracker.name)
        uri, begins = tracker.uri, record.uri_begins
        if uri is None:
            continue
        if not (uri.startswith(begins) if begins else "://" not in uri):
            takes = f"begin it with {' or '.join(begins[:2])}" if begins else "write the path of a folder"
            message = f"{uri} is no place of {record.title}: `uri` is {record.uri}"
            yield Diagnostic("PT248", message, path=(*path, "uri"), help=takes)
