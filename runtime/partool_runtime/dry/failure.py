"""Describes the error with which a rank's dry run ends: the error, the code it comes from, and the module that ran."""

from __future__ import annotations

import traceback
from types import TracebackType

from torch import nn

_LINES = 3
"""Most lines of an error's text that are shown."""
_SECTIONS: tuple[tuple[str, str], ...] = (
    ("/partool_runtime/parallel/tensor/", "parallel.tensor"),
    ("/partool_runtime/parallel/sequence/", "parallel.sequence"),
    ("/partool_runtime/parallel/pipeline/", "parallel.pipeline"),
    ("/partool_runtime/parallel/weipipe/", "parallel.pipeline"),
    ("/partool_runtime/parallel/recompute", "parallel.recompute"),
    ("/partool_runtime/parallel/comm.py", ""),
    ("/partool_runtime/parallel/", "parallel.data"),
    ("/partool_runtime/groups.py", "parallel"),
    ("/partool_runtime/offload/", "parallel.offload"),
    ("/partool_runtime/optim/", "optimizer"),
    ("/partool_runtime/fused/", "kernels"),
    ("/partool_kernels/", "kernels"),
    ("/partool_runtime/model/", "model"),
    ("/partool_runtime/hf/", "model"),
)
"""(part of a file's path, section of the spec that decides whether its code runs, or nothing); the first that fits
counts."""


def failure(rank: int, error: BaseException) -> dict[str, str | list[str]]:
    """Return the finding PT598 for an error of a rank, as :mod:`partool_runtime.dry.__main__` prints it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if "/partool_" in frame.filename and "/partool_runtime/dry/" not in frame.filename
    ]
    text = " ".join(str(error).strip().splitlines()[:_LINES])
    message = f"rank {rank} fails in its dry run: {type(error).__name__}: {text}"
    if module := _module(error.__traceback__):
        message += f"\n  in the module {module}"
    if ours:
        message += f'\n  File "{ours[-1].filename}", line {ours[-1].lineno}, in {ours[-1].name}'
    sections = (next((name for part, name in _SECTIONS if part in each.filename), "") for each in reversed(ours))
    section = next(filter(None, sections), "")
    help = "a real run would fail in the same way, or the dry run has a fault: please report it"
    return {"code": "PT598", "message": message, "help": help, "places": [section] if section else []}


def _module(trace: TracebackType | None) -> str:
    """Return the name of the innermost module whose forward pass an error comes from, within the outermost one."""
    running: list[nn.Module] = []
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and (not running or running[-1] is not owner):
            running.append(owner)
        trace = trace.tb_next
    if not running:
        return ""
    inner = next((name for name, module in running[0].named_modules() if module is running[-1]), "")
    return inner or type(running[-1]).__name__
