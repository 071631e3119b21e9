"""Reading the logs of a run, also while they grow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from partool.launch.store import Run
from partool.launch.target import Target

_POLL_S = 0.2


class NoLogsError(LookupError):
    """There is no such log; the message says what there is."""


def read(target: Target, run: Run, rank: int, attempt: int | None, *, follow: bool) -> Iterator[tuple[bool, bytes]]:
    """Yield pieces of a rank's logs as (is standard error, bytes): of one attempt, by default the latest.

    With ``follow`` it goes on until the run ends, over restarts if no attempt is given. Raises NoLogsError.
    """
    while follow and target.logs(run, attempt or target.status(run).attempt) == {} and target.status(run).active:
        time.sleep(_POLL_S)
    current = attempt or target.status(run).attempt
    files = _files(target, run, rank, current)
    offsets = [0, 0]
    while True:
        status = target.status(run)  # looked at before reading: what is written until the end is read
        yield from _new(files, offsets)
        if not follow or not status.active:
            return
        if attempt is None and status.attempt != current and target.logs(run, status.attempt):
            current, offsets = status.attempt, [0, 0]
            files = _files(target, run, rank, current)
            continue
        time.sleep(_POLL_S)


def _files(target: Target, run: Run, rank: int, attempt: int) -> tuple[Path, Path]:
    ranks = target.logs(run, attempt)
    if rank not in ranks:
        there = f"there are ranks {min(ranks)} to {max(ranks)}" if ranks else "no rank was started"
        raise NoLogsError(f"no logs of rank {rank} in attempt {attempt} of {run.id}: {there}")
    return ranks[rank]


def _new(files: tuple[Path, Path], offsets: list[int]) -> Iterator[tuple[bool, bytes]]:
    for index, file in enumerate(files):
        if not file.exists():
            continue
        with file.open("rb") as stream:
            stream.seek(offsets[index])
            content = stream.read()
        offsets[index] += len(content)
        if content:
            yield bool(index), content
