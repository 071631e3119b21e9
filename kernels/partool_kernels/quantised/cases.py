"""Calls of the kernels that make numbers of quantised matrices, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import Case
from partool_kernels.quantised.codes import PartPlace, packed, quantise_int8, quantise_nf4, reference
from partool_kernels.quantised.op import launch
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``dequantise_nf4`` or ``dequantise_int8``, whose bits are those of torch's operators."""
    generator = torch.Generator(device).manual_seed(seed)
    columns, dtype = request.width["n"], getattr(torch, request.dtypes[0])
    matrix = torch.randn(request.rows, columns, device=device, generator=generator)
    four = request.kernel == "dequantise_nf4"
    codes, scales = (quantise_nf4 if four else quantise_int8)(matrix)
    codes, place = packed(codes) if four else codes, PartPlace(columns, (0, columns), ((0, request.rows),))
    out = torch.empty(request.rows, columns, dtype=dtype, device=device)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch(codes, scales, place, out, config)
        return (out,)

    return Case(
        run=run,
        eager=lambda: (reference(codes, scales, place, dtype),),
        exact=lambda: (reference(codes, scales.double(), place, torch.float64),),
        factors=(0.0,),
    )
