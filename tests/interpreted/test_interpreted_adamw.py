"""AdamW on many tensors in Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import nn

from partool.spec.training import OptimizerSpec
from partool_kernels.adamw import op
from partool_kernels.adamw.op import Tensors, Update, adamw, reference
from partool_kernels.cases import excess
from partool_runtime.optim.device import DeviceOptimizer

# Sizes below, above and at a multiple of a block of 2048 elements, an empty tensor, and one not aligned to 16 bytes.
SIZES = ((5, 3), (2049,), (2048,), (0,), (1, 4097), (37,))


def made(gradient: torch.dtype, offset: bool) -> list[list[torch.Tensor]]:
    rows = []
    for size in SIZES:
        row = []
        for dtype in (torch.float32, gradient, torch.float32, torch.float32):
            place = 1 if offset else 0
            flat = torch.randn(torch.Size(size).numel() + place).to(dtype)
            row.append(flat[place:].view(size))
        row[3].square_()
        rows.append(row)
    return rows


def of(rows: Sequence[Sequence[torch.Tensor]]) -> Tensors:
    return Tensors(*zip(*rows, strict=True), [len(size) > 1 for size in SIZES])  # type: ignore[arg-type]


@pytest.mark.parametrize(("gradient", "offset"), [(torch.float32, False), (torch.float16, True)])
def test_three_steps_are_as_exact_as_those_of_torch(gradient: torch.dtype, offset: bool) -> None:
    torch.manual_seed(0)
    ours = made(gradient, offset)
    eager, exact = ([[x.to(dtype, copy=True) for x in row] for row in ours] for dtype in (torch.float32, torch.float64))
    for step in range(1, 4):
        update = Update(0.05, 0.9, 0.95, 1e-8, 0.3, 0.5, step)
        adamw(of(ours), update)
        for rows in (eager, exact):
            for row, size in zip(rows, SIZES, strict=True):
                reference(tuple(row), len(size) > 1, update)
    for mine, theirs, true in zip(ours, eager, exact, strict=True):
        for place in (0, 2, 3):
            assert excess(mine[place], theirs[place], true[place]) <= 1
        assert torch.equal(mine[1].double(), true[1])  # gradients stay as they are


def test_gradients_of_two_types_and_a_decay_that_is_wrong_is_seen() -> None:
    torch.manual_seed(1)
    rows = [[torch.randn(7), torch.randn(7).to(t), torch.zeros(7), torch.zeros(7)] for t in (torch.half, torch.float)]
    for decays, right in ((True, True), (False, False)):
        ours, theirs, exact = ([[x.clone().to(t) for x in row] for row in rows] for t in (None, None, torch.double))
        ours, theirs = ([[x.clone() for x in row] for row in rows] for _ in range(2))
        update = Update(0.1, 0.9, 0.95, 1e-8, 0.3, 1.0, 1)
        adamw(Tensors(*zip(*ours, strict=True), [decays] * 2), update)  # type: ignore[arg-type]
        for row in (*theirs, *exact):
            reference(tuple(row), True, update)
        worst = max(excess(a[0], b[0], c[0]) for a, b, c in zip(ours, theirs, exact, strict=True))
        assert (worst <= 1) is right


@pytest.mark.parametrize(("groups", "launches"), [({}, 1), ({"w": {"betas": [0.8, 0.9], "weight_decay": 0.5}}, 2)])
def test_optimizer_uses_it_and_equals_torchs_own(groups: dict[str, dict[str, object]], launches: int) -> None:
    spec = OptimizerSpec.model_validate({"lr": 0.1, "weight_decay": 0.3, "groups": groups})
    sizes = {"w": (5, 3), "b": (5,), "none": (3, 2)}
    torch.manual_seed(2)
    first = {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    second = {name: nn.Parameter(p.detach().clone()) for name, p in first.items()}
    ours, theirs = DeviceOptimizer(first, spec, kernels="auto"), DeviceOptimizer(second, spec)
    with mock.patch.object(op, "launch", wraps=op.launch) as launched:
        for _ in range(3):
            for name in ("w", "b"):
                first[name].grad = torch.randn(sizes[name])
                second[name].grad = first[name].grad.clone()  # type: ignore[union-attr]
            ours.step(0.1, scale=0.5)
            theirs.step(0.1, scale=0.5)
    assert launched.call_count == 3 * launches
    for name, tensor in ours.state().items():
        torch.testing.assert_close(tensor, theirs.state()[name], rtol=1e-6, atol=1e-7)
    for name in sizes:
        torch.testing.assert_close(first[name].detach(), second[name].detach(), rtol=1e-6, atol=1e-6)
