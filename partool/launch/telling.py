"""Finds the line that says why a process ended: in an agent's termination message, or in a job's output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_RANK = re.compile(r"^\[\d+\] ")
_OWN = "partool: "
_NOISE = re.compile(
    r"^\W*$"  # empty, or the marks that Python puts under a line: ^^^^, ~~~~
    r"|^Traceback \(most recent|^\s+File \"|^\s*warnings\.warn\("
    r"|^(\[rank\d+\]:\s?)?\[[IW]\d{4} "  # notes and warnings of torch's C++ parts (c10/util/Logging.cpp)
    r"|\b\w*Warning: "
)
"""Lines in the last output of a process that do not say why the process ended."""
_SCHEDULER = re.compile(r"(srun|slurmstepd|\S*(slurm_script|node\.sh)): ")
_TAIL_BYTES = 1 << 16


def telling(message: str) -> str:
    """Return the line of a termination message that gives the reason of the end; empty if no line does.

    An agent's summary begins with this line. Without a summary, the message is the end of the output; the result is
    then the agent's last line in the output or, if the agent wrote none, the last line that is not noise.
    """
    lines = [_RANK.sub("", line) for line in message.strip().splitlines()]
    agent_lines = _partool_lines(lines)
    if agent_lines:
        return agent_lines[0] if agent_lines[0] == lines[0] else agent_lines[-1]
    return next((line.strip() for line in reversed(lines) if not _NOISE.search(line)), lines[-1] if lines else "")


def told_by_job(output: Path) -> str:
    """Return the last line of a job's output in which partool, or else the scheduler, says why the job ended.

    Lines of the ranks and remarks (``partool: note:``) do not count; without a line, or without the file, the result
    is empty.
    """
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    job_lines = _partool_lines(lines) or [line for line in lines if _SCHEDULER.match(line) and not _NOISE.search(line)]
    return job_lines[-1].removeprefix(_OWN).strip() if job_lines else ""


def _partool_lines(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith(_OWN) and not line.startswith(f"{_OWN}note")]
