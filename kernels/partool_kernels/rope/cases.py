"""Calls of the kernels of rotary position embedding, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import BACKWARD, FORWARD, Case
from partool_kernels.registry import Config, Request
from partool_kernels.rope.op import Tables, launch, programs, reference

_EPS = 1e-5


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``rope``, ``rope_norm_forward`` or ``rope_norm_backward`` on one sequence."""
    generator = torch.Generator(device).manual_seed(seed)
    size, dtype = (1, request.rows, request.width["n"], request.width["d"]), getattr(torch, request.dtypes[0])
    heads, grad = (torch.randn(size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(size[-1], device=device, generator=generator)
    angles = (
        torch.rand(size[1], size[-1] // 2, device=device, dtype=torch.float64, generator=generator).repeat(1, 2) * 6
    )
    cos, sin = angles.cos().float(), angles.sin().float()
    weight, out = weight.to(dtype), torch.empty_like(heads)

    def run(config: Config) -> Sequence[torch.Tensor]:
        if request.kernel == "rope":
            launch(request.kernel, (cos, sin, heads, out), 1.0, config)
            return (out,)
        if request.kernel == "rope_norm_forward":
            launch(request.kernel, (cos, sin, weight, heads, out), _EPS, config)
            return (out,)
        parts = torch.empty(programs(heads, config), size[-1], device=device)
        launch(request.kernel, (cos, sin, weight, heads, grad, out, parts), _EPS, config)
        return out, parts.sum(0).to(dtype)

    def by_torch(
        heads: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, tables: Tables
    ) -> Sequence[torch.Tensor]:
        if request.kernel != "rope_norm_backward":
            return (reference(heads, tables, None if request.kernel == "rope" else weight, _EPS),)
        leaves = heads.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(reference(leaves[0], tables, leaves[1], _EPS), leaves, grad)

    return Case(
        run=run,
        eager=lambda: by_torch(heads, weight, grad, (cos, sin)),
        exact=lambda: by_torch(heads.double(), weight.double(), grad.double(), (cos.double(), sin.double())),
        factors=(BACKWARD, BACKWARD) if request.kernel == "rope_norm_backward" else (FORWARD,),
    )
