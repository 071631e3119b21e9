"""Coefficients of memory for one model, traced by the runtime in a process of its own: no GPU, no weights."""

from __future__ import annotations

import json
import subprocess
import sys

from partool.cost.traced import Trace, parse
from partool.planner.problem import Problem

_LONGEST_S = 600


class TraceError(Exception):
    """The runtime could not trace the model; the message says why."""


def traced(problem: Problem) -> Trace:
    """Return the trace of a problem's model; raises :class:`TraceError`, which needs torch on this machine to pass."""
    precision = problem.spec.training.precision
    wanted = {
        "model": problem.model.model_dump(mode="json"),
        "precision": "bf16" if precision == "fp8" else precision,
        "compile": [problem.compile],
    }
    command = [sys.executable, "-m", "partool_runtime.trace", "-"]
    try:
        done = subprocess.run(
            command, input=json.dumps(wanted), capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"tracing the model took more than {_LONGEST_S} s") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TraceError(f"the runtime could not trace the model: {reason}")
    try:
        return parse(done.stdout)
    except (ValueError, KeyError) as error:
        raise TraceError(f"the runtime's trace cannot be read: {error}") from error
