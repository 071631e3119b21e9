"""The event ``pipeline`` of a rank's log: the actions that a pipeline rank executed in a step, with their times.

The data of the event are columns, one entry per executed action in the order in which they began:

``step``       the step, counted from 1
``steady``     false in an attempt's first steps, which allocate and compile
``t``          Unix time in seconds of this rank's time 0, when it began the step's passes
``actions``    the actions as cells of a schedule's text: ``2F0``, ``2SEND_F0``
``start_us``   integer microseconds since time 0; of compute, when it began; of a send, when it was handed over; of a
               receive, when it was posted
``stop_us``    when compute ended; when a receive's data had arrived; when a send was complete, where that is known
``waited_us``  how long the rank idled for the action's input before ``start_us``
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from partool.plan.event_data import PipelineData
from partool.schedule import Action, cell, read_cell


class Timed(Protocol):
    """An action that a rank has executed; all times are seconds on the same clock of the rank."""

    @property
    def action(self) -> Action:
        """Action that was executed."""

    @property
    def start_s(self) -> float:
        """When the action began, as ``start_us`` in the module's docstring, but in seconds on the rank's clock."""

    @property
    def stop_s(self) -> float:
        """When the action ended, as ``stop_us`` in the module's docstring, but in seconds on the rank's clock."""

    @property
    def waited_s(self) -> float:
        """Seconds for which the rank idled for the action's input before ``start_s``."""


@dataclass(frozen=True, slots=True)
class Executed:
    """An executed action read from the log; start and stop are in seconds since the step's time 0."""

    action: Action
    start_s: float
    stop_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """A rank's actions of one step, in the order in which they began."""

    step: int
    steady: bool
    unix_s: float
    """Unix time in seconds at which this rank began the step's passes (time 0)."""
    actions: tuple[Executed, ...]


def pipeline_data(step: int, steady: bool, unix_less_clock_s: float, done: Iterable[Timed]) -> dict[str, object]:
    """Return the data of the event for the actions ``done``; ``unix_less_clock_s`` is Unix time minus their clock."""
    ordered = sorted(done, key=lambda one: one.start_s)
    zero_s = min((one.start_s - one.waited_s for one in ordered), default=0.0)
    return {
        "step": step,
        "steady": steady,
        "t": round(zero_s + unix_less_clock_s, 6),
        "actions": [cell(one.action) for one in ordered],
        "start_us": [_us(one.start_s - zero_s) for one in ordered],
        "stop_us": [_us(one.stop_s - zero_s) for one in ordered],
        "waited_us": [_us(one.waited_s) for one in ordered],
    }


def read_pipeline(data: Mapping[str, object]) -> ExecutedStep:
    """Parse the data that :func:`pipeline_data` returned; raises ``ValueError`` for other data."""
    try:
        read = PipelineData.model_validate(data)
        columns = zip(read.actions, read.start_us, read.stop_us, read.waited_us, strict=True)
        rows = tuple(Executed(read_cell(text), *(micros / 1e6 for micros in times)) for text, *times in columns)
    except ValueError as error:
        raise ValueError(f"not the data of a pipeline event: {error}") from error
    return ExecutedStep(read.step, read.steady, read.t, rows)


def _us(value_s: float) -> int:
    return round(1e6 * value_s)
