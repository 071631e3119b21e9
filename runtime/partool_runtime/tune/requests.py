"""Requests as JSON, in which the planner, which does not use torch, sends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from partool_kernels.registry import ARCHITECTURES, KERNELS, Request
from partool_kernels.registry.tables import bucket
from partool_runtime.tune.machine import TuningMachine


class RequestError(ValueError):
    """Error for a request that no kernel serves."""


def as_json(request: Request) -> dict[str, object]:
    """Return a request as JSON fields."""
    return {
        "kernel": request.kernel, "architecture": request.architecture, "dtypes": list(request.dtypes),
        "shape": request.width, "rows": request.rows, "flags": list(request.flags),
    }  # fmt: skip


def from_json(sent: Any) -> Request:
    """Return a request from JSON fields; raises :class:`RequestError`."""
    try:
        request = Request(
            str(sent["kernel"]),
            str(sent.get("architecture", "")),
            tuple(map(str, sent["dtypes"])),
            tuple((str(name), int(size)) for name, size in sent["shape"].items()),
            int(sent["rows"]),
            tuple(map(str, sent.get("flags", ()))),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"a request holds kernel, dtypes, shape and rows: {error!r}") from None
    if request.kernel not in KERNELS:
        raise RequestError(f"there is no kernel {request.kernel!r}; there are {', '.join(sorted(KERNELS))}")
    if request.architecture not in {*ARCHITECTURES, ""}:
        raise RequestError(f"there is no architecture {request.architecture!r}")
    if tuple(request.width) != KERNELS[request.kernel].widths or min(request.width.values(), default=1) < 1:
        raise RequestError(f"the shape of {request.kernel} has {', '.join(KERNELS[request.kernel].widths)}")
    if request.rows < 1:
        raise RequestError(f"{request.rows} rows")
    return request


def examples(kernels: Sequence[str], architecture: str) -> Iterator[Request]:
    """Yield the typical requests of the named kernels, or of all kernels."""
    for name in kernels or KERNELS:
        yield from KERNELS[name].examples(architecture)


def placed(requests: Iterable[Request], machine: TuningMachine) -> list[Request]:
    """Return the requests for a machine without duplicates; rows are raised to the largest number in their bucket.

    Raises :class:`RequestError` for a request of another architecture.
    """
    unique: dict[Request, None] = {}
    for request in requests:
        if request.architecture not in ("", machine.architecture):
            here = f"{machine.name} is {machine.architecture}"
            raise RequestError(f"{request.kernel} is asked for {request.architecture}, but {here}")
        here_too = replace(
            request,
            architecture=machine.architecture,
            rows=bucket(request.rows),
            device=machine.name,
            units=machine.units,
            triton=machine.minor,
        )
        unique[here_too] = None
    return list(unique)
