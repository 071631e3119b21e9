"""Triton's product of matrices in its interpreter."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import case, errors
from partool_kernels.gemm.describe import config_of
from partool_kernels.gemm.op import gemm
from partool_kernels.registry import KERNELS, Request


@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("k", "split"), [(45, 1), (100, 3), (32, 2), (3, 4)])
def test_products_are_as_exact_as_torch(form: str, dtype: str, k: int, split: int) -> None:
    request = Request("gemm", "sm_90", (dtype, dtype), (("n", 35), ("k", k)), 19, (form,))
    config = config_of((16, 16, 16), split, 1, 1, amd=False)
    assert max(errors(case(request, torch.device("cpu")), config)) <= 1


@pytest.mark.parametrize("out", ["float32", "float16"])
def test_parts_are_added(out: str) -> None:
    request = Request("gemm_sum", "sm_90", (out,), (("n", 35), ("parts", 3)), 19)
    assert max(errors(case(request, torch.device("cpu")), KERNELS["gemm_sum"].default(request))) <= 1


def test_tiles_in_groups_cover_all() -> None:
    # 5 x 3 tiles in groups of 2 rows: the last group has one.
    request = Request("gemm", "sm_90", ("float32",) * 2, (("n", 40), ("k", 16)), 70, ("nt",))
    config = config_of((16, 16, 16), 1, 1, 1, amd=False)
    small = type(config)(tuple((n, 2 if n == "GROUP_M" else v) for n, v in config.blocks), num_warps=1, num_stages=1)
    assert max(errors(case(request, torch.device("cpu")), small)) <= 1


def test_operator_multiplies_matrices_of_any_strides_and_their_gradients() -> None:
    torch.manual_seed(0)
    a = torch.randn(21, 40)[:, 1:36:2].requires_grad_()  # strided in rows and columns
    weight = torch.randn(37, 30)[:, 5:23].requires_grad_()  # misaligned, rows not contiguous
    out, true = gemm(a, weight.T), a @ weight.T
    assert torch.allclose(out, true, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    found, expected = (torch.autograd.grad(y, (a, weight), grad) for y in (out, true))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 4)
    a[1, 4] = torch.nan
    a[2, 0] = torch.inf
    out = gemm(a, b)
    assert out.isnan().any(1).tolist() == [False, True, False]
    assert out[2].isinf().all()


def test_rows_far_apart_are_found() -> None:
    """Rows span more than 2^31 elements; only the touched pages of the allocation take memory."""
    far = torch.empty(2**31 + 2**10, dtype=torch.float16).as_strided((3, 20), (2**30 + 16, 1))
    a, b = torch.randn(3, 20).half(), torch.randn(20, 5).half()
    far.copy_(a)
    assert torch.equal(gemm(far, b), gemm(a, b))
    assert torch.equal(gemm(b.T, far.T), gemm(b.T, a.T))
