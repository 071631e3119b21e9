"""Calls of the kernels that permute tokens, on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import BACKWARD, FORWARD, Case
from partool_kernels.moe.op import launch, reference_permute, reference_unpermute, route
from partool_kernels.registry import Config, Request


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of a permutation kernel; of nine experts, one is on another rank and the first gets no rows."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, of_weights = (getattr(torch, name) for name in request.dtypes)
    tokens, (columns, choices) = request.rows, (request.width["h"], request.width["k"])
    chosen = torch.randint(1, 10, (tokens, choices), device=device, generator=generator)
    places, ends = route(chosen, 9)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    x, rows = random(tokens, columns, dtype=dtype), random(tokens * choices, columns, dtype=dtype)
    weights = random(tokens, choices, dtype=of_weights)
    if request.kernel == "moe_permute":
        made = torch.empty_like(rows)

        def permuted(config: Config) -> Sequence[torch.Tensor]:
            launch(request.kernel, (x, made), (places, ends[-1:]), config)
            return (made,)

        return Case(
            run=permuted,
            eager=lambda: (reference_permute(x, places, ends),),
            exact=lambda: (reference_permute(x.double(), places, ends),),
            factors=(0.0,),
        )
    if request.kernel == "moe_unpermute":
        out, used = torch.empty_like(x), weights if request.flags else None

        def summed(config: Config) -> Sequence[torch.Tensor]:
            launch(request.kernel, (rows, out), (places, ends[-1:], used), config)
            return (out,)

        wide = None if used is None else used.double()
        return Case(
            run=summed,
            eager=lambda: (reference_unpermute(rows, places, ends, used),),
            exact=lambda: (reference_unpermute(rows.double(), places, ends, wide),),
            factors=(FORWARD,),
        )
    grads = torch.empty_like(rows), torch.empty_like(weights)

    def backward(config: Config) -> Sequence[torch.Tensor]:
        launch(request.kernel, (x, rows, grads[0]), (places, ends[-1:], weights, grads[1]), config)
        return grads

    def by_torch(x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> Sequence[torch.Tensor]:
        leaves = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        return torch.autograd.grad(reference_unpermute(leaves[0], places, ends, leaves[1]), leaves, x)

    return Case(
        run=backward,
        eager=lambda: by_torch(x, rows, weights),
        exact=lambda: by_torch(x.double(), rows.double(), weights.double()),
        factors=(BACKWARD, BACKWARD),
    )
