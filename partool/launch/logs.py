"""Reads the ranks' logs in a run's folder, also while the ranks still write their logs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from partool.launch.store import Run
from partool.launch.target import LogLine, LogQuery, NoLogsError
from partool.plan.run import RunStatus, rank_log

POLL_S = 0.2
_FILE = re.compile(r"rank-(\d+)\.(stdout|stderr)\.log")


def read(
    run: Run, query: LogQuery, status: Callable[[], RunStatus], others: Callable[[], list[Path]] = list
) -> Iterator[LogLine]:
    """Yield the whole lines that ``query`` selects; with ``follow``, until the run ends.

    Without ``follow``, the lines come rank by rank. ``status`` returns the run's status with its latest attempt;
    ``others`` returns files that belong to no rank; their lines are included unless ``query`` selects a rank. Raises
    NoLogsError if the selected rank, or any rank at all, has no log.
    """
    for line in rounds(run, query, status, others):
        if line is None:
            time.sleep(POLL_S)
        else:
            yield line


def rounds(
    run: Run, query: LogQuery, status: Callable[[], RunStatus], others: Callable[[], list[Path]] = list
) -> Iterator[LogLine | None]:
    """Yield the lines of :func:`read`, and None instead of waiting, so that callers can read several runs at once."""
    tails: dict[Path, _Tail] = {}
    attempt, empty = 0, True
    while True:
        now = status()  # requested before reading, so that the last lines of a run that ends are read too
        if attempt != (query.attempt or now.attempt):
            yield from _rest(tails)
            attempt = query.attempt or now.attempt
            tails = {path: tail for path, tail in tails.items() if tail.rank is None}
        _find(tails, run, attempt, query, others)
        last = not query.follow or not now.active
        for tail in sorted(tails.values(), key=_Tail.order):
            for line in tail.lines(last=last):
                yield line
                empty = False
        if last:
            if empty and not any(tail.rank is not None for tail in tails.values()):
                raise NoLogsError(_missing(run, query, attempt))
            return
        yield None


def ranks(run_path: Path, attempt: int) -> list[int]:
    """Return the ranks that have log files in an attempt."""
    folder = rank_log(run_path, attempt, 0, "stdout").parent
    numbers = {int(match[1]) for file in folder.glob("rank-*.*.log") if (match := _FILE.fullmatch(file.name))}
    return sorted(numbers)


@dataclass(slots=True)
class _Tail:
    """A log file that is read while it grows."""

    path: Path
    rank: int | None
    is_error: bool
    offset: int = 0
    _part: bytes = b""

    def order(self) -> tuple[int, bool]:
        return (-1 if self.rank is None else self.rank, self.is_error)

    def lines(self, *, last: bool) -> Iterator[LogLine]:
        """Yield the lines completed since the last call; with ``last`` also an incomplete last line."""
        try:
            if self.path.stat().st_size > self.offset:
                with self.path.open("rb") as stream:
                    stream.seek(self.offset)
                    content = stream.read()
                self.offset += len(content)
                *complete, self._part = (self._part + content).split(b"\n")
                yield from (LogLine(self.rank, self.is_error, line + b"\n") for line in complete)
        except FileNotFoundError:
            pass
        if last and self._part:
            yield LogLine(self.rank, self.is_error, self._part)
            self._part = b""


def _rest(tails: dict[Path, _Tail]) -> Iterator[LogLine]:
    for tail in sorted(tails.values(), key=_Tail.order):
        yield from tail.lines(last=tail.rank is not None)


def _find(tails: dict[Path, _Tail], run: Run, attempt: int, query: LogQuery, others: Callable[[], list[Path]]) -> None:
    """Add to ``tails`` the log files that have appeared since the last call."""
    wanted = ranks(run.path, attempt) if query.rank is None else [query.rank]
    for rank in wanted:
        for stream in ("stdout", "stderr"):
            path = rank_log(run.path, attempt, rank, "stdout" if stream == "stdout" else "stderr")
            if path not in tails and path.exists():
                tails[path] = _Tail(path, rank, stream == "stderr")
    if query.rank is None:
        for path in others():
            tails.setdefault(path, _Tail(path, None, is_error=False))


def _missing(run: Run, query: LogQuery, attempt: int) -> str:
    existing = ranks(run.path, attempt)
    available = f"there are ranks {min(existing)} to {max(existing)}" if existing else "no rank was started"
    whose = "logs" if query.rank is None else f"logs of rank {query.rank}"
    return f"no {whose} in attempt {attempt} of {run.id}: {available}"
