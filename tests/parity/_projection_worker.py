"""Ranks of test_projections.py: projections that a toy adapter wraps, beneath every form of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import _atp_worker
import _tensor_worker
import torch
from _adapters import FACTOR, Scaled
from _ranks import in_group

from partool.plan.types import Plan
from partool.spec.model import Weights
from partool_runtime.fp8 import Fp8Linear
from partool_runtime.mesh import Ranks, build_ranks
from partool_runtime.model import Decoder
from partool_runtime.model.projection import Linear
from partool_runtime.parallel.tensor.apply import apply_tensor
from partool_runtime.parallel.tensor.columns import columns
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.parallel.tensor.rows import row
from partool_runtime.parallel.tensor.sync import TensorGradients
from partool_runtime.weights import build, fill, materialise


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


def made(plan: Plan, ranks: Ranks | None = None) -> tuple[Decoder, dict[str, torch.Tensor], torch.Tensor]:
    """Return a model with wrapped projections, its gradients by the names without wrappers, and its loss."""
    model = build(plan.model).double()
    if ranks is not None:
        apply_tensor(model, plan, ranks)
    materialise(model, "cpu")
    sums = None if ranks is None else TensorGradients.of(model, plan, ranks)
    fill(model, Weights(), seed=4)
    _tensor_worker.perturbed(model)
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


def check_wrapped_fp8() -> None:
    """Compare products in 8 bits beneath a wrapper with multiples of those without."""
    with in_group():
        ranks = _tensor_worker.ranks_of(4)
        torch.manual_seed(ranks.tp.place)
        linears = [Fp8Linear(32, 16, bias=False) for _ in range(2)]
        for linear in linears:
            linear.fits, linear.narrow, linear.mode = True, torch.float8_e4m3fn, "torch"
        x_BSI = torch.randn(2, 5, 32)
        for overlap, chunks in ((False, 1), (True, 3)):
            team = Team(ranks.tensor_group.group_name, ranks.tp.place, 4, overlap=overlap, chunks=chunks)
            plain, scaled = columns(x_BSI, (linears[0], Scaled(linears[1])), team)
            torch.testing.assert_close(plain, columns(x_BSI, linears, team)[0])
            torch.testing.assert_close(scaled, FACTOR * columns(x_BSI, linears, team)[1])
            expected = FACTOR * row(x_BSI, linears[0], team)
            torch.testing.assert_close(row(x_BSI, Scaled(linears[0]), team), expected)
