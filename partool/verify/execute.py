"""Starts the dry runs of ranks in processes of their own: this package does not import torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

from partool.plan.rank_trace import RankTrace
from partool.plan.run import usable_cores
from partool.plan.types import Plan
from partool.process import python_command

_MODULE = "partool_runtime.dry"


class DryRunError(Exception):
    """A dry run that cannot be made, or that failed where a real run would fail."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help


def execute(plan: Plan, ranks: Sequence[int]) -> tuple[RankTrace, ...]:
    """Return the traces of ranks, in the order of ``ranks``; as many processes run at a time as there are cores.

    Raises :class:`DryRunError`. The processes end with this call, also where one of them or the caller fails.
    """
    jobs = min(len(ranks), usable_cores())
    shares = [ranks[first::jobs] for first in range(jobs)]
    with tempfile.TemporaryDirectory(prefix="partool-") as folder, ExitStack() as ended:
        file = Path(folder) / "plan.json"
        file.write_text(plan.to_json(), encoding="utf-8")
        started = [ended.enter_context(_started(file, some, plan)) for some in shares]
        pool = ended.enter_context(ThreadPoolExecutor(jobs))
        ended.callback(_end, started)  # before the pool waits for its threads
        waiting = [pool.submit(_traces, process, some) for process, some in zip(started, shares, strict=True)]
        done = [trace for each in as_completed(waiting) for trace in each.result()]
    traces = {trace.rank: trace for trace in done}
    return tuple(traces[rank] for rank in ranks)


def _started(plan_file: Path, ranks: Sequence[int], plan: Plan) -> subprocess.Popen[str]:
    """Start the process that runs ``ranks`` one after the other."""
    compiled = ["--compile"] if plan.layout.compile != "none" else []
    command = python_command(_MODULE, str(plan_file), *map(str, ranks), *compiled)
    # One thread each: fake tensors compute nothing, and the processes share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _traces(process: subprocess.Popen[str], ranks: Sequence[int]) -> list[RankTrace]:
    """Return the traces that a process prints; raises :class:`DryRunError` if it fails."""
    output, errors = process.communicate()
    lines = output.splitlines()
    if process.returncode == 2 and lines:
        error = json.loads(lines[-1])
        raise DryRunError(error["code"], error["message"], error["help"])
    rank = ranks[min(len(lines), len(ranks) - 1)]
    if process.returncode < 0:
        message = f"the dry run of rank {rank} was ended by signal {-process.returncode}"
        raise DryRunError("PT598", message, "signal 9 without anyone's doing: this machine has too little memory")
    if process.returncode:
        help = "a real run would fail in the same way, or the dry run has a fault: please report it"
        raise DryRunError("PT598", f"rank {rank} fails in its dry run: {_reason(errors)}", help)
    return [RankTrace.model_validate_json(line) for line in lines]


def _reason(errors: str) -> str:
    """Return the error of a traceback, and the place in partool's code that it comes from."""
    lines = [line.removeprefix("[rank0]: ") for line in errors.splitlines()]
    names = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    places = [line.strip() for line in lines if "partool_" in line and line.strip().startswith("File ")]
    return "\n".join([*names[-1:], *places[-1:]]) or "\n".join(lines[-3:]) or "no message"
