"""Products of groups of rows in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import case, errors
from partool_kernels.grouped_gemm.op import grouped_gemm, loop
from partool_kernels.registry import Config, Request

_SMALL = Config((("BLOCK_M", 16), ("BLOCK_N", 16), ("BLOCK_K", 16)), num_warps=1, num_stages=1)


@pytest.mark.parametrize("form", ["nn", "nt"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("experts", "k"), [(3, 21), (1, 32), (8, 5)])
def test_products_of_groups_are_as_exact_as_torch(form: str, dtype: str, experts: int, k: int) -> None:
    shape = (("n", 19), ("k", k), ("e", experts))
    request = Request("grouped_gemm", "sm_90", (dtype, dtype), shape, 50, (form,))
    assert max(errors(case(request, torch.device("cpu")), _SMALL)) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("experts", [1, 3])
def test_gradients_of_matrices_are_as_exact_as_torch(dtype: str, experts: int) -> None:
    shape = (("m", 21), ("n", 19), ("e", experts))
    request = Request("grouped_gemm_weight", "sm_90", (dtype, dtype), shape, 50)
    assert max(errors(case(request, torch.device("cpu")), _SMALL)) <= 1


@pytest.mark.parametrize("turned", [False, True])
def test_operator_and_its_gradients(turned: bool) -> None:
    torch.manual_seed(0)
    rows = torch.randn(12, 18)[:, 1:10].requires_grad_()
    weights = (torch.randn(4, 7, 9).mT if turned else torch.randn(4, 9, 7)).requires_grad_()
    ends = torch.tensor([5, 5, 9, 11])
    out, true = grouped_gemm(rows, weights, ends), loop(rows, weights, ends)
    assert torch.allclose(out, true, rtol=1e-5, atol=1e-5)
    assert out[11].eq(0).all()
    grad = torch.randn_like(out)
    found, expected = (torch.autograd.grad(y, (rows, weights), grad) for y in (out, true))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_stays_with_its_group() -> None:
    rows, weights = torch.ones(6, 5), torch.ones(2, 5, 3)
    rows[2] = torch.nan  # a row of the second group
    rows[5] = torch.nan  # a row of no group
    weights[1, 0, 0] = torch.inf
    out = grouped_gemm(rows, weights, torch.tensor([2, 5]))
    assert out[:2].eq(5).all()
    assert out[5].eq(0).all()
    rows.requires_grad_()
    weights = weights.clone().requires_grad_()
    grad = torch.autograd.grad(grouped_gemm(rows, weights, torch.tensor([2, 5])).sum(), weights)[0]
    assert grad[0].eq(2).all()
