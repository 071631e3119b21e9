"""Kernels with inputs, to be checked and timed: what tests, the tuner and benchmarks share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from partool_kernels.checks import excess
from partool_kernels.registry import KERNELS, Config, Request

if TYPE_CHECKING:
    import torch


class Case(NamedTuple):
    """One call of a kernel on random inputs of a device."""

    run: Callable[[Config], Sequence[torch.Tensor]]
    """Launch the kernel itself with a configuration; return what it wrote. May be called many times."""
    eager: Callable[[], Sequence[torch.Tensor]]
    """The same by torch's own operators in the same types, the reference of times and errors."""
    exact: Callable[[], Sequence[torch.Tensor]]
    """The same in float64 (or exact integers)."""
    factors: tuple[float, ...]
    """Most error of each result, as a multiple of that of ``eager`` (see ``checks``); 0: the bits are equal."""


def case(request: Request, device: torch.device, seed: int = 0) -> Case:
    """Return a request's kernel with inputs on a device; each family makes its own in its ``cases.py``."""
    family = KERNELS[request.kernel].source.split("/", maxsplit=1)[0]
    made: Case = importlib.import_module(f"partool_kernels.{family}.cases").case(request, device, seed)
    return made


def errors(made: Case, config: Config) -> list[float]:
    """Run a case once; return how far every result is from the truth, over how far it may be: above 1 it is wrong.

    Where bits have to be equal it is 0 or infinite.
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
