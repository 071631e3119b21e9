"""Puts the figures that ``partool calibrate`` measured into :class:`Devices`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from partool.catalog.bandwidth import STREAM_SHARE
from partool.catalog.lookup import table
from partool.catalog.machine import processor, this_machine
from partool.catalog.profile_file import (
    PROFILE_FILE,
    MachineId,
    MeasuredFigures,
    Profile,
    ProfileError,
    Scalar,
    StackScalars,
    home,
    load_profile,
)
from partool.catalog.profile_rows import measured_rows
from partool.catalog.silicon.collectives import OPERATIONS, collectives, measured_device, seconds_by_rank
from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import Devices, HardwareSpec

SMALLEST_ERROR = 0.02
"""Lower limit of a prediction's relative error; more finished runs do not lower it further."""
_PATH = ("hardware", "profile")
# Shares of a machine's line rates that the cost model assumes. The profile holds rates that were reached, so the
# shares are divided out here; tests/unit/catalog/test_profile.py compares them with partool.cost.
_LINK_SHARE = {"cpu": 1.0, "cuda": 0.78, "rocm": 0.70}
_REDUCE_SLOWDOWN = {"cpu": 1.7, "cuda": 1.0, "rocm": 1.0}
_HOP = 0.4
_HOST_LINK_SHARE = 0.8
_ADAM_BYTES, _ADAM_SHARE = 28.0, 0.5


@dataclass(frozen=True)
class Applied:
    """Machines with a profile's measured figures, and what else the profile says about predictions."""

    devices: Devices
    time_scalar: float = 1.0
    memory_scalar: float = 1.0
    time: Scalar | None = None
    memory: Scalar | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    """Input's name → SHA-256, for ``Plan.inputs``; empty without a profile."""
    reason: str = ""
    """Sentence for ``Plan.reasons`` about the use of the profile; empty without a profile."""
    findings: tuple[Diagnostic, ...] = ()

    def time_error(self, prior: float) -> float:
        """Return the expected relative error of predicted step times; without finished runs it is ``prior``."""
        return narrowed(prior, self.time)


def narrowed(prior: float, scalar: Scalar | None) -> float:
    """Return the expected relative error of predictions, from the spread of finished runs and ``prior``.

    ``prior`` counts as the error of one more run. The result is at least 2 %, or ``prior`` if ``scalar`` is None.
    """
    if scalar is None:
        return prior
    variance = (prior**2 + scalar.n * scalar.spread**2) / (scalar.n + 1)
    return max(SMALLEST_ERROR, float(variance**0.5))


def apply_profile(
    spec: HardwareSpec, devices: Devices, precision: str, *, base_dir: Path, stack: str = "partool"
) -> Applied:
    """Put the figures of the profile that the spec names, or of this machine's profile, into ``devices``.

    Figures that the spec gives stay. A profile that cannot be used is an error if the spec names it, else a warning;
    this machine's profile is silently ignored if it is for another accelerator.
    """
    named = spec.profile is not None
    path = base_dir / spec.profile if spec.profile is not None else home() / PROFILE_FILE
    if not named and not path.exists():
        return Applied(devices)
    severity: Literal["error", "warning"] = "error" if named else "warning"
    try:
        profile = load_profile(path)
    except ProfileError as error:
        return Applied(devices, findings=(Diagnostic(error.code, error.message, severity, _PATH, help=_HELP),))
    machine = profile.machine
    if (machine.accelerator != devices.accelerator or devices.slice) and not named:
        return Applied(devices)
    if difference := _difference(machine, devices, local=spec.accelerator in ("auto", "cpu") and spec.nodes == 1):
        text = f"the calibration {path} is of another machine: {difference}"
        return Applied(devices, findings=(Diagnostic("PT282", text, severity, _PATH, help=_HELP),))
    findings = []
    if profile.figures.achievable_flops and precision not in profile.figures.achievable_flops:
        measured = ", ".join(profile.figures.achievable_flops)
        text = f"the calibration {path} holds no {precision} products, only {measured}: the catalog's rate is used"
        findings.append(Diagnostic("PT283", text, "warning", _PATH, help=_HELP))
    scalars = profile.scalar(stack)
    hashes = {"calibration": profile.figures_hash, "calibration/scalars": profile.scalars_hash}
    return Applied(
        _with_figures(profile, spec, devices, precision),
        time_scalar=scalars.time.value if scalars.time else 1.0,
        memory_scalar=scalars.memory.value if scalars.memory else 1.0,
        time=scalars.time,
        memory=scalars.memory,
        inputs={name: text for name, text in hashes.items() if text},
        reason=_reason(profile, scalars),
        findings=tuple(findings),
    )


_GIVEN = {
    "achievable_flops": ("achievable_tflops", "peak_tflops"),
    "product_element_s": ("achievable_tflops", "peak_tflops"),
    "wide_flops": ("wide_tflops", "peak_tflops"),
    "attention_flops": ("attention_tflops", "peak_tflops"),
    "attention_by_length": ("attention_tflops", "peak_tflops"),
    "memory_bytes_per_s": ("memory_gb_per_s",),
    "operator_s": ("operator_us",),
    "link_bytes_per_s": ("link_gb_per_s",),
    "pair_bytes_per_s": ("pair_gb_per_s", "link_gb_per_s"),
    "link_latency_s": ("link_latency_us",),
    "host_link_bytes_per_s": ("host_link_gb_per_s",),
    "host_memory_bytes_per_s": ("host_memory_gb_per_s",),
    "storage_bytes_per_s": ("storage_gb_per_s",),
}
"""Measured field of :class:`Devices` → fields of the spec's ``hardware``, any of which overrides the measurement."""
_HELP = "partool calibrate measures this machine anew"


def _difference(machine: MachineId, devices: Devices, *, local: bool) -> str:
    """Return text that says how the measured machine differs from the planned machine; empty if it does not."""
    if machine.accelerator != devices.accelerator:
        return f"it is for {machine.accelerator}, the plan for {devices.accelerator}"
    if devices.slice:
        return f"it is for a whole {machine.accelerator}, the plan for its slice {devices.slice}"
    if not local or machine.accelerator != "cpu":
        return ""
    here = this_machine()
    if (machine.processor, machine.cores) != (processor(), here.cores):
        return (
            f"{machine.cores} cores of {machine.processor or 'an unknown processor'}, "
            f"here are {here.cores} of {processor() or 'an unknown one'}"
        )
    return ""


def _reason(profile: Profile, scalars: StackScalars) -> str:
    parts = []
    if profile.figures != MeasuredFigures():
        parts.append(
            f"the machine's figures were measured on {profile.created[:10]} (partool calibrate)"
            + ("" if profile.complete else ", not all of them")
        )
    for name, scalar in (("step times", scalars.time), ("memory", scalars.memory)):
        if scalar is not None:
            runs = "run" if scalar.n == 1 else "runs"
            parts.append(f"{name} are scaled by {scalar.value:.3f} (median of {scalar.n} {runs})")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else ""


def _with_figures(profile: Profile, spec: HardwareSpec, devices: Devices, precision: str) -> Devices:
    figures, ranks = profile.figures, profile.machine.ranks
    # The ranks of a CPU share its cores and its memory.
    share = ranks / devices.per_node if devices.backend == "cpu" else 1.0
    measured: dict[str, Any] = {}
    if precision in figures.achievable_flops:
        measured["achievable_flops"] = share * figures.achievable_flops[precision].value
    wide = "bf16" if precision == "fp8" else precision
    if precision in figures.products and devices.backend == "cpu":
        line = figures.products[precision]
        measured["achievable_flops"] = share * line.flops_per_s.value
        measured["product_element_s"] = line.element_s.value / share
    if precision == "fp8" and wide in figures.achievable_flops:
        measured["wide_flops"] = share * figures.achievable_flops[wide].value
    if wide in figures.attention_flops:
        measured["attention_flops"] = share * figures.attention_flops[wide].value
    if wide in figures.attention_by_length and devices.backend == "cpu":
        rates = sorted(figures.attention_by_length[wide].items())
        measured["attention_by_length"] = tuple((length, share * rate.value) for length, rate in rates)
    if figures.stream_bytes_per_s:
        measured["memory_bytes_per_s"] = share * figures.stream_bytes_per_s.value / STREAM_SHARE[devices.backend]
    if figures.fresh_bytes_per_s:
        measured["fresh_bytes_per_s"] = share * figures.fresh_bytes_per_s.value
    if figures.operator_s:
        measured["operator_s"] = figures.operator_s.value
    measured |= _link(figures, devices, ranks)
    if figures.host_link_bytes_per_s and devices.host_link_bytes_per_s:
        measured["host_link_bytes_per_s"] = figures.host_link_bytes_per_s.value / _HOST_LINK_SHARE
    if figures.adam_parameters_per_s:
        measured["host_memory_bytes_per_s"] = ranks * figures.adam_parameters_per_s.value * _ADAM_BYTES / _ADAM_SHARE
    if figures.storage_bytes_per_s:
        measured["storage_bytes_per_s"] = _storage(figures.storage_bytes_per_s.value, devices)
    given = {name for name, fields in _GIVEN.items() if any(getattr(spec, field) is not None for field in fields)}
    if not devices.slice and (rows := measured_rows(profile, devices, precision, given)) is not None:
        measured["measured_rows"] = rows
    return devices.model_copy(update={name: value for name, value in measured.items() if name not in given})


def _storage(bytes_per_s: float, devices: Devices) -> float:
    """Return the bytes per second that each node writes while all nodes write, given the measured rate of one alone."""
    return bytes_per_s if devices.nodes == 1 else min(bytes_per_s, devices.storage_bytes_per_s)


def _link(figures: MeasuredFigures, devices: Devices, ranks: int) -> dict[str, float]:
    """Return bytes per second and start time of the link within a node, by field of :class:`Devices`.

    Both are medians over the measured collectives; the result is empty if none was measured.
    """
    table_of = "" if devices.slice else measured_device(devices.accelerator, devices.measured_as)
    if table_of and figures.collectives:
        return _paired(_scaled_link(figures, table_of, ranks), devices, ranks)
    slow = _REDUCE_SLOWDOWN[devices.backend]
    moves_of = {"all_gather": (1.0, 1.0), "reduce_scatter": (1.0, slow), "all_reduce": (2.0, 1.0 + slow)}
    lines = [(starts, moves, figures.collectives[name]) for name, (starts, moves) in moves_of.items()
             if name in figures.collectives]  # fmt: skip
    if not lines:
        return {}
    rate = statistics.median(line.bytes_per_s.value * moves for _, moves, line in lines) / _LINK_SHARE[devices.backend]
    latency = statistics.median(line.latency_s.value / starts for starts, _, line in lines)
    return _paired({"link_bytes_per_s": rate, "link_latency_s": latency / (1.0 + _HOP * (ranks - 1))}, devices, ranks)


def _paired(link: dict[str, float], devices: Devices, ranks: int) -> dict[str, float]:
    """Return ``link`` with the rate of a pair of ranks, where devices are linked pairwise.

    The measured rate is that of a ring over ``ranks`` devices, which uses only the links between them. The rates of a
    pair and of all links together have the ratio that they have in ``devices``.
    """
    pair_bytes_per_s = devices.pair_bytes_per_s
    if devices.topology != "mesh" or pair_bytes_per_s is None or ranks < 2:
        return link
    ring_bytes_per_s = min(pair_bytes_per_s * (ranks - 1), devices.link_bytes_per_s)
    faster = link["link_bytes_per_s"] / ring_bytes_per_s
    return link | {
        "link_bytes_per_s": faster * devices.link_bytes_per_s, "pair_bytes_per_s": faster * pair_bytes_per_s
    }  # fmt: skip


def _scaled_link(figures: MeasuredFigures, device: str, ranks: int) -> dict[str, float]:
    """Return the rate of a ring and the start time with which the tables of ``device`` take the measured times.

    Both are medians over the operations. Prices scale a table's start times and what exceeds them by these figures over
    the catalog's.
    """
    rates, starts = [], []
    for operation in OPERATIONS:
        line, measured = figures.collectives.get(operation), collectives(device, operation)
        if line is not None and measured is not None:
            seconds = seconds_by_rank(measured, ranks)[ranks - 2]
            moved = measured.axes["bytes"][-1] * (ranks - 1) / ranks
            rates.append(line.bytes_per_s.value * float(seconds[-1] - seconds[0]) / moved)
            starts.append(line.latency_s.value / float(seconds[0]))
    entry = table("accelerators")[device]
    return {
        "link_bytes_per_s": entry["link_gb_per_s"] * 1e9 * statistics.median(rates),
        "link_latency_s": entry["link_latency_us"] * 1e-6 * statistics.median(starts),
    }
