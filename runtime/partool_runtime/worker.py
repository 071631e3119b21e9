"""The process of one rank; the agent starts it as ``python -m partool_runtime.worker PLAN --run-dir DIR [--resume]``.

Reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and the rendezvous variables as torch defines them; without these
variables the world has one rank. ``PARTOOL_ATTEMPT`` numbers the starts, including restarts and resumes. This process
ends when the process with the id ``PARTOOL_AGENT_PID`` ends.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from partool.plan.run import starting_file
from partool.plan.types import Plan
from partool.strategies.jobs import JOBS
from partool_runtime.agent import numa
from partool_runtime.agent.error_files import write_error
from partool_runtime.agent.lifeline import end_with_parent
from partool_runtime.errors import EXIT_DONE, EXIT_PREEMPTED, exit_code
from partool_runtime.plan_file import load_plan
from partool_runtime.private import keep_compiled_code_private
from partool_runtime.pulse import Pulse
from partool_runtime.stop import StopRequest

Job = Callable[[Plan, Path, bool, StopRequest, Pulse], None]
"""A job takes ``(plan, run_dir, resume, stop, pulse)``; ``resume`` continues from the last checkpoint if there is one.
It tells ``pulse`` about its progress."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank's job and return its exit code; after an error the process ends without returning."""
    numa.apply()  # before threads are started and memory is touched
    parser = argparse.ArgumentParser(prog="python -m partool_runtime.worker", description="One rank of a run.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args(argv)
    if agent := os.environ.get("PARTOOL_AGENT_PID"):
        end_with_parent(int(agent), signal.SIGKILL)
    faulthandler.enable()
    keep_compiled_code_private(os.environ)
    rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("PARTOOL_ATTEMPT", "1"))
    stop = StopRequest(starting_file(arguments.run_dir, attempt, rank))
    stop.install()
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    try:
        pulse = Pulse.from_environment()
        plan = load_plan(arguments.plan)
        load_job(plan.job)(plan, arguments.run_dir, arguments.resume or restarted, stop, pulse)
        stop.retire()
    except BaseException as error:  # torch's checkpoint errors are not Exceptions
        stop.retire()
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # leaves this function out of the traceback
        _end(arguments.run_dir, error)
    return EXIT_DONE


def load_job(name: str) -> Job:
    """Import the function that runs a job (:attr:`partool.strategies.jobs.JobRecord.run`)."""
    module, _, function = JOBS[name].run.partition(":")
    return cast(Job, getattr(importlib.import_module(module), function))


def _end(run_dir: Path, error: BaseException) -> None:
    """Record the error, then exit without clean-up, since destructors of process groups block if other ranks ended."""
    code = exit_code(error)
    if code != EXIT_PREEMPTED:
        rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("PARTOOL_ATTEMPT", "1"))
        with contextlib.suppress(OSError):  # the disk may be full, which the agent reports
            write_error(run_dir, rank, attempt, error)
        traceback.print_exception(error)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
