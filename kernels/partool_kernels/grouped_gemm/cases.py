"""Calls of the kernels for products of groups of rows, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import BACKWARD, FORWARD, Case
from partool_kernels.grouped_gemm.op import launch, launch_weight, loop, loop_weight
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``grouped_gemm`` or ``grouped_gemm_weight``; group 2 is empty, and some rows have no group."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, of_out = (getattr(torch, name) for name in request.dtypes)
    rows, width, groups = request.rows, request.width, request.width["e"]
    ends = torch.randint(0, rows + 1, (groups,), device=device, generator=generator).sort().values
    if groups > 1:
        ends[1] = ends[0]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    if request.kernel == "grouped_gemm_weight":
        a, grad = random(rows, width["m"]), random(rows, width["n"])
        out = torch.empty(groups, width["m"], width["n"], dtype=of_out, device=device)

        def of_weights(config: Config) -> Sequence[torch.Tensor]:
            launch_weight((a, grad), ends, out, config)
            return (out,)

        return Case(
            run=of_weights,
            eager=lambda: (loop_weight(a, grad, ends).to(of_out),),
            exact=lambda: (loop_weight(a.double(), grad.double(), ends),),
            factors=(BACKWARD,),
        )
    a = random(rows, width["k"])
    turned = "nt" in request.flags
    b = random(groups, width["n"], width["k"]).mT if turned else random(groups, width["k"], width["n"])
    made = torch.empty(rows, width["n"], dtype=of_out, device=device)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch((a, b), ends, made, config)
        return (made,)

    return Case(
        run=run,
        eager=lambda: (loop(a, b, ends).to(of_out),),
        exact=lambda: (loop(a.double(), b.double(), ends),),
        factors=(FORWARD,),
    )
