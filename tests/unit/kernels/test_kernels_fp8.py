"""FP8 quantisation, products and linear layers: the reference, and the operators' contracts."""

from __future__ import annotations

import pytest
import torch

from partool_kernels import device
from partool_kernels import fp8_linear as linear
from partool_kernels.fp8 import op as fp8_op
from partool_kernels.fp8.formats import LARGEST, Quantised, blocks, quantised
from partool_kernels.fp8.op import quantise
from partool_kernels.fp8_linear import fp8_linears, product
from partool_kernels.gemm_a8w8 import op as gemm_op
from partool_kernels.gemm_a8w8.op import gemm_a8w8

OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
TYPES = (OCP, FNUZ)


def numbers(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers over twelve orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, columns)


def by_hand(narrow: Quantised, row_block: int) -> torch.Tensor:
    """Return the dequantised numbers, with each scale looked up by index."""
    rows, columns = narrow.q.shape
    i, j = torch.arange(rows)[:, None] // row_block, torch.arange(columns)[None, :] // 128
    return narrow.q.double() * narrow.scale.double()[j, i]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("flags", ["", "square", "power", "power square"])
def test_numbers_are_the_nearest_ones_of_their_block(dtype: torch.dtype, flags: str) -> None:
    x = numbers(131, 300)
    x[:128, 128:256] = 0.0
    square = "square" in flags
    plain, turned = quantise(x, f"plain turned {flags}", dtype)
    for narrow, given in ((plain, x), (turned, x.T)):
        step = 128 if square else 1
        wide = by_hand(narrow, step)
        assert torch.equal(narrow.wide(), wide.float())
        scale = wide.new_tensor(0) + narrow.scale.double()[
            torch.arange(given.shape[1])[None, :] // 128, torch.arange(given.shape[0])[:, None] // step
        ]  # fmt: skip
        # Three mantissa bits: an error of at most 1/16; below the smallest normal number the step is fixed.
        finest = torch.finfo(dtype).smallest_normal / 8
        assert ((wide - given.double()).abs() <= given.double().abs() / 15.9 + scale * finest / 1.99).all()
        if square:
            assert torch.equal(plain.q, turned.q.T)
    assert (plain.scale[1, :1] == 1).all()
    powers = torch.frexp(plain.scale).mantissa == 0.5
    assert powers.all() if "power" in flags else not powers.all()


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_number_of_a_block_is_the_largest_of_the_type(dtype: torch.dtype) -> None:
    narrow = quantised(numbers(5, 300), dtype, square=False, power_of_two=False)
    parts = narrow.q.float().abs().split(128, dim=1)
    assert all((part.amax(1) == LARGEST[dtype]).all() for part in parts)


def test_what_is_not_finite_makes_its_block_no_number_and_no_other() -> None:
    x = numbers(3, 256)
    x[0, 3], x[2, 200] = float("inf"), float("nan")
    narrow, _ = quantise(x, "plain")
    assert narrow.scale.isnan().tolist() == [[True, False, False], [False, False, True]]
    assert not narrow.q.float().isnan().any()
    weight, _ = quantise(numbers(4, 256, seed=1), "plain square")
    assert gemm_a8w8(narrow, weight, torch.float32).isnan().all(1).tolist() == [True, False, True]


def test_numbers_at_both_ends_of_float32_keep_their_size() -> None:
    for size in (3e38, 1e-37, 1e-40):
        narrow, _ = quantise(torch.full((1, 2), size), "plain")
        assert narrow.scale.isfinite().all()
        assert narrow.wide()[0, 0].item() == pytest.approx(size, rel=0.07, abs=1e-40)


@pytest.mark.parametrize("flags", ["plain", "turned", "plain turned square"])
def test_quantising_is_what_its_registrations_say(flags: str) -> None:
    torch.library.opcheck(torch.ops.partool.fp8_quantise, (numbers(5, 130), flags, OCP, "auto"))


@pytest.mark.parametrize("square", [False, True])
def test_products_are_those_of_the_numbers(square: bool) -> None:
    a, b = (
        quantised(numbers(rows, 300, seed) / 1e6, OCP, square=wide, power_of_two=False)
        for rows, seed, wide in ((5, 1, False), (131, 2, square))
    )
    exact = by_hand(a, 1) @ by_hand(b, 128 if square else 1).T
    out = gemm_a8w8(a, b, torch.float32)
    assert float((out - exact).abs().max()) <= 1e-6 * float(exact.abs().max())
    inputs = (a.q, a.scale, b.q, b.scale, torch.bfloat16, "auto")
    # Without opcheck's test that inputs are not mutated, which does arithmetic in the inputs' own type.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.partool.gemm_a8w8, inputs, test_utils=checks)


@pytest.mark.parametrize("empty", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_products_of_nothing(empty: tuple[int, int, int]) -> None:
    m, n, k = empty
    a, _ = quantise(torch.ones(m, k), "plain")
    b, _ = quantise(torch.ones(n, k), "plain square")
    assert a.scale.shape == (blocks(k), m)
    assert torch.equal(gemm_a8w8(a, b, torch.float32), torch.zeros(m, n))


def test_linear_maps_are_the_three_products() -> None:
    x = (numbers(6, 140) / 1e6).view(2, 3, 140).requires_grad_()
    weights = [numbers(rows, 140, rows).div(1e6).requires_grad_() for rows in (5, 131)]
    out = fp8_linears(x, weights)
    grads = [torch.randn(2, 3, rows) for rows in (5, 131)]
    found = torch.autograd.grad(out, [x, *weights], grads)
    rows = x.detach().view(6, 140)
    wide_x, turned_x = (by_hand(part, 1) for part in quantise(rows, "plain turned"))
    of_input = torch.zeros(6, 140, dtype=torch.float64)
    for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        wide_weight = by_hand(quantise(weight, "plain square")[0], 128)
        plain, turned = (by_hand(part, 1) for part in quantise(grad.view(6, -1), "plain turned"))
        near(out[index].view(6, -1), wide_x @ wide_weight.T)
        near(found[1 + index], turned @ turned_x.T)
        of_input += plain @ wide_weight
    near(found[0].view(6, 140), of_input)


def near(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert float((found.detach() - exact).abs().max()) <= 1e-6 * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_maps_are_what_their_registrations_say(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 7, dtype=dtype, requires_grad=True)
    weights = [torch.randn(rows, 7, dtype=dtype, requires_grad=rows > 4) for rows in (5, 4)]
    torch.library.opcheck(torch.ops.partool.fp8_linears, (x, weights, OCP, "auto"))


def test_linear_maps_of_no_rows_and_of_strange_strides() -> None:
    weight = torch.randn(5, 7, requires_grad=True)
    fp8_linears(torch.randn(2, 0, 7), [weight])[0].sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    x = torch.randn(7, 3).T  # columns are not contiguous, nor are those of the gradient of a sum
    x.requires_grad_()
    (out,) = fp8_linears(x, [weight.detach()])
    assert torch.equal(out, fp8_linears(x.detach().contiguous(), [weight.detach()])[0])
    out.sum().backward()
    assert x.grad is not None
    assert float((x.grad - weight.detach().sum(0)).abs().max()) <= 0.05 * float(weight.detach().abs().sum())


def test_only_what_is_trained_gets_gradients() -> None:
    x, weight = torch.randn(3, 7), torch.randn(5, 7, requires_grad=True)
    (out,) = fp8_linears(x, [weight])
    out.sum().backward()
    assert weight.grad is not None
    assert x.grad is None


def test_products_are_those_of_the_kernel_unless_the_fastest_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(linear, "uses_triton_8bit", lambda *arguments: True)
    monkeypatch.setattr("partool_kernels.select.here.selector", lambda device: "selector")
    monkeypatch.setattr("partool_kernels.select.products.scaled", lambda *arguments: asked.append("fastest"))
    monkeypatch.setattr(linear, "gemm_a8w8", lambda *arguments: asked.append("kernel"))

    class OnGpu(torch.Tensor):
        is_cuda = True

    for rows, mode in ((16, "auto"), (16, "native"), (17, "auto")):
        a, b = (Quantised(torch.zeros(n, 32).as_subclass(OnGpu), torch.zeros(1, n)) for n in (rows, 48))
        product(a, b, torch.bfloat16, mode)
    assert asked == ["fastest", "kernel", "kernel"]


@pytest.mark.parametrize(("name", "able"), [("sm_80", ()), ("sm_90", (OCP,)), ("gfx942", (FNUZ,)), ("gfx950", (OCP,))])
def test_kernels_take_only_the_type_that_the_architecture_multiplies(
    monkeypatch: pytest.MonkeyPatch, name: str, able: tuple[torch.dtype, ...]
) -> None:
    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    monkeypatch.setattr(device, "uses_triton", lambda *arguments: True)
    monkeypatch.setattr(device, "architecture", lambda gpu: name)
    x = torch.zeros(3, 4).as_subclass(OnGpu)
    for dtype in TYPES:
        assert device.uses_triton_8bit("auto", dtype, x) is (dtype in able)
        if dtype not in able:
            with pytest.raises(RuntimeError, match=f"but {name} has no float8_e4m3fn"):
                device.uses_triton_8bit("native", dtype, x)


def test_operators_ask_for_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    for module in (fp8_op, gemm_op):
        monkeypatch.setattr(module, "uses_triton_8bit", lambda mode, dtype, *tensors: bool(asked.append(dtype)))
    narrow = quantise(torch.ones(3, 4), "plain", FNUZ)[0]
    assert torch.equal(gemm_a8w8(narrow, narrow, torch.float32), torch.full((3, 3), 4.0))
    assert asked == [FNUZ, FNUZ]


def test_autocast_does_not_round_what_8_bits_stand_for() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 40), torch.randn(7, 40)
    (wanted,) = fp8_linears(x, [weight], mode="torch")
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = fp8_linears(x, [weight], mode="torch")
    assert torch.equal(found, wanted)


def test_bad_inputs_are_refused() -> None:
    good = quantise(torch.ones(3, 130), "plain")[0]
    other = quantise(torch.ones(4, 130), "plain square")[0]
    with pytest.raises(ValueError, match=r"not \[2, 3, 4\]"):
        quantise(torch.zeros(2, 3, 4), "plain")
    with pytest.raises(ValueError, match="no 8-bit type"):
        quantise(torch.zeros(3, 4), "plain", torch.float8_e5m2)
    with pytest.raises(ValueError, match="no flag rows"):
        quantise(torch.zeros(3, 4), "plain rows")
    with pytest.raises(ValueError, match=r"\[3, 130\] and \[4, 7\] have no common inner width"):
        gemm_a8w8(good, quantise(torch.ones(4, 7), "plain")[0], torch.float32)
    with pytest.raises(ValueError, match=r"float8_e4m3fn on cpu and torch\.float8_e4m3fnuz"):
        gemm_a8w8(good, quantise(torch.ones(4, 130), "plain", FNUZ)[0], torch.float32)
    with pytest.raises(ValueError, match=r"first matrix are \[3, 2\] torch.float32, not \[2, 3\] float32"):
        gemm_a8w8(Quantised(good.q, good.scale.T), other, torch.float32)
    with pytest.raises(ValueError, match=r"second matrix are \[2, 2\] torch.float32, not \[2, 4\] or \[2, 1\] float32"):
        gemm_a8w8(good, Quantised(other.q, torch.ones(2, 2)), torch.float32)
    with pytest.raises(ValueError, match=r"\[2, 6\] does not fit a weight \[5, 7\]"):
        fp8_linears(torch.zeros(2, 6), [torch.zeros(5, 7)])
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu and torch\.bfloat16"):
        fp8_linears(torch.zeros(2, 7), [torch.zeros(5, 7, dtype=torch.bfloat16)])
