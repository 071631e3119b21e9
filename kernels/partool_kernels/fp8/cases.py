"""Calls of the kernel that converts numbers to 8 bits, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import Case
from partool_kernels.fp8.op import launch, quantise
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``fp8_quantise`` on numbers of many magnitudes; its results must equal torch's bit for bit."""
    generator = torch.Generator(device).manual_seed(seed)
    rows, columns, flags = request.rows, request.width["k"], " ".join(request.flags)
    wide, narrow = (getattr(torch, dtype) for dtype in request.dtypes)
    x = torch.randn(rows, columns, device=device, generator=generator)
    x = (x * torch.logspace(-3, 3, columns, device=device)).to(wide)
    made = tuple(torch.empty_like(part) for part in torch.ops.partool.fp8_quantise(x, flags, narrow, "torch"))

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch(x, made, set(request.flags), config)
        return made

    def by_torch() -> Sequence[torch.Tensor]:
        return [part for half in quantise(x, flags, narrow, "torch") for part in half]

    return Case(run=run, eager=by_torch, exact=by_torch, factors=(0.0,) * 4)
