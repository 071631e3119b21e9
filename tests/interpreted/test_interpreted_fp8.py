"""FP8 quantisation and products in Triton's interpreter: the same bits as torch, but for the order of sums."""

from __future__ import annotations

import pytest
import torch

from partool_kernels import fp8_linear as linear
from partool_kernels.cases import FORWARD, excess
from partool_kernels.fp8.formats import quantised
from partool_kernels.fp8.op import quantise
from partool_kernels.fp8_linear import fp8_linears
from partool_kernels.gemm_a8w8.op import launch
from partool_kernels.registry import Config
from partool_runtime.fused.self_check import check_fp8

TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def numbers(rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.logspace(-6, 6, columns)


def assert_same(x: torch.Tensor, flags: str, dtype: torch.dtype) -> None:
    """Assert that the kernel's bits equal torch's."""
    for ours, theirs in zip(quantise(x, flags, dtype), quantise(x, flags, dtype, mode="torch"), strict=True):
        assert torch.equal(ours.q.view(torch.uint8), theirs.q.view(torch.uint8))
        assert torch.equal(ours.scale.isnan(), theirs.scale.isnan())
        assert torch.equal(ours.scale.nan_to_num(), theirs.scale.nan_to_num())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "flags", ["plain", "turned", "plain turned", "plain square", "turned square", "plain turned power"]
)
def test_bits_are_those_of_torch(flags: str, dtype: torch.dtype) -> None:
    x = numbers(131, 200)
    x[:128, :128] = 0.0
    x[130, 7], x[129, 150] = float("inf"), float("nan")
    assert_same(x, flags, dtype)


def test_every_tie_goes_to_the_even_number() -> None:
    # Midpoints between neighbouring values of the type, and values slightly above and below each.
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, halves, halves * (1 + 1e-6), halves * (1 - 1e-6)])
    x = torch.cat([x, -x])[: 128 * 7].view(7, 128)
    x[:, 0] = 448.0  # a scale of 1
    assert_same(x, "plain", torch.float8_e4m3fn)


def test_any_strides() -> None:
    x = numbers(70, 37)
    assert_same(x.T, "plain turned", torch.float8_e4m3fn)
    assert_same(x[:, 3:20], "plain turned", torch.float8_e4m3fn)
    assert_same(x[:1].expand(9, 37), "plain turned", torch.float8_e4m3fn)


def test_offsets_beyond_two_to_the_31() -> None:
    # The stride itself still fits 32 bits; only its product with a row's index does not.
    apart = 2**30 + 8
    memory = torch.empty(2 * apart + 32, dtype=torch.float16)  # only the pages that are touched take memory
    x = memory.as_strided((3, 32), (apart, 1))
    x.copy_(torch.randn(3, 32))
    assert_same(x, "plain turned", torch.float8_e4m3fn)
    narrow, _ = quantise(x, "plain")
    wide = torch.empty(2 * apart + 32, dtype=torch.uint8).view(torch.float8_e4m3fn).as_strided((3, 32), (apart, 1))
    wide.copy_(narrow.q)
    config = Config((("BLOCK_M", 16), ("BLOCK_N", 16), ("GROUP_M", 1), ("SPLIT", 1)))
    near = launch(narrow, narrow, torch.float32, config)
    assert torch.equal(launch(narrow._replace(q=wide), narrow, torch.float32, config), near)
    assert torch.equal(launch(narrow, narrow._replace(q=wide), torch.float32, config), near)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tile", "split"), [(TYPES[0], (16, 128), 1), (TYPES[1], (64, 64), 2), (TYPES[0], (32, 256), 3)]
)
def test_products_are_as_exact_as_those_of_torch(
    dtype: torch.dtype, tile: tuple[int, int], split: int, square: bool
) -> None:
    a = quantised(numbers(70, 300) / 1e6, dtype, square=False, power_of_two=False)
    b = quantised(numbers(290, 300) / 1e6, dtype, square=square, power_of_two=False)
    blocks = (("BLOCK_M", tile[0]), ("BLOCK_N", tile[1]), ("GROUP_M", 2), ("SPLIT", split))
    for out in (torch.float32, torch.float16):
        found = launch(a, b, out, Config(blocks))
        eager, exact = (a.wide().to(t) @ b.wide().to(t).T for t in (out, torch.float64))
        assert excess(found, eager, exact, FORWARD) <= 1


def test_more_parts_than_blocks_of_the_sum() -> None:
    a, b = (quantised(numbers(rows, 140), TYPES[0], square=False, power_of_two=False) for rows in (5, 7))
    config = Config((("BLOCK_M", 16), ("BLOCK_N", 16), ("GROUP_M", 8), ("SPLIT", 4)))
    assert torch.allclose(launch(a, b, torch.float32, config), a.wide() @ b.wide().T, rtol=1e-5)


def test_linear_maps_are_those_of_torch() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 3, 140, requires_grad=True)
    weights = [torch.randn(rows, 140, requires_grad=True) for rows in (5, 131)]
    grads = [torch.randn(2, 3, rows) for rows in (5, 131)]
    found = []
    for mode in ("auto", "torch"):
        out = fp8_linears(x, weights, mode=mode)
        found.append([*out, *torch.autograd.grad(out, [x, *weights], grads)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_products_are_checked_on_the_device_before_they_train(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert check_fp8(48, 80, device) == ""
    right = linear.product
    monkeypatch.setattr(
        linear, "product", lambda a, b, dtype, mode: right(a, b, dtype, mode) * (1 + (mode != "torch") / 50)
    )
    assert check_fp8(48, 80, device).startswith("results differ by 0.0")
    monkeypatch.setattr(linear, "product", lambda *arguments: 1 / 0)
    assert check_fp8(48, 80, device) == "ZeroDivisionError: division by zero"
