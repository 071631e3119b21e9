"""Gated linear units in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import BACKWARD, excess
from partool_kernels.device import uses_triton
from partool_kernels.glu.op import glu, reference

KINDS = ("silu", "gelu", "gelu_tanh")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_and_gradients_are_as_exact_as_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, grad = torch.randn(3, 5, 3, 77, dtype=dtype).unbind()
    gate[0, 0, 0], up[0, 1, 1] = 30.0, 0.0  # where the exponential underflows, and where the product is zero
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
    gate, up = both.chunk(2, dim=1)  # row stride of 66 elements
    assert torch.allclose(glu(gate, up, "silu"), reference(gate, up, "silu"), rtol=1e-6, atol=1e-6)
    turned = torch.randn(33, 7).T
    assert torch.allclose(glu(turned, gate, "silu"), reference(turned, gate, "silu"), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_large_numbers_and_those_that_are_none(kind: str) -> None:
    gate = torch.tensor([[0.0, -0.0, 5.0, -5.0, 90.0, -90.0, 1e4, -1e4, 3e38, -3e38, torch.nan]])
    up = torch.full_like(gate, -1.5)
    found = glu(gate, up, kind)
    torch.testing.assert_close(found, reference(gate, up, kind), equal_nan=True)
    assert found.isnan().sum() == 1
    # torch returns NaN here for some kinds on CPUs, so there is no reference.
    assert glu(torch.tensor([[torch.inf]]), torch.ones(1, 1), kind).item() == torch.inf
    near = gate[:, :8].requires_grad_()
    slopes, wanted = (torch.autograd.grad(f(near, up[:, :8], kind).sum(), near)[0] for f in (glu, reference))
    torch.testing.assert_close(slopes, wanted)


def test_rows_may_lie_further_apart_than_32_bits_count() -> None:
    """The memory between the two rows is never touched."""
    torch.manual_seed(2)
    near, up = torch.randn(2, 2, 33, dtype=torch.float16)
    far = torch.empty(2**31 + 33, dtype=torch.float16).as_strided((2, 33), (2**31, 1)).copy_(near)
    assert torch.equal(glu(far, up, "silu"), glu(near, up, "silu"))
    found = [torch.autograd.grad(glu(gate.requires_grad_(), up, "silu"), gate, up)[0] for gate in (near, far)]
    assert torch.equal(*found)
