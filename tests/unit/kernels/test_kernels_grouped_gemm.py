"""Products of groups of rows as an operator."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.compiled import compile_for
from partool_kernels.grouped_gemm.op import grouped_gemm
from partool_kernels.moe.op import permute, route, unpermute
from partool_kernels.registry import KERNELS


def test_operators_are_what_their_registrations_say() -> None:
    torch.manual_seed(0)
    rows = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    for shape in ((3, 5, 4), (3, 4, 5)):
        leaf = torch.randn(shape, dtype=torch.float64)
        weights = (leaf if shape[1] == 5 else leaf.mT).requires_grad_()
        ends = torch.tensor([4, 4, 8])
        assert torch.autograd.gradcheck(
            lambda rows, weights, ends=ends: grouped_gemm(rows, weights, ends), (rows, weights)
        )
    torch.library.opcheck(torch.ops.partool.grouped_gemm, (rows, weights, ends, "auto"))
    inputs = (rows.detach(), torch.randn(9, 4, dtype=torch.float64), torch.tensor([4, 4, 8]), "auto")
    torch.library.opcheck(torch.ops.partool.grouped_gemm_weight, inputs)


def test_a_layer_of_experts_equals_every_token_by_itself() -> None:
    torch.manual_seed(1)
    x, chosen = torch.randn(7, 6).double(), torch.randint(0, 5, (7, 3))
    weights, experts = torch.rand(7, 3).double(), torch.randn(5, 6, 4).double()
    routing = route(chosen, 5)
    found = unpermute(grouped_gemm(permute(x, routing), experts, routing.ends), routing, weights)
    alone = torch.einsum("tk,th,tkho->to", weights, x, experts[chosen])
    assert torch.allclose(found, alone, rtol=1e-12, atol=1e-12)


def test_no_rows_and_what_does_not_fit() -> None:
    weights, ends = torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64)
    assert grouped_gemm(torch.zeros(0, 3), weights, ends).shape == (0, 4)
    assert grouped_gemm(torch.ones(5, 3), weights, ends).eq(0).all()
    for rows, end in ((torch.zeros(5, 4), ends), (torch.zeros(5, 3).double(), ends), (torch.zeros(5, 3), ends.int())):
        with pytest.raises(ValueError, match=r"matrices \[2, 3, 4\] float32"):
            grouped_gemm(rows, weights, end)


@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_weight"])
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_tiles_are_loaded_into_shared_memory(name: str, architecture: str) -> None:
    kernel = KERNELS[name]
    for request in list(kernel.examples(architecture))[-1:]:
        config = kernel.default(request)
        compiled = compile_for(request, config)
        assert 0.9 <= compiled.shared_bytes / kernel.shared_bytes(request, config) <= 1
