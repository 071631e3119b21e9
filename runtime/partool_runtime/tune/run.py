"""Measurement of all requests within a budget: the most important first, each entry written as soon as it is found."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from partool_kernels.proof import prove_all
from partool_kernels.registry import KERNELS, Request
from partool_kernels.registry.look_up import Registry
from partool_kernels.registry.source import source_hash
from partool_kernels.registry.tables import Entry, add, stored
from partool_runtime.tune.candidates import Prove, first, grid, runnable
from partool_runtime.tune.requests import as_json
from partool_runtime.tune.search import BrokenDeviceError, Tools, TuneRequestError, is_fault, tune_one

Event = dict[str, object]
_NUMBER, _CLAUSE = re.compile(r"\d+"), re.compile("[,:]")
_LEAST_S = 2.0
"""Minimum seconds per request; no request is begun if less time of the budget is left."""


@dataclass(frozen=True)
class TuneOptions:
    """Settings that limit the measurement, and the folder for its results."""

    out: Path
    """Folder of tables."""
    budget_s: float = 1800.0
    remeasure: bool = False
    """Whether to measure requests again if they were measured on this device with this Triton and this code."""


def tune(requests: Sequence[Request], tools: Tools, options: TuneOptions, tell: Callable[[Event], None]) -> bool:
    """Measure requests in order and write their entries; returns whether all were measured before the budget was over.

    Every request gets an equal share of the remaining time. ``tell`` is called with events.
    """
    end = time.monotonic() + options.budget_s
    waiting = [each for each in requests if options.remeasure or not is_measured(each, options.out)]
    tell(
        {
            "event": "start", "device": tools.machine.name, "architecture": tools.machine.architecture,
            "requests": len(waiting), "known": len(requests) - len(waiting), "out": str(options.out),
        }
    )  # fmt: skip
    for place, request in enumerate(waiting):
        remaining_s = end - time.monotonic()
        if remaining_s < _LEAST_S:
            tell({"event": "end", "finished": False, "left": len(waiting) - place})
            return False
        tell({"event": "request", "index": place, **as_json(request)})
        _one(request, tools, (options, time.monotonic() + remaining_s / (len(waiting) - place)), tell)
    tell({"event": "end", "finished": True, "left": 0})
    return True


def _one(request: Request, tools: Tools, within: tuple[TuneOptions, float], tell: Callable[[Event], None]) -> None:
    options, until = within
    try:
        entry = tune_one(request, tools, until)
    except BrokenDeviceError:
        raise
    except Exception as error:
        # After any error, the other requests can still be measured.
        if is_fault(error):
            raise BrokenDeviceError(str(error).splitlines()[0]) from error
        reason = str(error) if isinstance(error, TuneRequestError) else f"{type(error).__name__}: {error}"
        tell({"event": "skipped", "kernel": request.kernel, "reason": reason})
        return
    finally:
        torch.cuda.empty_cache()
    path = add(request.kernel, request.architecture, [entry], options.out)
    tell({"event": "result", "file": str(path), **_fields(request, entry)})


def _fields(request: Request, entry: Entry) -> Event:
    measured = entry.measured
    assert measured is not None
    return {
        **as_json(request),
        "config": entry.config.model_dump(),
        "default": entry.config.config == KERNELS[request.kernel].default(request),
        "time_s": measured.time_s,
        "default_s": measured.default_s,
        "reference_s": measured.reference_s,
        "error": measured.error,
        "tried": measured.tried,
    }


def is_measured(request: Request, folder: Path) -> bool:
    """Return whether a folder's table has a measurement for exactly this request, with the kernel's current source."""
    return any(
        entry.measured is not None and other == request and entry.source_hash == source_hash(request.kernel)
        for other, _, entry in stored(request.kernel, request.architecture, folder)
    )


def rehearse(requests: Sequence[Request], processes: int, prove: Prove = prove_all) -> Iterator[Event]:
    """Yield an event per request: the configurations that would run and the number refused; nothing is measured."""
    registry = Registry()
    for place, request in enumerate(requests):
        configs = first(request, registry)
        filtered = runnable(request, configs, prove, processes)
        reasons = Counter(_NUMBER.sub("N", _CLAUSE.split(reason)[0]) for reason in filtered.refused.values())
        yield {
            "event": "rehearsed", "index": place, "of": len(requests), **as_json(request), "grid": len(grid(request)),
            "candidates": len(configs), "refused": len(filtered.refused), "reasons": reasons,
        }  # fmt: skip
