"""Calls of the kernel for products of 8-bit matrices, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import FORWARD, Case
from partool_kernels.fp8.formats import quantised
from partool_kernels.gemm_a8w8.op import launch
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``gemm_a8w8``; the reference converts the 8-bit matrices to the result's type."""
    generator = torch.Generator(device).manual_seed(seed)
    m, n, k = request.rows, request.width["n"], request.width["k"]
    narrow, dtype = (getattr(torch, name) for name in request.dtypes)
    a_MK = torch.randn(m, k, device=device, generator=generator) / k**0.25
    b_NK = torch.randn(n, k, device=device, generator=generator) / k**0.25
    a = quantised(a_MK, narrow, square=False, power_of_two=False)
    b = quantised(b_NK, narrow, square="rows" not in request.flags, power_of_two=False)
    wide = a.wide(), b.wide()

    def run(config: Config) -> Sequence[torch.Tensor]:
        return (launch(a, b, dtype, config),)

    def by_torch(dtype: torch.dtype) -> Sequence[torch.Tensor]:
        return (wide[0].to(dtype) @ wide[1].to(dtype).T,)

    return Case(run=run, eager=lambda: by_torch(dtype), exact=lambda: by_torch(torch.float64), factors=(FORWARD,))
