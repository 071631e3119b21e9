"""Calls of the cross entropy kernels on random inputs, for tests and timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from partool_kernels.cases import BACKWARD, FORWARD, Case
from partool_kernels.cross_entropy.op import (
    IGNORED,
    Terms,
    launch_gradient,
    launch_parts,
    launch_scaled,
    launch_whole,
    scaled,
)
from partool_kernels.registry import Config, Request

_SCALE = 0.5
"""Factor that the kernels multiply gradients with."""


def case(request: Request, device: torch.device, seed: int) -> Case:
    """Return a call of a cross entropy kernel; the shard of a sharded vocabulary begins at token 3."""
    generator = torch.Generator(device).manual_seed(seed)
    if request.kernel == "scaled":
        return _scaled(request, device, generator)
    terms = Terms(1e-3, 30.0 if "cap" in request.flags else 0.0)
    dtype, columns = getattr(torch, request.dtypes[0]), request.width["v"]
    logits = torch.randn(request.rows, columns, device=device, generator=generator).mul_(4.0).to(dtype)
    labels = torch.randint(columns, (request.rows,), device=device, generator=generator)
    labels[::5] = IGNORED
    make = {"cross_entropy": _full, "cross_entropy_parts": _parts, "cross_entropy_gradient": _gradient}
    return make[request.kernel](request, logits, labels, terms)


def _losses(logits: torch.Tensor, labels: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return the losses of rows by torch's differentiable operators."""
    wide = _bent(logits, terms.cap)
    losses = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="none")
    return losses + (terms.z_loss * wide.logsumexp(1).square()).where(labels != IGNORED, 0.0)


def _bent(logits: torch.Tensor, cap: float) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return cap * torch.tanh(wide / cap) if cap else wide


def _both(
    logits: torch.Tensor, ours: Callable[[torch.Tensor], Sequence[torch.Tensor]]
) -> tuple[Callable[[], Sequence[torch.Tensor]], Callable[[], Sequence[torch.Tensor]]]:
    """Return two functions without arguments: one calls ``ours`` on the logits, one on the logits in float64."""
    return lambda: ours(logits), lambda: ours(logits.double())


def _full(request: Request, logits: torch.Tensor, labels: torch.Tensor, terms: Terms) -> Case:
    gradient = "gradient" in request.flags
    out, losses = torch.empty_like(logits), logits.new_empty(len(logits), dtype=torch.float32)

    def run(config: Config) -> Sequence[torch.Tensor]:
        # The gradient does not overwrite the logits: the next call needs them.
        launch_whole((logits, labels, out, losses), terms, _SCALE, config, gradient=gradient)
        return (losses, out) if gradient else (losses,)

    def by_torch(x: torch.Tensor) -> Sequence[torch.Tensor]:
        x = x.detach().requires_grad_(gradient)
        losses_N = _losses(x, labels, terms)
        if not gradient:
            return (losses_N,)
        return losses_N.detach(), *torch.autograd.grad(losses_N.sum() * _SCALE, x)

    return Case(run, *_both(logits, by_torch), factors=(FORWARD, BACKWARD) if gradient else (FORWARD,))


def _parts(request: Request, logits: torch.Tensor, labels: torch.Tensor, terms: Terms) -> Case:
    parts = logits.new_empty(3, len(logits), dtype=torch.float32)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch_parts((logits, labels, parts), 3, terms.cap, config)
        highest, sums, targets = parts.unbind()
        # A sum depends on how the largest logit is rounded, so the logarithm of the total, which does not, is compared.
        return highest, highest + sums.log(), targets

    def by_torch(x: torch.Tensor) -> Sequence[torch.Tensor]:
        counted, wide = labels != IGNORED, _bent(x, terms.cap)
        highest = wide.amax(1)
        sums = (wide - highest[:, None]).exp().sum(1)
        inside = counted & (labels >= 3)
        targets = wide.gather(1, (labels - 3).where(inside, 0)[:, None])[:, 0].where(inside, 0.0)
        return highest.where(counted, 0.0), (highest + sums.log()).where(counted, 0.0), targets

    return Case(run, *_both(logits, by_torch), factors=(FORWARD,) * 3)


def _gradient(request: Request, logits: torch.Tensor, labels: torch.Tensor, terms: Terms) -> Case:
    out, scale = torch.empty_like(logits), torch.full((), _SCALE, device=logits.device)
    # The whole vocabulary is this rank's shard and one more token, which has this logit.
    more = 2.0
    log_totals = torch.logaddexp(_bent(logits.double(), terms.cap).logsumexp(1), logits.new_full((), more).double())
    rounded = log_totals.float()

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch_gradient((logits, labels, rounded, scale, out), 3, terms, config)
        return (out,)

    def by_torch(x: torch.Tensor) -> Sequence[torch.Tensor]:
        counted, wide, totals = labels != IGNORED, _bent(x, terms.cap), rounded.to(_bent(x[:1], 0.0).dtype)
        targets = F.one_hot((labels - 3).clamp_min(0), wide.shape[1]) * (counted & (labels >= 3))[:, None]
        grads = (wide - totals[:, None]).exp() * (1.0 + 2.0 * terms.z_loss * totals)[:, None] - targets
        if terms.cap:
            grads = grads * (1.0 - (wide / terms.cap).square())
        return ((grads * _SCALE * counted[:, None]).to(x.dtype),)

    return Case(run, *_both(logits, by_torch), factors=(BACKWARD,))


def _scaled(request: Request, device: torch.device, generator: torch.Generator) -> Case:
    come, go = (getattr(torch, name) for name in request.dtypes)
    x = torch.randn(request.rows, request.width["n"], device=device, generator=generator).to(come)
    out, factor = torch.empty_like(x, dtype=go), torch.full((), 0.3, device=device)

    def run(config: Config) -> Sequence[torch.Tensor]:
        launch_scaled((x, factor, out), config)
        return (out,)

    return Case(
        run=run,
        eager=lambda: (scaled(x, factor, go, "torch"),),
        exact=lambda: (x.double() * factor.double(),),
        factors=(FORWARD,),
    )
