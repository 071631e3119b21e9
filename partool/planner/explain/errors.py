"""Errors of a plan's step time and peak memory, and the runs that they rest on."""

from __future__ import annotations

from partool.catalog.profile import Applied
from partool.catalog.profile_file import Scalar
from partool.cost.evidence import FLOOR, MEMORY_FLOOR, DeviceClass, Evidence, memory_error, own_runs, step_error
from partool.cost.training.predict import CPU_ERROR
from partool.planner.search.price import Priced

_ON_CPU = "runs of partool on two machines with two cores"


def time_evidence(best: Priced, measured: Applied) -> Evidence:
    """Return the relative error of the predicted step time, and the runs that it rests on."""
    devices = best.problem.devices
    if measured.time is not None:
        return Evidence(measured.time_error(_time(best).error), _finished(measured.time))
    evidence = _time(best)
    return evidence if devices.backend == "cpu" else _with_own_runs(evidence, devices.accelerator)


def memory_evidence(best: Priced, measured: Applied) -> Evidence:
    """Return by which share of the predicted peak five in six runs exceed it at most, and the runs behind that."""
    error = best.memory.sigma_bytes / max(best.memory.total_bytes, 1)
    if measured.memory is not None:
        return Evidence(error, _finished(measured.memory))
    if best.problem.devices.backend == "cpu":
        return Evidence(error, _ON_CPU)
    evidence = memory_error(best.layout, best.job.stack.family, device=_device(best))
    # Few runs of partool on such devices are known, as in partool.cost.training.peak.
    return evidence if evidence.error > MEMORY_FLOOR else Evidence(MEMORY_FLOOR, f"a stated floor; {evidence.words}")


def _time(best: Priced) -> Evidence:
    if best.problem.devices.backend == "cpu":
        return Evidence(CPU_ERROR, _ON_CPU)
    evidence = step_error(best.layout, best.job.stack.family, device=_device(best))
    # Few runs of partool on such devices are known: what other code bases show is not less than the floor.
    return evidence if evidence.error > FLOOR else Evidence(FLOOR, f"a stated floor; {evidence.words}")


def _device(best: Priced) -> DeviceClass:
    return DeviceClass(best.problem.devices.accelerator, best.problem.devices.architecture)


def _with_own_runs(evidence: Evidence, accelerator: str) -> Evidence:
    return Evidence(evidence.error, f"{evidence.words}; {own_runs(accelerator) or 'none'} of partool on {accelerator}")


def _finished(scalar: Scalar) -> str:
    return f"{scalar.n} finished run{'s' * (scalar.n != 1)} of partool on this machine"
