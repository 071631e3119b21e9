"""Runs several jobs at a time in copies of this process, which share what it has imported."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from partool_runtime.agent.lifeline import end_with_parent


class RankJob(NamedTuple):
    """Ranks that are executed one after the other."""

    ranks: Sequence[int]
    output: int
    """File descriptor for the results: a line of JSON each, and ``{"exit": CODE}`` at the end."""
    errors: Path
    """File for what the ranks' code prints."""


def jobs_of(ranks: Sequence[int], outputs: Sequence[int], folder: Path) -> list[RankJob]:
    """Return a job for each of ``outputs``, which take turns to get a rank."""
    count = len(outputs)
    return [RankJob(ranks[at::count], output, folder / f"errors-{at}") for at, output in enumerate(outputs)]


def run_apart(jobs: Sequence[RankJob], run: Callable[[Sequence[int], TextIO], int]) -> None:
    """Call ``run`` for each job in a copy of this process; tell each job's exit code, or -N if signal N ended it.

    No pass of autograd may have run yet: its threads are not copied. The copies end with this process.
    """
    outputs: dict[int, int] = {}
    parent = os.getpid()
    for job in jobs:
        copy = os.fork()
        if copy == 0:
            for other in jobs:
                if other is not job:
                    os.close(other.output)
            _be_copy(job, run, parent)
        outputs[copy] = job.output
    while outputs:
        ended, status = os.wait()
        output = outputs.pop(ended)
        os.write(output, json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        os.close(output)


def _be_copy(job: RankJob, run: Callable[[Sequence[int], TextIO], int], parent: int) -> None:
    """Run a job and end the process, without what Python does at its end: that belongs to the first process."""
    code = 1
    try:
        end_with_parent(parent, signal.SIGKILL)
        errors = os.open(job.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        with os.fdopen(os.dup(job.output), "w", encoding="utf-8") as results:
            code = run(job.ranks, results)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
