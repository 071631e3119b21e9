"""The clamped gate of GPT-OSS, as one function of autograd that saves only its two inputs.

With g = min(gate, limit) and u = max(−limit, min(up, limit)) the result is (u + 1) · g · σ(α g). Source: the module
``GptOssExperts`` of transformers (``models/gpt_oss/modeling_gpt_oss.py``), and OpenAI's gpt-oss (``gpt_oss/torch``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from partool.spec.model import ModelConfig


class ClampedGate:
    """The product of a gate and an inner activation ``[..., F]``; one object serves all layers of a model."""

    def __init__(self, config: ModelConfig) -> None:
        self._numbers = config.swiglu_alpha, config.swiglu_limit

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return (u + 1) · g · σ(α g) in the type of the inputs."""
        if torch.compiler.is_compiling():  # a compiler chooses by itself what is saved
            return _value(gate, up, *self._numbers)
        out: torch.Tensor = _Clamped.apply(gate, up, *self._numbers)  # type: ignore[no-untyped-call]
        return out


def _value(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    clamped = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (clamped * torch.sigmoid(alpha * clamped))


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.numbers = alpha, limit  # type: ignore[attr-defined]
        return _value(gate, up, alpha, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gate, up), (alpha, limit) = ctx.saved_tensors, ctx.numbers
        clamped = gate.clamp(max=limit)
        share = (alpha * clamped).sigmoid_()
        of_up = (clamped * share).mul_(grad).masked_fill_(up < -limit, 0).masked_fill_(up > limit, 0)
        # d(g σ(α g)) / dg = σ (1 + α g (1 − σ)), in the memory of g; the gradient of the gate is in that of σ.
        slope = clamped.mul_(alpha)
        slope.addcmul_(slope, share, value=-1).add_(1).mul_(share)
        of_gate = torch.clamp(up, -limit, limit, out=share).add_(1).mul_(grad).mul_(slope)
        return of_gate.masked_fill_(gate > limit, 0), of_up, None, None
