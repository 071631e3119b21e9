"""What a trace of torch's profiler says about a step: work, waiting for the host, exposed communication, kernels.

A trace is in Chrome's format, as torch's profiler writes it: complete events (``ph`` is ``X``) with begin and duration
in microseconds. On a GPU the device's work are events of the categories ``kernel``, ``gpu_memcpy`` and ``gpu_memset``;
collectives are kernels of NCCL or RCCL, whose names contain ``nccl``. On a CPU the work are operators (``cpu_op``), and
gloo's threads record an annotation for each collective.
"""

from __future__ import annotations

import bisect
import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partool.plan.record import DamagedRecordError, damage, parse_json

STEP_NAME = re.compile(r"partool step (\d+)")
"""Name of the annotation that the runtime puts around each profiled step."""
KERNELS = 5
"""Number of kernels or operators that a summary names."""
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_BOUND = 0.15
"""A step is called host-bound if its device does nothing for more than this share of it."""
_COLLECTIVES = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send_?recv|send|recv|reduce|barrier)",
    re.IGNORECASE,
)
_MOST_BYTES = 2 << 30

Event = Mapping[str, Any]
Interval = tuple[float, float]
"""Begin and end of an event, in seconds of the trace's clock."""


@dataclass(frozen=True)
class KernelTime:
    """Time of all calls of one kernel, or of one operator without the operators inside it."""

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class StepProfile:
    """Where the time of profiled steps went; all seconds are those of one step, the mean over the profiled ones."""

    steps: tuple[int, ...]
    device: str
    """``gpu`` or ``cpu``."""
    step_s: float
    compute_s: float
    """Time in which kernels or operators other than collectives ran."""
    exposed_s: Mapping[str, float]
    """By collective, the time in which it ran and no compute did."""
    idle_s: float
    """Time in which neither ran: the device waited for the host, or Python ran between operators."""
    kernels: tuple[KernelTime, ...]
    """The kernels, or operators, that took most time."""

    @property
    def host_bound(self) -> bool:
        """Whether the step is longer because work is started too slowly."""
        return self.step_s > 0 and self.idle_s / self.step_s > _HOST_BOUND


def read_profile(file: Path) -> StepProfile:
    """Return what a trace file says; raises :class:`DamagedRecordError` if it is not a trace of profiled steps."""
    try:
        with gzip.open(file) as stream:
            content = stream.read(_MOST_BYTES)
        return profile_of(parse_json(content))
    except (OSError, EOFError) as error:
        raise DamagedRecordError(f"{file}: {error}") from None
    except ValueError as error:
        raise DamagedRecordError(f"{file}: {damage(error)}") from None


def profile_of(trace: Any) -> StepProfile:
    """Return what a trace says; raises ValueError if it has no annotated steps."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ValueError("no list traceEvents")
    complete: list[Event] = [
        event for event in events if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event
    ]
    steps = {
        int(match[1]): event
        for event in complete
        if event.get("cat") == "user_annotation" and (match := STEP_NAME.fullmatch(str(event.get("name"))))
    }
    if not steps:
        raise ValueError("no annotated step")
    compute, exchanges, device = _split(complete)
    window = min(_span(event)[0] for event in steps.values()), max(_span(event)[1] for event in steps.values())
    if device:  # it ends later than the host, which has only started its work
        window = window[0], max(window[1], *(_span(event)[1] for event in (*compute, *exchanges)))
    kernels = _totals([(str(event["name"]), _length(event)) for event in compute] if device else _self_times(compute))
    number = len(steps)
    busy = union(_clipped(compute, window))
    exposed = _exposed(exchanges, busy, window)
    covered = union([*busy, *_clipped(exchanges, window)])
    span_s = window[1] - window[0]
    return StepProfile(
        steps=tuple(sorted(steps)),
        device="gpu" if device else "cpu",
        step_s=span_s / number,
        compute_s=total(busy) / number,
        exposed_s={name: seconds / number for name, seconds in sorted(exposed.items(), key=lambda item: -item[1])},
        idle_s=max(0.0, span_s - total(covered)) / number,
        kernels=tuple(KernelTime(one.name, one.seconds / number, one.calls) for one in kernels[:KERNELS]),
    )


def _is_complete(event: Any) -> bool:
    """Return whether an event has a name, a begin and a duration."""
    if not isinstance(event, dict) or event.get("ph") != "X" or "name" not in event:
        return False
    return all(isinstance(event.get(key), int | float) for key in ("ts", "dur"))


def _split(events: Iterable[Event]) -> tuple[list[Event], list[Event], bool]:
    """Return the events of compute, those of collectives, and whether they are those of a GPU."""
    device = [event for event in events if event.get("cat") in _DEVICE]
    if device:
        exchanges = [event for event in device if "nccl" in str(event["name"]).lower()]
        return [event for event in device if "nccl" not in str(event["name"]).lower()], exchanges, True
    operators = (event for event in events if event.get("cat") == "cpu_op")
    compute = [event for event in operators if not str(event["name"]).startswith("c10d::")]
    return compute, [event for event in events if str(event["name"]).startswith("gloo:")], False


def _exposed(exchanges: list[Event], busy: list[Interval], window: Interval) -> dict[str, float]:
    """Return by collective the seconds in which neither compute nor an earlier collective ran."""
    seconds: dict[str, float] = defaultdict(float)
    reached = window[0]
    for event in sorted(exchanges, key=lambda event: float(event["ts"])):
        start, stop = _span(event)
        start, stop = max(start, reached), min(stop, window[1])
        if stop > start:
            seconds[_collective(event)] += stop - start - overlap((start, stop), busy)
            reached = stop
    return seconds


def _span(event: Event) -> Interval:
    start = float(event["ts"]) / 1e6
    return start, start + _length(event)


def _length(event: Event) -> float:
    return float(event["dur"]) / 1e6


def _clipped(events: Iterable[Event], window: Interval) -> list[Interval]:
    """Return the parts of events inside a window."""
    spans = (_span(event) for event in events)
    clipped = ((max(start, window[0]), min(stop, window[1])) for start, stop in spans)
    return [(start, stop) for start, stop in clipped if stop > start]


def _collective(event: Event) -> str:
    """Return the collective of an event, by the profiler's argument where it gives one, else by the kernel's name."""
    named = event.get("args", {}).get("Collective name") or event["name"]
    match = _COLLECTIVES.search(str(named))
    return match[1].lower().replace("_", "") if match else "other"


def _totals(times: Iterable[tuple[str, float]]) -> list[KernelTime]:
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, value in times:
        seconds[name] += value  # type: ignore[assignment]  # a Counter of floats
        calls[name] += 1
    return [KernelTime(name, float(value), calls[name]) for name, value in seconds.most_common()]


def _self_times(operators: Iterable[Event]) -> list[tuple[str, float]]:
    """Return (name, seconds) of each operator without the operators that ran inside it on the same thread."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        by_thread[event.get("tid")].append(event)
    times: list[tuple[str, float]] = []
    for events in by_thread.values():
        stack: list[tuple[int, float]] = []
        for event in sorted(events, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
            start, stop = _span(event)
            while stack and stack[-1][1] <= start:
                stack.pop()
            if stack:
                outer, _ = stack[-1]
                times[outer] = times[outer][0], times[outer][1] - (stop - start)
            stack.append((len(times), stop))
            times.append((str(event["name"]), stop - start))
    return times


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals that cover the same times, in order and without overlap."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """Return the seconds of intervals that do not overlap."""
    return sum(stop - start for start, stop in intervals)


def overlap(interval: Interval, covered: list[Interval]) -> float:
    """Return the seconds that an interval has in common with ordered intervals that do not overlap."""
    start, stop = interval
    index = max(0, bisect.bisect_right(covered, (start, float("inf"))) - 1)
    seconds = 0.0
    while index < len(covered) and covered[index][0] < stop:
        seconds += max(0.0, min(stop, covered[index][1]) - max(start, covered[index][0]))
        index += 1
    return seconds
