"""Operators on awkward inputs: misaligned, with gaps, transposed, empty, and with NaN or infinity.

Results and gradients are compared with those of torch's operators on a copy of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from _kernels_run import Run
from torch.nn import functional as F

from partool_kernels.cases import BACKWARD, FORWARD, excess
from partool_kernels.cross_entropy.op import cross_entropy
from partool_kernels.glu.op import glu
from partool_kernels.linear_cross_entropy.op import linear_cross_entropy
from partool_kernels.norm.op import Norm, add_norm, norm
from partool_kernels.norm.op import reference as plain_norm
from partool_kernels.rope.op import reference as plain_rope
from partool_kernels.rope.op import rope

ROWS, COLUMNS = 37, 130
Computed = Callable[[torch.Tensor], torch.Tensor]


class Pair(NamedTuple):
    """One computation of a matrix ``[ROWS, COLUMNS]`` by partool and by torch."""

    ours: Computed
    plain: Computed
    """Torch's computation in the type of its input, which may be float64."""


def _pairs(run: Run) -> dict[str, Pair]:
    generator = torch.Generator(run.device).manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=run.device, generator=generator)

    other, weight, bias = random(ROWS, COLUMNS), random(COLUMNS), random(COLUMNS)
    vocabulary, labels = random(91, COLUMNS), torch.arange(ROWS, device=run.device)
    labels[::5] = -100
    angles = random(ROWS, 5).repeat(1, 2)

    def how(kind: str, x: torch.Tensor) -> Norm:
        return Norm(kind, 1e-6, weight.to(x.dtype), bias.to(x.dtype) if kind == "layer" else None)

    def tables(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = angles.double() if x.dtype == torch.float64 else angles
        return wide.cos(), wide.sin()

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float64 else x.float()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(wide(x), labels, reduction="sum")

    return {
        "glu": Pair(lambda x: glu(x, other.to(x.dtype), "silu"), lambda x: F.silu(x) * other.to(x.dtype)),
        "rms norm": Pair(lambda x: norm(x, how("rms", x)), lambda x: plain_norm(x, how("rms", x))),
        "layer norm": Pair(lambda x: norm(x, how("layer", x)), lambda x: plain_norm(x, how("layer", x))),
        "sum and norm": Pair(
            lambda x: sum(add_norm(x, other.to(x.dtype), how("rms", x)), torch.zeros_like(x)),
            lambda x: (x + other.to(x.dtype)) + plain_norm(x + other.to(x.dtype), how("rms", x)),
        ),
        "rotation": Pair(
            lambda x: rope(x.unflatten(-1, (13, 10))[None], tables(x)).transpose(1, 2),
            lambda x: plain_rope(x.unflatten(-1, (13, 10))[None], tables(x), None, 0.0),
        ),
        "cross entropy": Pair(lambda x: cross_entropy(x, labels), loss),
        "loss": Pair(
            lambda x: linear_cross_entropy(x, vocabulary.to(x.dtype), labels, rows=16),
            lambda x: loss(x @ vocabulary.to(x.dtype).T),
        ),
    }


def _inputs(run: Run, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return matrices of the same numbers, laid out differently, and two that hold NaN or infinity."""
    x = torch.randn(ROWS, COLUMNS, device=run.device, generator=torch.Generator(run.device).manual_seed(0)).to(dtype)
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device=run.device)[1:].view(x.shape).copy_(x)
    gaps = torch.empty(2 * ROWS, COLUMNS + 3, dtype=dtype, device=run.device)[::2, 3:].copy_(x)
    turned = torch.empty(COLUMNS, ROWS, dtype=dtype, device=run.device).T.copy_(x)
    nan, infinite = x.clone(), x.clone()
    nan[3, 7], infinite[4, 8] = float("nan"), float("inf")
    return {"in one piece": x, "out of line": shifted, "rows apart": gaps, "columns apart": turned,
            "NaN": nan, "infinite": infinite}  # fmt: skip


def edges(run: Run) -> dict[str, Any]:
    """Return the ratio of every operator's largest error to the allowed one, and the operators with a ratio above 1."""
    found: dict[str, float] = {}
    wrong = []
    for name, pair in _pairs(run).items():
        for dtype in (torch.float16,) if run.dry else (torch.bfloat16, torch.float16, torch.float32):
            for layout, x in _inputs(run, dtype).items():
                errors = _errors(pair, x)
                found[name] = max(found.get(name, 0.0), *errors)
                if not max(errors) <= 1:
                    wrong.append(f"{name}, {layout}, {dtype}: {errors} of the errors allowed")
        empty = torch.empty(0, COLUMNS, device=run.device)
        if name in {"rms norm", "layer norm"} and pair.ours(empty).shape != empty.shape:
            wrong.append(f"{name}: no rows")
    return {"largest_error_over_allowed": found, "wrong": wrong}


def _errors(pair: Pair, x: torch.Tensor) -> Sequence[float]:
    ours, plain, exact = _both(pair.ours, x), _both(pair.plain, x), _both(pair.plain, x.double())
    return [
        excess(*each, factor)
        for each, factor in zip(zip(ours, plain, exact, strict=True), (FORWARD, BACKWARD), strict=True)
    ]


def _both(call: Computed, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    out = call(x)
    slopes = torch.linspace(-1, 1, out.numel(), device=x.device, dtype=torch.float64).view(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, x, slopes if out.dim() else torch.ones_like(out))[0]
