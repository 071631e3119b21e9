"""Calls of the kernels for products of matrices, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import FORWARD, Case
from partool_kernels.gemm.describe import form_of
from partool_kernels.gemm.op import launch, launch_sum
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``gemm`` or ``gemm_sum``; a call of ``gemm`` with a split sum also adds the parts of the sum."""
    generator = torch.Generator(device).manual_seed(seed)
    make = _product if request.kernel == "gemm" else _sum
    return make(request, device, generator)


def _product(request: Request, device: torch.device, generator: torch.Generator) -> Case:
    dtype, of_out = (getattr(torch, name) for name in request.dtypes)
    m, n, k = request.rows, request.width["n"], request.width["k"]

    def matrix(rows: int, columns: int, form: str) -> torch.Tensor:
        shape = (rows, columns) if form == "n" else (columns, rows)
        made = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        return made if form == "n" else made.T

    form = form_of(request)
    a, b = matrix(m, k, form[0]), matrix(k, n, form[1])
    out = torch.empty(m, n, dtype=of_out, device=device)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch(a, b, out, config)
        return (out,)

    return Case(
        run=run,
        eager=lambda: ((a @ b).to(of_out),),
        exact=lambda: (a.double() @ b.double(),),
        factors=(FORWARD,),
    )


def _sum(request: Request, device: torch.device, generator: torch.Generator) -> Case:
    shape = (request.width["parts"], request.rows, request.width["n"])
    parts = torch.randn(shape, device=device, generator=generator)
    out = torch.empty(shape[1:], dtype=getattr(torch, request.dtypes[0]), device=device)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch_sum(parts, out, config)
        return (out,)

    return Case(
        run=run,
        eager=lambda: (parts.sum(0).to(out.dtype),),
        exact=lambda: (parts.double().sum(0),),
        factors=(FORWARD,),
    )
