"""Reads the logs of a Slurm run: the ranks' files in the run's folder, and messages of the job's script."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from partool.launch import logs
from partool.launch.store import Run
from partool.launch.target import LogLine, LogQuery, NoLogsError
from partool.plan.run import LOGS, PLAN_FILE, RunStatus

_ASK_EVERY_S = 5.0
"""Seconds between requests to Slurm while logs are followed; the run's status file is read much more often."""
_ASK_AT_END_S = 1.0
"""Seconds between requests to Slurm after the end of an attempt, because the job may be requeued."""
# The job's output also repeats rank 0's lines, which are already in rank 0's file.
_MESSAGE = re.compile(rb"(partool|srun|slurmstepd|scontrol|\S*(slurm_script|node\.sh)): ")


def tasks_of(run: Run) -> list[Run]:
    """Return the runs of an array's tasks in order of task number; empty if the run is not an array."""
    folders = [file.parent for file in run.path.glob(f"task-*/{PLAN_FILE}")]
    return [Run(folder) for folder in sorted(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))]


def read(run: Run, query: LogQuery, status: Callable[[], RunStatus]) -> Iterator[LogLine]:
    """Yield lines of the ranks' output and messages of the job's script; raises NoLogsError.

    If all tasks of an array are read, each line names its task. With ``follow`` the lines come as they are written,
    otherwise task by task.
    """
    tasks = tasks_of(run)
    if query.task is not None and query.task >= len(tasks):
        what = f"is an array of {len(tasks)} tasks" if tasks else "is no array"
        raise NoLogsError(f"{run.id} {what}: there is no task {query.task}")
    if tasks and query.task is None:
        array_status = _Watched(status, run.status)
        for line in _merged([_of_task(run, index, query, array_status) for index in range(len(tasks))]):
            if line is None:
                time.sleep(logs.POLL_S)
            else:
                yield line
        return
    folder = run if query.task is None else tasks[query.task]
    suffix = "" if query.task is None else f"_{query.task}"
    for line in logs.read(folder, query, _Watched(status, folder.status), lambda: _outputs(run, suffix)):
        if shown := _shown(folder, line):
            yield shown


def _of_task(run: Run, index: int, query: LogQuery, array_status: Callable[[], RunStatus]) -> Iterator[LogLine | None]:
    """Yield the lines of one task, and None whenever there are no new lines, until the whole array has ended."""
    folder = tasks_of(run)[index]

    def status() -> RunStatus:
        return array_status().model_copy(update={"attempt": folder.status().attempt})

    for line in logs.rounds(folder, query, status, lambda: _outputs(run, f"_{index}")):
        if line is None:
            yield None
        elif shown := _shown(folder, line):
            yield shown._replace(task=index)


def _merged(readers: list[Iterator[LogLine | None]]) -> Iterator[LogLine | None]:
    """Yield lines of several readers in turn, and None while no reader has a line.

    Raises NoLogsError if every reader raises it.
    """
    open_readers, errors = readers, []
    while open_readers:
        waiting = []
        for reader in open_readers:
            try:
                for line in reader:
                    if line is None:
                        waiting.append(reader)
                        break
                    yield line
            except NoLogsError as error:
                errors.append(error)
        open_readers = waiting
        if open_readers:
            yield None
    if len(errors) == len(readers):
        raise errors[-1]


def _shown(folder: Run, line: LogLine) -> LogLine | None:
    """Return a line in the form in which it is shown; None for a line that is also in a rank's file."""
    if line.rank is not None:
        return line
    return line._replace(is_error=True) if _MESSAGE.match(line.text) or not _ranks_wrote(folder) else None


def _outputs(run: Run, suffix: str) -> list[Path]:
    return sorted(run.path.glob(f"{LOGS}/slurm-*{suffix}.out"))


def _ranks_wrote(run: Run) -> bool:
    return any(run.path.glob(f"{LOGS}/attempt-*/rank-*.log"))


class _Watched:
    """Answers frequent requests for a run's status: reads the status file each time, but seldom asks Slurm."""

    def __init__(self, ask: Callable[[], RunStatus], file: Callable[[], RunStatus]) -> None:
        self._ask = ask
        self._file = file
        self._seen: RunStatus | None = None
        self._asked = -_ASK_EVERY_S
        self._answer: RunStatus | None = None

    def __call__(self) -> RunStatus:
        file = self._file()
        changed = self._seen is not None and file.state != self._seen.state
        wait_s = _ASK_EVERY_S if file.ended is None else _ASK_AT_END_S
        if self._answer is None or changed or time.monotonic() - self._asked >= wait_s:
            self._answer, self._asked, self._seen = self._ask(), time.monotonic(), file
        # the file is more up to date about the attempt
        return self._answer.model_copy(update={"attempt": file.attempt})
