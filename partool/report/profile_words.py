"""Words and tables on the profile of a step, beside the terms of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.types import Plan
from partool.report.step_profile import StepProfile
from partool.report.units import seconds

EXCHANGE_TERMS = ("gradient_sync", "parameter_gather", "tensor_parallel", "sequence_parallel", "expert_parallel")
"""Terms of the plan's time that are exposed communication."""
_NAME = 60
"""Longest name of a kernel that a table shows."""


def sentences(profile: StepProfile, plan: Plan) -> list[str]:
    """Return what a profile says, each beside what the plan predicted."""
    time = plan.prediction.time
    count = len(profile.steps)
    which = f"step {profile.steps[0]}" if count == 1 else f"steps {profile.steps[0]} to {profile.steps[-1]}"
    each = "" if count == 1 else " each"
    lines = [f"{which}: {seconds(profile.step_s)}{each} under the profiler, {seconds(time.step_time_s)} in the plan."]
    idle = f"{profile.idle_s / profile.step_s:.0%} of the step" if profile.step_s else "–"
    where = "The GPU waited for the host" if profile.device == "gpu" else "Python ran between operators"
    launch_s = time.breakdown_s.get("launch", 0.0) + time.terms_s.get("overhead", 0.0) + time.terms_s.get("data", 0.0)
    verdict = "host-bound: larger micro-batches, compiled layers or captured graphs shorten it"
    lines.append(
        f"{where} in {idle} ({seconds(profile.idle_s)}; plan: {seconds(launch_s)} of launch, data and overhead)"
        + (f"; the step is {verdict}." if profile.host_bound else ".")
    )
    predicted_s = sum(time.terms_s.get(term, 0.0) for term in EXCHANGE_TERMS)
    exposed_s = sum(profile.exposed_s.values())
    parts = ", ".join(f"{name} {seconds(value)}" for name, value in profile.exposed_s.items() if value > 0)
    lines.append(
        f"Exposed communication: {seconds(exposed_s)}{f' ({parts})' if parts else ''}; plan: {seconds(predicted_s)}."
    )
    return lines


def render_profile(profile: StepProfile, plan: Plan, title: str, console: Console) -> None:
    """Print a profile: its sentences, and the kernels that took most time."""
    console.print(Text(title, "bold"))
    for line in sentences(profile, plan):
        console.print(Text(line))
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel" if profile.device == "gpu" else "operator, without those inside it", header_style="dim")
    for name in ("time a step", "share", "calls"):
        table.add_column(name, justify="right", no_wrap=True, header_style="dim")
    for kernel in profile.kernels:
        share = f"{kernel.seconds / profile.step_s:.1%}" if profile.step_s else "–"
        name = kernel.name if len(kernel.name) <= _NAME else f"{kernel.name[: _NAME - 1]}…"
        table.add_row(Text(name), seconds(kernel.seconds), share, str(kernel.calls))
    console.print(table)


def profile_data(profile: StepProfile, plan: Plan) -> Mapping[str, Any]:
    """Return a profile as data; times are in seconds of one step."""
    time = plan.prediction.time
    return {
        "steps": list(profile.steps),
        "device": profile.device,
        "step_s": profile.step_s,
        "compute_s": profile.compute_s,
        "exposed_s": dict(profile.exposed_s),
        "idle_s": profile.idle_s,
        "host_bound": profile.host_bound,
        "kernels": [{"name": one.name, "seconds": one.seconds, "calls": one.calls} for one in profile.kernels],
        "predicted": {
            "step_s": time.step_time_s,
            "exposed_s": sum(time.terms_s.get(term, 0.0) for term in EXCHANGE_TERMS),
        },
    }
