"""Errors of a plan's step time and peak memory, and the runs that they rest on."""

from __future__ import annotations

from dataclasses import replace

from partool.catalog.profile import Applied
from partool.catalog.profile_file import Scalar
from partool.catalog.published import FEW_RUNS, PublishedMfu, published_mfu
from partool.cost.evidence import (
    MEMORY_FLOOR,
    DeviceClass,
    Evidence,
    FirstRun,
    first_run,
    memory_error,
    own_runs,
    step_error,
)
from partool.cost.training.predict import CPU_ERROR
from partool.plan.types import Prediction
from partool.planner.search.price import Priced

_ON_CPU = "runs of partool on two machines with two cores"


def time_evidence(best: Priced, measured: Applied) -> Evidence:
    """Return the relative errors of the predicted step time, and the runs that they rest on.

    Above the best published MFU of the device, the step may be longer by as much as the price is above it.
    """
    evidence = _time(best)
    if measured.time is not None:
        error, below = (measured.time_error(prior) for prior in (evidence.error, evidence.below))
        return Evidence(error, _finished(measured.time), below=below)
    if best.problem.devices.backend == "cpu":
        return evidence
    published = above_published(best)
    if published is not None and best.time.mfu:
        evidence = replace(evidence, error=(1.0 + evidence.error) * best.time.mfu / published.mfu - 1.0)
    accelerator = best.problem.devices.accelerator
    return replace(evidence, words=f"{evidence.words}; {own_runs(accelerator) or 'none'} of partool on {accelerator}")


def memory_evidence(best: Priced, measured: Applied) -> Evidence:
    """Return by which share of the predicted peak five in six runs exceed it at most, and the runs behind that."""
    error = best.memory.sigma_bytes / max(best.memory.total_bytes, 1)
    if measured.memory is not None:
        return Evidence(error, _finished(measured.memory))
    if best.problem.devices.backend == "cpu":
        return Evidence(error, _ON_CPU)
    evidence = memory_error(best.layout, best.job.stack.family, device=_device(best))
    # Few runs of partool on such devices are known, as in partool.cost.training.peak.
    return evidence if evidence.error >= MEMORY_FLOOR else Evidence(MEMORY_FLOOR, f"a stated floor; {evidence.words}")


def first_run_of(best: Priced, measured: Applied) -> FirstRun:
    """Return by how much most first runs exceed the predicted step time, and where that is known from.

    Runs that finished on the machine are no first runs, and nothing is known of first runs on CPUs.
    """
    if measured.time is not None or best.problem.devices.backend == "cpu":
        return FirstRun(0.0, "")
    return first_run(best.job.stack.family)


def above_published(best: Priced) -> PublishedMfu | None:
    """Return the best published run on the device if the layout's price is above its MFU; else None.

    Where few runs on a device are published, their best doubts no price.
    """
    published, mfu = published_mfu(best.problem.devices.accelerator, best.job.precision), best.time.mfu
    if published is None or published.few or mfu is None or not best.problem.job.backward:
        return None
    return published if mfu > published.mfu else None


def sentences(best: Priced, prediction: Prediction) -> tuple[str, ...]:
    """Return the reasons of a plan that say how sure its predictions are."""
    texts = [f"Evidence: {_bars(prediction)}; {prediction.evidence}."]
    if prediction.first_run_slowdown:
        texts.append(f"First runs take {prediction.first_run_slowdown:.0%} longer: {prediction.first_run_evidence}.")
    if mfu := _mfu(best):
        texts.append(mfu)
    texts.append(
        f"Memory: five in six runs need at most {prediction.memory_error:.0%} more; {prediction.memory_evidence}."
    )
    return tuple(texts)


def _bars(prediction: Prediction) -> str:
    below = prediction.relative_error_below or 0.0
    return f"five in six runs take at most {prediction.relative_error:.0%} longer, and at most {below:.0%} less"


def _mfu(best: Priced) -> str:
    """Return a sentence on the plan's MFU beside the best published one; empty where one of them is not known."""
    devices, mfu = best.problem.devices, best.time.mfu
    published = published_mfu(devices.accelerator, best.job.precision)
    if published is None or mfu is None or not best.problem.job.backward:
        return ""
    runs = f"{published.runs:,} run{'s' * (published.runs != 1)} in {best.job.precision}"
    runs += f", fewer than the {FEW_RUNS} that would doubt a price" if published.few else ""
    of = f"{published.mfu:.1%} ({published.model}, {published.source}; the best of {runs})"
    if above_published(best) is None:
        return f"MFU: {mfu:.1%}; the best published on {devices.accelerator} that partool knows is {of}."
    place = f"the best published on {devices.accelerator} that partool knows"
    return f"MFU: {mfu:.1%} is above {place}, {of}; the upper error of the step time includes the difference."


def _time(best: Priced) -> Evidence:
    if best.problem.devices.backend == "cpu":
        return Evidence(CPU_ERROR, _ON_CPU, below=CPU_ERROR)
    return step_error(best.layout, best.job.stack.family, device=_device(best))


def _device(best: Priced) -> DeviceClass:
    return DeviceClass(best.problem.devices.accelerator, best.problem.devices.architecture)


def _finished(scalar: Scalar) -> str:
    return f"{scalar.n} finished run{'s' * (scalar.n != 1)} of partool on this machine"
