"""Calls of the norm kernels on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from partool_kernels.cases import BACKWARD, FORWARD, Case
from partool_kernels.norm.launch import backward, launch, of_columns
from partool_kernels.norm.op import Norm, reference
from partool_kernels.registry import Config, Request

_EPS = 1e-6


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of ``norm_forward``, ``norm_backward`` or ``norm_weights``."""
    return _forward(request, device, seed) if request.kernel == "norm_forward" else _backward(request, device, seed)


def _inputs(request: Request, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """Return x with mean 1, residual and gradient, all ``[rows, n]``, and weight and bias, both ``[n]``."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype, columns = getattr(torch, request.dtypes[0]), request.width["n"]
    size = (3, request.rows, columns)
    x, residual, grad = torch.randn(size, dtype=dtype, device=device, generator=generator).unbind()
    weight, bias = torch.randn(2, columns, dtype=dtype, device=device, generator=generator).unbind()
    return x + 1, residual, grad, weight, bias


def _how(flags: tuple[str, ...], weight: torch.Tensor, bias: torch.Tensor) -> Norm:
    return Norm("layer" if "layer" in flags else "rms", _EPS, weight, bias if "bias" in flags else None)


def _forward(request: Request, device: torch.device, seed: int) -> Case:
    inputs, flags = _inputs(request, device, seed), request.flags
    x, residual, _, weight, bias = inputs
    total, out = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(2, request.rows, dtype=torch.float32, device=device).unbind()
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias, "total": total, "out": out}
    given |= {"mean": mean, "rstd": rstd}

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch("norm_forward", given, flags, config, _EPS)
        return (total, out) if "add" in flags else (out,)

    def by_torch(
        x: torch.Tensor, residual: torch.Tensor, _: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        if "add" not in flags:
            return (reference(x, _how(flags, weight, bias)),)
        added = x + residual
        return added, reference(added, _how(flags, weight, bias))

    return Case(
        run=run,
        eager=lambda: by_torch(*inputs),
        exact=lambda: by_torch(*(each.double() for each in inputs)),
        factors=(FORWARD, FORWARD) if "add" in flags else (FORWARD,),
    )


def _backward(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call whose results are the gradients of weight and bias, and with ``norm_backward`` also of x.

    For rows in several blocks, a call of ``norm_backward`` also launches ``norm_weights``, so that all configurations
    compute the same gradients.
    """
    inputs, flags, name = _inputs(request, device, seed), request.flags, request.kernel
    x, grad_total, grad, weight, _ = inputs
    grad_x = torch.empty_like(x)
    wide = x.float()
    mean = wide.mean(1) if "layer" in flags else torch.zeros_like(wide[:, 0])
    rstd = torch.rsqrt((wide - mean[:, None]).square().mean(1) + _EPS)
    given = {"grad": grad, "grad_total": grad_total, "x": x, "weight": weight, "grad_x": grad_x}
    given |= {"mean": mean, "rstd": rstd}

    def run(config: Config) -> Sequence[torch.Tensor]:
        results = of_columns(name, given, flags, config) if name == "norm_weights" else backward(given, flags, config)
        sums = [each.to(x.dtype) for each in results if each is not None]
        return sums if name == "norm_weights" else [grad_x, *sums]

    def by_torch(
        x: torch.Tensor, grad_total: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
        out = reference(leaves[0], _how(flags, leaves[1], leaves[2]))
        wanted = leaves if "bias" in flags else leaves[:2]
        of_x, *sums = torch.autograd.grad(out, wanted, grad)
        return sums if name == "norm_weights" else [of_x + grad_total if "add" in flags else of_x, *sums]

    return Case(
        run=run,
        eager=lambda: by_torch(*inputs),
        exact=lambda: by_torch(*(each.double() for each in inputs)),
        factors=(BACKWARD,) * ((3 if "bias" in flags else 2) - (name == "norm_weights")),
    )
