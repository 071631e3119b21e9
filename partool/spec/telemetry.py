"""The ``telemetry`` section: trackers that follow a run, what they call it, and steps to profile."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from partool.spec._base import OneOf, Section
from partool.spec.patterns import Address, Title
from partool.strategies.trackers import TRACKERS

TrackerName = Annotated[str, OneOf(TRACKERS)]


class TrackerSpec(Section):
    """A tracker with its place."""

    name: TrackerName
    """Which tracker."""
    uri: Address | None = None
    """Place of the tracker's store (docs/guide/telemetry.md); default: the tracker's environment variables, else a
    store beside the run. Keys do not belong here."""


_StepNumber = Annotated[int, Field(ge=1, le=2**53)]
_RankNumber = Annotated[int, Field(ge=0, le=10_000_000)]


def _by_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


_Tracker = Annotated[TrackerSpec, BeforeValidator(_by_name, json_schema_input_type=TrackerName | TrackerSpec)]


class ProfileSpec(Section):
    """A profile of chosen steps by torch's profiler."""

    steps: Annotated[list[_StepNumber], Field(min_length=2, max_length=2)]
    """First and last profiled step, counted from 1; profiled steps are slower, and left out of the medians."""
    ranks: Annotated[list[_RankNumber], Field(min_length=1)] = [0]
    """Ranks that write a trace (``profile/steps-A-B/rank-R.json.gz`` in the run's folder)."""
    memory: bool = False
    """Also write a snapshot of GPU memory, with the history of these steps."""


class TelemetrySpec(Section):
    """What is sent to experiment trackers, and what is profiled, beside the event log that every run has."""

    trackers: list[_Tracker] = []
    """Trackers that follow the run; each is an extra of partool. A bare name is short for {name: ...}."""
    project: Title = "partool"
    """Project of W&B and trackio, experiment of MLflow."""
    name: Title | None = None
    """Name of the run there; default: the run's id."""
    group: Title | None = None
    """Group of runs that belong together."""
    tags: list[Title] = []
    """Words to find the run by."""
    profile: ProfileSpec | None = None
    """Steps to profile; ``partool profile`` also profiles a run that trains already."""
