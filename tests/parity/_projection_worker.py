"""Ranks of test_projections.py: projections that a toy adapter wraps, beneath every form of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import _atp_worker
import _tensor_worker
import torch
from _ranks import in_group
from torch import nn

from partool.plan.types import Plan
from partool.spec.model import Weights
from partool_runtime.mesh import build_ranks
from partool_runtime.model import Decoder
from partool_runtime.model.decoder import Block
from partool_runtime.model.projection import Linear
from partool_runtime.parallel.tensor.apply import apply_tensor
from partool_runtime.parallel.tensor.sync import TensorGradients
from partool_runtime.weights import build, fill, materialise

FACTOR = 3.0


class Scaled(nn.Module):
    """A toy adapter: :data:`FACTOR` times the product of the projection that it wraps."""

    matrix: torch.Tensor | None = None

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        out = FACTOR * self.base.product(x, biased=False)
        return out if self.bias is None or not biased else out + self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


def wrap(model: Decoder) -> Decoder:
    """Wrap every projection of a model's layers, in place."""
    for _, block in model.blocks():
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear) and not isinstance(module, Scaled):
                    setattr(module, name, Scaled(child))
    return model


def plans() -> Iterator[tuple[str, Plan]]:
    """Yield layouts over four ranks: one dimension with every way to exchange, and two dimensions."""
    for model, layout in (
        ("shared", "plain"), ("shared", "overlap"), ("shared", "pieces"), ("gpt", "shares overlap"),
        ("latent", "shares overlap"), ("latent-lite", "pieces"),
    ):  # fmt: skip
        yield f"{model} {layout}", _tensor_worker.Case(model, 4, layout=_tensor_worker.LAYOUTS[layout]).plan()
    for model in _atp_worker.MODELS:
        yield f"2x2 {model}", _atp_worker.Case(2, model).plan(4)


def made(plan: Plan, ranks: Any = None) -> tuple[Decoder, dict[str, torch.Tensor], torch.Tensor]:
    """Return a model with wrapped projections, its gradients by the names without wrappers, and its loss."""
    model = build(plan.model).double()
    if ranks is not None:
        apply_tensor(model, plan, ranks)
    materialise(model, "cpu")
    sums = None if ranks is None else TensorGradients.of(model, plan, ranks)
    fill(model, Weights(), seed=4)
    _tensor_worker.perturbed(model)
    assert isinstance(next(iter(model.blocks()))[1], Block)
    tokens_BS, labels_BS = _tensor_worker.batch(0)
    total = wrap(model)(tokens_BS, labels_BS)
    total.backward()
    if sums is not None:
        sums.add_up()
    gradients = {name.replace(".base.", "."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return model, gradients, total.detach()


def check_wrapped() -> None:
    """Compare loss and gradients of each layout with those of one process."""
    with in_group():
        for name, plan in plans():
            ranks = build_ranks(plan, torch.device("cpu"))
            _, expected, loss = made(plan)
            model, gradients, total = made(plan, ranks)
            _tensor_worker.same(total, loss, 1e-12, name)
            assert gradients.keys() == expected.keys(), name
            for parameter, gradient in gradients.items():
                _tensor_worker.same_pieces(model, parameter, gradient, expected[parameter], 1e-11, name)
