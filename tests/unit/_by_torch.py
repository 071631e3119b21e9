"""Optimizers of torch, parameter by parameter, with which partool's steps are compared."""

from __future__ import annotations

import torch
from torch import nn

from partool_runtime.optim.groups import ParameterGroup


class ByTorch:
    """``torch.optim`` in float64, parameter by parameter; Lion by its paper's algorithm 2."""

    def __init__(self, kind: str, parameter: nn.Parameter, group: ParameterGroup) -> None:
        self.kind, self.parameter, self.group = kind, parameter, group
        self.momentum = torch.zeros_like(parameter)
        self.optimizer: torch.optim.Optimizer | None = None
        if kind == "adamw":
            betas = (group.beta1, group.beta2)
            self.optimizer = torch.optim.AdamW([parameter], betas=betas, eps=group.eps, weight_decay=group.weight_decay)
        elif kind == "adagrad":
            self.optimizer = torch.optim.Adagrad([parameter], eps=group.eps)
        elif kind == "sgd":
            self.optimizer = torch.optim.SGD([parameter], momentum=group.beta1)
        elif kind != "lion":
            raise NotImplementedError(f"write another implementation of {kind} here, to compare with")

    @torch.no_grad()
    def step(self, lr: float, gradient: torch.Tensor) -> None:
        lr *= self.group.lr_factor
        if self.kind != "adamw":
            self.parameter.mul_(1 - lr * self.group.weight_decay)
        if self.optimizer is None:
            blend = self.group.beta1 * self.momentum + (1 - self.group.beta1) * gradient
            self.parameter.sub_(lr * blend.sign())
            self.momentum = self.group.beta2 * self.momentum + (1 - self.group.beta2) * gradient
            return
        self.parameter.grad = gradient
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
