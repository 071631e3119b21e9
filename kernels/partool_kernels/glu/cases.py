"""Calls of the kernels of gated linear units, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import BACKWARD, FORWARD, Case
from partool_kernels.glu.op import launch, reference
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``glu_forward`` or ``glu_backward``."""
    (kind,), forward = request.flags, request.kernel == "glu_forward"
    generator = torch.Generator(device).manual_seed(seed)
    size, dtype = (3, request.rows, request.width["f"]), getattr(torch, request.dtypes[0])
    gate, up, grad = torch.randn(size, dtype=dtype, device=device, generator=generator).unbind()
    inputs = (gate, up) if forward else (grad, gate, up)
    outputs = tuple(torch.empty_like(gate) for _ in range(1 if forward else 2))

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch(request.kernel, (*inputs, *outputs), kind, config)
        return outputs

    def by_torch(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        if forward:
            return (reference(gate, up, kind),)
        leaves = gate.detach().requires_grad_(), up.detach().requires_grad_()
        return torch.autograd.grad(reference(*leaves, kind), leaves, grad)

    return Case(
        run=run,
        eager=lambda: by_torch(gate, up, grad),
        exact=lambda: by_torch(gate.double(), up.double(), grad.double()),
        factors=(FORWARD,) if forward else (BACKWARD, BACKWARD),
    )
