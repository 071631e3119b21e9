"""Permutation of tokens by expert in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import case, excess
from partool_kernels.moe.op import permute, route, unpermute
from partool_kernels.registry import KERNELS, Request


@pytest.mark.parametrize("name", ["moe_permute", "moe_unpermute", "moe_unpermute_backward"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize("flags", [(), ("weighted",)])
def test_kernels_are_as_exact_as_torch(name: str, dtypes: tuple[str, ...], flags: tuple[str, ...]) -> None:
    if flags and name != "moe_unpermute":
        return
    request = Request(name, "sm_90", dtypes, (("h", 53), ("k", 3)), 7, flags)
    made = case(request, torch.device("cpu"))
    config = KERNELS[name].default(request)
    small = type(config)((("BLOCK", 32),), num_warps=1, num_stages=1)
    for chosen in (config, small):
        results = zip(made.run(chosen), made.eager(), made.exact(), made.factors, strict=True)
        for ours, eager, exact, factor in results:
            assert torch.equal(ours, eager) if factor == 0 else excess(ours, eager, exact, factor) <= 1


def test_operators_run_the_kernels_on_matrices_of_any_strides() -> None:
    torch.manual_seed(0)
    chosen = torch.randint(-1, 4, (6, 2))
    routing = route(chosen, 4)
    x = torch.randn(40, 6).T[:, 3:36].requires_grad_()  # columns not contiguous, and not aligned
    weights = torch.rand(2, 6).T.requires_grad_()
    out = unpermute(permute(x, routing), routing, weights)
    here = (chosen >= 0)[..., None] * weights[..., None]
    true = (x[:, None] * here).sum(1)
    assert torch.allclose(out, true, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(out)
    found, expected = (torch.autograd.grad(y, (x, weights), grad) for y in (out, true))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_stays_with_its_token() -> None:
    routing = route(torch.tensor([[0, 1], [1, 0], [2, 0]]), 2)
    x = torch.ones(3, 5)
    x[1, 2] = torch.nan
    weights = torch.ones(3, 2)
    weights[2, 0] = torch.inf  # weight of an expert that is not on this rank
    rows = permute(x, routing)
    rows[-1] = torch.nan
    out = unpermute(rows, routing, weights)
    assert out.isnan().nonzero().tolist() == [[1, 2]]


def test_rows_far_apart_are_found() -> None:
    """Rows span more than 2^31 elements; only the touched pages of the allocation take memory."""
    far = torch.empty(2**31 + 2**10, dtype=torch.float16).as_strided((3, 20), (2**30 + 16, 1))
    x, routing = torch.randn(3, 20).half(), route(torch.tensor([[0], [1], [0]]), 2)
    far.copy_(x)
    weights = torch.rand(3, 1)
    assert torch.equal(permute(far, routing), permute(x, routing))
    assert torch.equal(unpermute(far, routing, weights), unpermute(x, routing, weights))
