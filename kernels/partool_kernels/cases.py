"""Calls of kernels on random inputs, which tests, the tuner and benchmarks check and time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from partool_kernels.registry import KERNELS, Config, Request

if TYPE_CHECKING:
    import torch

FORWARD, BACKWARD = 1.5, 2.0
"""Largest allowed errors of results (first) and of gradients (second), as multiples of the error of torch."""
ULPS = 2.0
"""Additional allowed error, in units in the last place (ULP) of the largest element."""


def excess(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, factor: float = FORWARD) -> float:
    """Return the kernel's largest error divided by the largest allowed error; above 1 the kernel's result is wrong.

    ``exact`` is float64, computed from the inputs of ``ours``; ``ours`` and ``eager`` have the same type. The returned
    value is infinite if an element is finite in only one of ``ours`` and ``exact``, after ``exact`` is converted to the
    type of ``ours``.
    """
    import torch

    if exact.numel() == 0:
        return 0.0
    if not torch.equal(ours.isfinite(), exact.to(ours.dtype).isfinite()):
        return float("inf")
    finite = exact.to(ours.dtype).isfinite()
    mine, theirs, exact = (x.detach().double()[finite] for x in (ours, eager, exact))
    if exact.numel() == 0:
        return 0.0
    unit = torch.finfo(ours.dtype).eps * exact.abs().max()
    # An overflow of torch's operators counts as no error: otherwise a single such element would let anything pass.
    allowed = factor * (theirs - exact).abs().nan_to_num(nan=0.0, posinf=0.0).max() + ULPS * unit
    return float((mine - exact).abs().max() / allowed.clamp_min(torch.finfo(torch.float64).tiny))


if TYPE_CHECKING:
    import torch


class Case(NamedTuple):
    """A call of a kernel on random inputs on a device."""

    run: Callable[[Config], Sequence[torch.Tensor]]
    """Launch the kernel itself with a configuration and return its output tensors. May be called many times."""
    eager: Callable[[], Sequence[torch.Tensor]]
    """Compute the kernel's results by torch's operators in the kernel's types, as reference for times and errors."""
    exact: Callable[[], Sequence[torch.Tensor]]
    """Compute the kernel's results in float64 (or in exact integers)."""
    factors: tuple[float, ...]
    """Largest allowed error of each result, as a multiple of ``eager``'s error (see :func:`excess`); 0 requires equal
    bits."""


def case(request: Request, device: torch.device, seed: int = 0) -> Case:
    """Return a call of the requested kernel on a device; the ``cases.py`` of the kernel's family makes the inputs."""
    family = KERNELS[request.kernel].source.split("/", maxsplit=1)[0]
    return cast(Case, importlib.import_module(f"partool_kernels.{family}.cases").case(request, device, seed))


def errors(made: Case, config: Config) -> list[float]:
    """Run a case once; return each result's error divided by the allowed error (above 1: a wrong result).

    For a result whose bits must equal the reference's bits, the returned value is 0 or infinite.
    """
    return [
        excess(ours, eager, exact, factor) if factor else 0.0 if _same_bits(ours, eager) else float("inf")
        for ours, eager, exact, factor in zip(made.run(config), made.eager(), made.exact(), made.factors, strict=True)
    ]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))
