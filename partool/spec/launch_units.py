"""Quantities and times as Slurm and Kubernetes write them."""

from __future__ import annotations

import re

from partool.spec.launch import LaunchSpec

LEAD_BEYOND_SHUTDOWN_S = 90
"""Default of ``signal_lead_s`` beyond the shutdown timeout: Slurm may signal up to 60 s early (sbatch(1))."""
_SUFFIXES = {
    "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


def quantity(text: str) -> float:
    """Return a Kubernetes quantity as a number (``1500m`` → 1.5, ``2Gi`` → 2147483648); raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text)
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _SUFFIXES[match[2]]


def time_s(text: str) -> int:
    """Return a time limit in seconds; the forms are those of sbatch(1): M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def lead_s(launch: LaunchSpec) -> int:
    """Return how long before its time limit a Slurm job is signalled, in seconds."""
    lead = launch.slurm.signal_lead_s
    return launch.shutdown_timeout_s + LEAD_BEYOND_SHUTDOWN_S if lead is None else lead
