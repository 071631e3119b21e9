"""1-bit compression in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import case, excess
from partool_kernels.onebit.op import pack, unpack
from partool_kernels.registry import KERNELS, Request


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [1300, 1024, 3])
def test_packing_is_as_exact_as_torch_and_bits_are_equal(norm: str, dtype: str, size: int) -> None:
    request = Request("onebit_pack", "sm_90", (dtype,), (("chunk", 512),), size, (norm,))
    made = case(request, torch.device("cpu"))
    results = zip(made.run(KERNELS["onebit_pack"].default(request)), made.eager(), made.exact(), strict=True)
    for (ours, eager, exact), factor in zip(results, made.factors, strict=True):
        assert torch.equal(ours, exact) if factor == 0 else excess(ours, eager, exact, factor) <= 1


@pytest.mark.parametrize("senders", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unpacking_is_as_exact_as_torch(senders: int, dtype: str) -> None:
    shape = (("chunk", 1024), ("senders", senders))
    request = Request("onebit_unpack", "sm_90", (dtype,), shape, 2100)
    made = case(request, torch.device("cpu"))
    for config in KERNELS["onebit_unpack"].configs(request):
        results = zip(made.run(config), made.eager(), made.exact(), made.factors, strict=True)
        assert all(excess(*result) <= 1 for result in results)


def test_operators_run_the_kernels_and_keep_what_is_lost() -> None:
    torch.manual_seed(0)
    x, error = torch.randn(33, 40).T, torch.zeros(40, 33)
    x[7, 7] = -0.0
    packed = pack(x, error, 512)
    assert torch.allclose(unpack(packed, x.numel()).view(40, 33) + error, x, atol=1e-6)
    by_torch = torch.zeros(40, 33)
    assert torch.equal(packed.bits, pack(x, by_torch, 512, mode="torch").bits)
    assert torch.allclose(error, by_torch, atol=1e-6)
    x[0, 0] = torch.nan
    assert pack(x, error, 512).scales.isnan().tolist() == [True, False, False]
