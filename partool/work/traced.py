"""Bytes that the runtime's blocks save, as traced by ``python -m partool_runtime.trace`` and shipped as data.

A spec gives the same plan with and without torch: plans read the shipped data, and only ``plan --trace`` runs the
tracer, as a separate process, for the user's model.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from partool.layout.traced import COEFFICIENTS, WIDTHS, family
from partool.process import python_command
from partool.spec.model import ModelConfig
from partool.spec.parallel import Compile
from partool.spec.training import Fused, Precision

DATA = Path(__file__).with_name("traced.json")
TIMEOUT_S = 300


class TraceError(Exception):
    """Raised if the tracer could not run; the error has the tracer's message."""


@dataclass(frozen=True)
class Trace:
    """Traced coefficients of each family of models (:mod:`partool.layout.traced`), and their origin."""

    torch: str
    """Version of torch that was traced."""
    date: str
    families: dict[str, tuple[int, ...]] = field(compare=False)
    sha256: str
    """Hash of the data, for the plan's list of inputs. Traces with equal hashes are equal."""


@dataclass(frozen=True)
class Coefficients:
    """Bytes that one layer saves."""

    token: dict[str, float]
    """Bytes per token, by name of a width (:data:`partool.layout.traced.WIDTHS`)."""
    layer: float
    """Bytes per micro-batch."""


@lru_cache(maxsize=1)
def shipped() -> Trace:
    """Return the data shipped with partool."""
    return parse(DATA.read_text("utf-8"))


def parse(text: str) -> Trace:
    """Parse the tracer's output; raises ``ValueError`` if the output has another version."""
    data = json.loads(text)
    if data["coefficients"] != list(COEFFICIENTS):
        raise ValueError(f"the trace has coefficients {data['coefficients']}, not {list(COEFFICIENTS)}")
    families = {key: tuple(values) for key, values in data["families"].items()}
    return Trace(data["torch"], data["date"], families, hashlib.sha256(text.encode()).hexdigest())


def refresh(
    model: ModelConfig,
    precision: Precision,
    compiles: tuple[Compile, ...] = ("none", "block"),
    fused: Mapping[Compile, tuple[Fused, ...]] = MappingProxyType({}),
) -> Trace:
    """Trace one model with the installed torch, at its widths, and return the result merged over the shipped data.

    ``fused`` names the parts that partool's kernels compute, for compiled and for uncompiled blocks.

    Raises :class:`TraceError` if the runtime is not installed, cannot build the model, or takes too long.
    """
    # fp8 casts as it multiplies; saved tensors are bf16.
    saved = "bf16" if precision == "fp8" else precision
    wanted = json.dumps(
        {"model": model.model_dump(mode="json"), "precision": saved, "compile": compiles, "fused": dict(fused)}
    )
    command = python_command("partool_runtime.trace", "-")
    try:
        process = subprocess.run(command, input=wanted, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TraceError(f"the runtime could not trace the model: {error}") from error
    if process.returncode:
        raise TraceError(f"the runtime could not trace the model: {_last_message(process.stderr)}")
    try:
        trace = parse(process.stdout)
    except (ValueError, KeyError) as error:
        raise TraceError(f"the runtime's trace cannot be read: {error}") from error
    return Trace(trace.torch, trace.date, shipped().families | trace.families, trace.sha256)


def _last_message(stderr: str) -> str:
    """Return the last unindented line and the lines below it: the end of a traceback."""
    lines = stderr.rstrip().splitlines()
    starts = [index for index, line in enumerate(lines) if line[:1].strip()]
    return " ".join(line.strip() for line in lines[starts[-1] :]) if starts else "the tracer failed"


class TracedKind(NamedTuple):
    """Choices that decide which tensors a layer keeps, besides the model and its precision."""

    compiled: int
    policy: str
    fused: tuple[Fused, ...] = ()


@lru_cache(maxsize=256)
def coefficients(trace: Trace, model: ModelConfig, precision: Precision, kind: TracedKind) -> Coefficients | None:
    """Return the bytes that a dense layer saves; None if the runtime cannot build models of this kind.

    An untraced combination of fused parts gets the coefficients without fusion, which are not smaller.
    """
    choice: Compile = "block" if kind.compiled else "none"
    names = (family(model, precision, choice, kind.policy, fused) for fused in (kind.fused, ()))  # type: ignore[arg-type]
    numbers = next((trace.families[name] for name in names if name in trace.families), None)
    if numbers is None:
        return None
    values = dict(zip(COEFFICIENTS, numbers, strict=True))
    # fp64 saves what fp32 saves, at twice the size.
    scale = 2.0 if precision == "fp64" else 1.0
    return Coefficients({name: values[name] * scale for name in WIDTHS}, values["layer"])
