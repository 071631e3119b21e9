"""The fastest configuration for one request."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from partool_kernels.cases import Case, case, errors
from partool_kernels.compiled import Compiled
from partool_kernels.proof import prove_all
from partool_kernels.registry import KERNELS, Config, Request
from partool_kernels.registry.look_up import Registry
from partool_kernels.registry.source import source_hash
from partool_kernels.registry.tables import Entry, Measured, Resources, Settings
from partool_runtime.tune.candidates import Filtered, Prove, beside, first, grid, runnable
from partool_runtime.tune.journal import FAILED, Journal
from partool_runtime.tune.machine import TuningMachine

GAIN = 1.03
"""A configuration is kept if the time of the rule's configuration is at least this multiple of its own time."""
SCREENED, REPEATS = 5, 30
"""Number of calls of each configuration while all are compared, and while only the fastest few are compared."""
_FINALISTS = 4
_ROUNDS = 4
"""Maximum number of rounds of searching near the best configuration."""
_SMALLER = (1, 8, 64)
"""Divisors of the number of rows in a verification; the next one is used if the device's memory is too small."""


class TuneRequestError(Exception):
    """A request has no result; the text gives the reason."""


class BrokenDeviceError(Exception):
    """The GPU fails all calls of this process: a configuration made it fault."""


@dataclass(frozen=True)
class Tools:
    """Functions and limits of the search."""

    machine: TuningMachine
    registry: Registry
    journal: Journal
    processes: int = 1
    """Number of compilers that run at once."""
    prove: Prove = prove_all
    make_case: Callable[[Request, torch.device, int], Case] = case
    progress: Callable[[int, int], None] = lambda finished, of: None
    """Called with the number of timed configurations and the number of all configurations."""


def tune_one(request: Request, tools: Tools, until: float) -> Entry:
    """Return the entry of a request: the fastest configuration that computes the right result.

    ``until`` is the time (``time.monotonic``) from which no further configuration is tried. Raises
    :class:`TuneRequestError`, or :class:`BrokenDeviceError`.
    """
    default = KERNELS[request.kernel].default(request)
    made = _made(request, tools, 0)
    filtered, times = _screen(request, made, tools, until)
    if times.get(default, FAILED) == FAILED:
        raise TuneRequestError(f"its rule's configuration cannot run: {filtered.refused.get(default, 'it fails')}")
    best = sorted((config for config in times if times[config] < FAILED and config != default), key=times.__getitem__)
    finalists = [default, *best[:_FINALISTS]]
    timed = tools.machine.timer.medians_s([*(_run(made, each) for each in finalists), made.eager], REPEATS)
    default_s, reference_s = timed[0], timed[-1]
    order = sorted(range(len(finalists)), key=lambda place: timed[place])
    fast_enough = [place for place in order if place and timed[place] * GAIN <= default_s]
    del made
    for place in [*fast_enough, 0]:
        error = verify(request, finalists[place], tools)
        if error <= 1.0:
            seconds = (timed[place], default_s, reference_s)
            tried = sum(value < FAILED for value in times.values())
            return _entry(request, finalists[place], tools, (filtered.kept[finalists[place]], seconds, error, tried))
    raise TuneRequestError("no configuration computes the right thing, the rule's included")


def _screen(request: Request, made: Case, tools: Tools, until: float) -> tuple[Filtered, dict[Config, float]]:
    """Time the first configurations, then configurations near the best, as long as these are better.

    Return the filtered configurations, and the seconds of each timed configuration.
    """
    everything = grid(request)
    filtered, times = Filtered({}, {}), dict[Config, float]()
    wave = first(request, tools.registry)
    for _ in range(_ROUNDS):
        screened = runnable(request, wave, tools.prove, tools.processes)
        filtered.kept.update(screened.kept)
        filtered.refused.update(screened.refused)
        before = min(times.values(), default=FAILED)
        _time_all(request, made, screened.kept, (tools, times, until))
        best = min(times, key=times.__getitem__, default=None)
        if best is None or times[best] >= before or time.monotonic() >= until:
            break
        seen = filtered.kept.keys() | filtered.refused.keys()
        wave = [config for config in beside(best, everything) if config not in seen]
        if not wave:
            break
    return filtered, times


def _time_all(
    request: Request, made: Case, configs: Iterable[Config], so_far: tuple[Tools, dict[Config, float], float]
) -> None:
    tools, times, until = so_far
    waiting = list(configs)
    for place, config in enumerate(waiting):
        # The first configuration is the rule's: without it there is no reference.
        if times and time.monotonic() >= until:
            return
        seconds = tools.journal.cached_s(request, config)
        if seconds is None:
            tools.journal.begin(request, config)
            seconds = _seconds(made, config, tools.machine)
            tools.journal.end(request, config, seconds)
        times[config] = seconds
        tools.progress(place + 1, len(waiting))


def _seconds(made: Case, config: Config, machine: TuningMachine) -> float:
    """Return a configuration's time in seconds; :data:`FAILED` if its launch is refused."""
    try:
        (seconds,) = machine.timer.medians_s([_run(made, config)], SCREENED)
    except Exception as error:
        if is_fault(error):
            raise BrokenDeviceError(str(error).splitlines()[0]) from error
        return FAILED
    return seconds if math.isfinite(seconds) and seconds > 0.0 else FAILED


def is_fault(error: Exception) -> bool:
    """Return whether an error, such as an illegal address, is permanent: all later calls of the process fail too."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error) or "HIP error" in str(error)


def _run(made: Case, config: Config) -> Callable[[], object]:
    return lambda: made.run(config)


def _made(request: Request, tools: Tools, seed: int) -> Case:
    try:
        return tools.make_case(request, tools.machine.device, seed)
    except torch.OutOfMemoryError:
        raise TuneRequestError(f"its inputs do not fit the memory of {tools.machine.name}") from None


def verify(request: Request, config: Config, tools: Tools) -> float:
    """Return a configuration's largest error divided by the allowed error, on other inputs than the timed inputs."""
    for part in _SMALLER:
        smaller = replace(request, rows=max(request.rows // part, 1))
        try:
            return max(errors(tools.make_case(smaller, tools.machine.device, 1), config))
        except torch.OutOfMemoryError:
            continue
    raise TuneRequestError(f"its results cannot be verified in the memory of {tools.machine.name}")


def _entry(
    request: Request, config: Config, tools: Tools, outcome: tuple[Compiled, tuple[float, float, float], float, int]
) -> Entry:
    machine, (needs, (time_s, default_s, reference_s), error, tried) = tools.machine, outcome
    return Entry(
        dtypes=request.dtypes,
        shape=request.width,
        rows=request.rows,
        flags=request.flags,
        device=machine.name,
        units=machine.units,
        triton=machine.minor,
        source_hash=source_hash(request.kernel),
        status="measured",
        config=Settings.of(config),
        resources={
            machine.minor: Resources(
                shared_bytes=needs.shared_bytes, registers=needs.registers, spilled_bytes=needs.spilled_bytes
            )
        },
        measured=Measured(
            time_s=time_s,
            default_s=default_s,
            reference_s=reference_s,
            reference=KERNELS[request.kernel].reference,
            error=error,
            repeats=REPEATS,
            tried=tried,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            driver=machine.driver,
            torch=torch.__version__,
            triton=machine.triton,
        ),
    )
