"""Starts the dry runs of ranks in processes of their own: this package does not import torch."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from partool.plan.rank_trace import RankTrace
from partool.plan.types import Plan
from partool.process import python_command

_MODULE = "partool_runtime.dry"
_LAST_LINES = 12
"""Number of lines of a traceback that an error quotes."""


class DryRunError(Exception):
    """A dry run that cannot be made, or that failed where a real run would fail."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help


def execute(plan: Plan, ranks: Sequence[int], *, jobs: int | None = None) -> tuple[RankTrace, ...]:
    """Return the traces of ranks, in the order of ``ranks``; ``jobs`` processes run at a time, by default one per core.

    Raises :class:`DryRunError`.
    """
    jobs = min(len(ranks), jobs or os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="partool-") as folder:
        file = Path(folder) / "plan.json"
        file.write_text(plan.to_json(), encoding="utf-8")
        with ThreadPoolExecutor(jobs) as pool:
            done = list(pool.map(lambda some: _process(file, some), [ranks[first::jobs] for first in range(jobs)]))
    traces = {trace.rank: trace for some in done for trace in some}
    return tuple(traces[rank] for rank in ranks)


def _process(plan_file: Path, ranks: Sequence[int]) -> list[RankTrace]:
    """Return the traces of ``ranks``, which run one after the other in one process."""
    command = python_command(_MODULE, str(plan_file), *map(str, ranks))
    # One thread each: fake tensors compute nothing, and the processes share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    if done.returncode == 2 and lines:
        error = json.loads(lines[-1])
        raise DryRunError(error["code"], error["message"], error["help"])
    if done.returncode:
        rank = ranks[min(len(lines), len(ranks) - 1)]
        help = "a real run would fail in the same way, or the dry run has a fault: please report it"
        raise DryRunError("PT598", f"rank {rank} fails in its dry run:\n{_reason(done.stderr)}", help)
    return [RankTrace.model_validate_json(line) for line in lines]


def _reason(errors: str) -> str:
    """Return the last lines of a traceback."""
    lines = [line for line in errors.splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:]) or "no message"
