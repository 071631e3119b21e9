"""Gated linear units in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.checks import BACKWARD, excess
from partool_kernels.device import uses_triton
from partool_kernels.glu.op import glu, reference

KINDS = ("silu", "gelu", "gelu_tanh")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_and_gradients_are_as_exact_as_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, grad = torch.randn(3, 5, 3, 77, dtype=dtype).unbind()
    gate[0, 0, 0], up[0, 1, 1] = 30.0, 0.0  # where exponentials vanish, and a product
    inputs = gate.clone().requires_grad_(), up.clone().requires_grad_()
    wide = tuple(x.double().requires_grad_() for x in (gate, up))
    assert uses_triton("auto", *inputs)
    ours, eager, exact = glu(*inputs, kind), reference(*inputs, kind), reference(*wide, kind)
    assert excess(ours, eager, exact) <= 1
    found = torch.autograd.grad(ours, inputs, grad)
    by_torch = torch.autograd.grad(eager, inputs, grad)
    for one, other, true in zip(found, by_torch, torch.autograd.grad(exact, wide, grad.double()), strict=True):
        assert excess(one, other, true, BACKWARD) <= 1


def test_columns_that_are_not_side_by_side_are_copied_and_rows_apart_are_not() -> None:
    torch.manual_seed(1)
    both = torch.randn(7, 2 * 33)
    gate, up = both.chunk(2, dim=1)  # rows lie 66 elements apart
    assert torch.allclose(glu(gate, up, "silu"), reference(gate, up, "silu"), rtol=1e-6, atol=1e-6)
    turned = torch.randn(33, 7).T
    assert torch.allclose(glu(turned, gate, "silu"), reference(turned, gate, "silu"), rtol=1e-6, atol=1e-6)
