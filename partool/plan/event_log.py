"""Reading a rank's event log (``events/rank-N.jsonl``), also while it is written or after its writer was killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from partool.plan.event_data import check_event
from partool.plan.record import DamagedRecordError, parse_json

EVENT_VERSION = 1

EventKind = Literal[
    "start",  # attempt, world_size, plan_hash, resumed_from
    "step",  # step, loss, grad_norm, lr, tokens, step_time_s, terms_s, tokens_per_s, mfu, memory_bytes, skipped,
    # multi_token_loss of a model that predicts further tokens, and preferences: chosen, rejected, margin, accuracy,
    # logps_chosen, logps_rejected, pairs, kl of dpo, log_odds of orpo; kl of a teacher
    "pipeline",  # step, steady, t, actions, start_us, stop_us, waited_us: see partool.plan.pipeline_log
    "validation",  # step, loss, tokens, weights_loss beside the loss of the average, preferences as in a step, sets:
    # of each named set the same figures, and its perplexity; samples: prompt, text, tokens, ended
    "evaluation",  # step, tasks: metrics by TASK/METRIC
    "early_stop",  # step, reason: the validation after this step ends the run
    "checkpoint",  # step, path, write_s, blocked_s
    "experts",  # step, and of each layer: layer, tokens, imbalance, dropped, entropy, bias
    "offload",  # figures of the whole attempt, counted by partool_runtime.offload.figures.HostFigures
    "profile",  # first, last: the profiled steps
    "nonfinite",  # step, consecutive
    "signal",  # name
    "warning",  # message
    "summary",  # predicted, measured and measure of every term
    "error",  # type, message, traceback
    "end",  # step, exit_code, reason
]


class Event(TypedDict):
    """An event of a rank, which is one line of the rank's log."""

    v: int
    kind: EventKind
    t: float
    """Unix time in seconds."""
    rank: int
    data: dict[str, Any]


class StepData(TypedDict):
    """An event ``step``, as far as its text is shown; the loss is None, or missing, if it is not finite."""

    step: int
    loss: NotRequired[float | None]


EVENTS = "events"
"""Folder of the event logs inside a run's folder."""
_KEYS = {"v", "kind", "t", "rank", "data"}


def event_log(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's event log."""
    return run_dir / EVENTS / f"rank-{rank}.jsonl"


def parse_event(line: bytes | str) -> Event | None:
    """Return the event in a line; None if the line is incomplete, is no event, is damaged or is of another version."""
    try:
        return _event(line)
    except DamagedRecordError:
        return None


def _event(line: bytes | str) -> Event | None:
    """Return the event in a line; None if the line is incomplete, is no event, or is of another version.

    Raises :class:`DamagedRecordError` for an event whose fields are not as a rank writes them.
    """
    try:
        value: Any = parse_json(line)
    except ValueError:  # malformed JSON or UTF-8
        return None
    if not isinstance(value, dict) or value.keys() < _KEYS or value["v"] != EVENT_VERSION:
        return None
    check_event(value)
    return cast(Event, value)


def read_events(path: Path, *, strict: bool = True) -> Iterator[Event]:
    """Yield a log's events in order; incomplete lines are skipped, a missing file yields no events.

    Raises :class:`DamagedRecordError` for an event that no rank has written, or skips it unless ``strict``.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    event = _event(line)
                except DamagedRecordError as error:
                    if not strict:
                        continue
                    raise DamagedRecordError(f"{path}, line {number}: {error}") from None
                if event is not None:
                    yield event
    except FileNotFoundError:
        return


def read_new_events(path: Path, offset: int, *, strict: bool = False, most_bytes: int = -1) -> tuple[list[Event], int]:
    """Return the events after a byte offset, and the offset to continue from; an unfinished line is left for later.

    A file that has become shorter than ``offset`` is read from its start. Damaged events are left out or, with
    ``strict``, raise :class:`DamagedRecordError`. ``most_bytes`` limits what is read at once; lines are shorter.
    """
    try:
        with path.open("rb") as file:
            start = offset if offset <= file.seek(0, 2) else 0
            file.seek(start)
            data = file.read(most_bytes)
    except FileNotFoundError:
        return [], 0
    end = data.rfind(b"\n") + 1
    events = []
    for number, line in enumerate(data[:end].split(b"\n")):
        try:
            event = _event(line)
        except DamagedRecordError as error:
            if strict:
                raise DamagedRecordError(f"{path}, line {_line(path, start) + number}: {error}") from None
            continue
        if event is not None:
            events.append(event)
    return events, start + end


def _line(path: Path, offset: int) -> int:
    """Return the number of the line that holds a byte of a file, from 1."""
    with path.open("rb") as file:
        return 1 + file.read(offset).count(b"\n")


def last_events(path: Path, max_bytes: int = 1 << 18, *, strict: bool = False) -> list[Event]:
    """Return the events in the last ``max_bytes`` of a log; none if the file is missing.

    ``strict`` is as in :func:`read_new_events`.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return []
    return read_new_events(path, max(0, size - max_bytes), strict=strict)[0]
