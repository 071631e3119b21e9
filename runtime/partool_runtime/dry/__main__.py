"""``python -m partool_runtime.dry PLAN RANK...``: dry-run ranks of a plan; prints one line of JSON per rank.

With ``--outputs`` the ranks run in copies of the process, side by side, and their lines go to these file descriptors.
An error is one line with its code, and exit code 2; the traceback of an error in a rank's code goes to stderr.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from pydantic import ValidationError

from partool.plan.types import Plan
from partool_runtime.agent.lifeline import end_with_parent
from partool_runtime.dry import shim
from partool_runtime.dry.apart import jobs_of, run_apart
from partool_runtime.errors import ConfigurationError
from partool_runtime.private import keep_compiled_code_private

_THRESHOLD = 20_000
"""Objects between two collections; tensors of a step are in no cycles, so this delays the end of none."""


def main(argv: Sequence[str] | None = None) -> int:
    """Dry-run ranks, one after the other; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m partool_runtime.dry", description="Dry-run ranks of a plan.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--compile", action="store_true", help="compile blocks for the plan's memory, not for speed")
    parser.add_argument("--parent", type=int, help="end when this process, which started this one, ends")
    parser.add_argument("--outputs", type=int, nargs="+", help="file descriptors, one for each copy of the process")
    parser.add_argument("--errors", type=Path, help="folder for what the copies print")
    asked = parser.parse_args(argv)
    if asked.parent is not None:
        end_with_parent(asked.parent, signal.SIGKILL)
    if asked.compile:
        keep_compiled_code_private(os.environ)
    # Code of models may print: only results go to the command's output.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)
        try:
            return _answer(asked, results)
        finally:
            results.flush()
            os.dup2(results.fileno(), 1)


def _answer(asked: argparse.Namespace, results: TextIO) -> int:
    """Write the results of the ranks, or one error; return the exit code."""
    try:
        plan = _plan(asked.plan)
        if missing := [rank for rank in asked.ranks if not 0 <= rank < plan.layout.mesh.world_size]:
            raise ConfigurationError(
                "PT510", f"the plan has no rank {missing[0]}", f"0 to {plan.layout.mesh.world_size - 1}"
            )
        if plan.devices.backend == "cpu":
            shim.require_torch()
        else:
            shim.load(*(folder / "dry" for folder in _caches()))
            _install(plan)
        run = partial(_run, plan, compiled=asked.compile)
        _ready(compiled=asked.compile)
        if asked.outputs is None:
            return run(asked.ranks, results)
        run_apart(jobs_of(asked.ranks, asked.outputs, asked.errors), run)
        return 0
    except ConfigurationError as error:
        if asked.outputs is None:
            return _refuse(error, results)
        for output in asked.outputs:
            with os.fdopen(output, "w", encoding="utf-8") as answers:
                _refuse(error, answers)
        return 2


def _refuse(error: ConfigurationError, results: TextIO) -> int:
    print(json.dumps({"code": error.code, "message": error.message, "help": error.help}), file=results)
    return 2


def _plan(path: Path) -> Plan:
    """Read a plan; raises ConfigurationError PT503. The worker's function would import torch too early."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        fix = "make it again: partool plan SPEC --out FILE"
        raise ConfigurationError("PT503", f"{path} is no plan of this version: {reason}", fix) from None


def _caches() -> list[Path]:
    """Return folders for the library: never the current one, which may be a folder that somebody downloaded."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partool"
    home = os.environ.get("PARTOOL_HOME")
    return [Path(home).absolute(), cache] if home else [cache]


_NEEDED = ("partool_runtime.dry.rank", "torch._dynamo")
"""Modules that every rank imports; fake tensors ask the compiler's settings."""
_COMPILER = ("torch._functorch.aot_autograd", "torch._inductor.compile_fx")
"""Modules that compilation imports."""


def _ready(*, compiled: bool) -> None:
    """Import what ranks need, before the process is copied."""
    for name in (*_NEEDED, *(_COMPILER if compiled else ())):
        importlib.import_module(name)
    gc.freeze()  # modules stay, so the collector need not look at their objects
    gc.set_threshold(_THRESHOLD)


def _run(plan: Plan, ranks: Sequence[int], results: TextIO, *, compiled: bool) -> int:
    from partool_runtime.dry.failure import failure
    from partool_runtime.dry.rank import dry_rank

    for rank in ranks:
        try:
            trace = dry_rank(plan, rank, compiled=compiled)
        except ConfigurationError as error:
            return _refuse(error, results)
        except Exception as error:
            traceback.print_exc()
            print(json.dumps(failure(rank, error)), file=results)
            return 2
        print(trace.model_dump_json(), file=results, flush=True)
    return 0


def _install(plan: Plan) -> None:
    from partool_runtime.dry.device import install

    digits = plan.devices.architecture.removeprefix("sm_")
    capability = (int(digits[:-1]), int(digits[-1])) if digits.isdecimal() else (9, 0)
    install(plan.devices.accelerator, capability, plan.devices.memory_bytes, plan.devices.per_node)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # without taking torch's objects apart, which takes most of a second
