"""``python -m partool_runtime.tune``: reads requests as JSON lines from stdin, writes events as JSON lines to stdout.

Exit codes: 0 all is measured, or the budget is over; 3 there is no GPU, or not the requested GPU; 4 the GPU faulted,
and a new process continues without the configuration at fault; 130 stopped. Results are always written.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from partool_kernels.registry import ARCHITECTURES, KERNELS, Request
from partool_kernels.registry.tables import TableError, bucket
from partool_runtime.agent.lifeline import end_with_parent
from partool_runtime.private import keep_compiled_code_private
from partool_runtime.tune.requests import RequestError, examples, from_json

_WRONG, _NO_GPU, _FAULTED, _STOPPED = 2, 3, 4, 130


class _StopError(BaseException):
    """A signal requested to stop."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and return the exit code."""
    arguments = _arguments(argv)
    # Compilers that are stopped at once leave semaphores behind; the process that removes these need not warn.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    keep_compiled_code_private(os.environ)
    if parent := os.environ.pop("PARTOOL_LAUNCHER_PID", None):
        end_with_parent(int(parent), signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        requests = None if arguments.examples else [from_json(json.loads(line)) for line in sys.stdin if line.strip()]
        return _rehearse(requests, arguments) if arguments.dry_run else _tune(requests, arguments)
    except (RequestError, TableError, ValueError) as error:
        return _fail(str(error), _WRONG)
    except _StopError:
        with suppress(OSError):
            _fail("stopped; started again it goes on", _STOPPED)
        _end()
    return _STOPPED


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m partool_runtime.tune", description="Tunes kernels on this GPU.")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder of tables")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds")
    parser.add_argument("--again", action="store_true", help="measure again what is in the tables")
    parser.add_argument("--dry-run", action="store_true", help="only list the work")
    parser.add_argument(
        "--examples", action="store_true", help="the kernels' typical requests, instead of reading some"
    )
    parser.add_argument("--kernel", action="append", default=[], choices=sorted(KERNELS), help="with --examples")
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), help="with --examples and --dry-run")
    parser.add_argument("--processes", type=int, default=0, help="compilers at work at once; 0: one per core")
    return parser.parse_args(argv)


def _tune(requests: list[Request] | None, arguments: argparse.Namespace) -> int:
    from partool_kernels.registry.look_up import Registry
    from partool_runtime.tune.journal import Journal
    from partool_runtime.tune.machine import NoMachineError, this_machine
    from partool_runtime.tune.requests import placed
    from partool_runtime.tune.run import TuneOptions, tune
    from partool_runtime.tune.search import BrokenDeviceError, Tools

    try:
        machine = this_machine()
        asked = examples(arguments.kernel, machine.architecture) if requests is None else requests
        work = placed(asked, machine)
    except (NoMachineError, RequestError) as error:
        return _fail(str(error), _NO_GPU)
    registry = Registry([arguments.out] if any(arguments.out.glob("*/*.json")) else [])
    journal = Journal(arguments.out)
    tools = Tools(machine, registry, journal, processes=_processes(arguments), progress=_progress)
    try:
        if tune(work, tools, TuneOptions(arguments.out, arguments.budget, arguments.again), _tell):
            journal.finish()
    except BrokenDeviceError as error:
        return _fail(str(error), _FAULTED)
    return 0


def _rehearse(requests: list[Request] | None, arguments: argparse.Namespace) -> int:
    from partool_runtime.tune.run import rehearse

    architecture = arguments.architecture or _here()
    asked: Iterable[Request] = examples(arguments.kernel, architecture) if requests is None else requests
    work = [replace(each, rows=bucket(each.rows), architecture=each.architecture or architecture) for each in asked]
    for event in rehearse(list(dict.fromkeys(work)), _processes(arguments)):
        _tell(event)
    return 0


def _here() -> str:
    """Return the name of this machine's GPU architecture; ``sm_90`` without a GPU."""
    from partool_runtime.tune.machine import NoMachineError, this_machine

    try:
        return this_machine().architecture
    except NoMachineError:
        return "sm_90"


def _processes(arguments: argparse.Namespace) -> int:
    return arguments.processes or max(len(os.sched_getaffinity(0)), 1)


def _progress(finished: int, of: int) -> None:
    _tell({"event": "timed", "done": finished, "of": of})


def _tell(event: Mapping[str, object]) -> None:
    print(json.dumps(event), flush=True)


def _fail(reason: str, code: int) -> int:
    _tell({"event": "failed", "reason": reason, "code": code})
    return code


def _stop(number: int, frame: object) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: _end())
    raise _StopError


def _end() -> NoReturn:
    """End this process and its compilers at once: results are written already, and Python would wait for compilers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGTERM)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(_STOPPED)


if __name__ == "__main__":
    sys.exit(main())
