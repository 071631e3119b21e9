"""The native reduction against exact sums, for every type, at odd sizes, on every instruction set of this machine."""

from __future__ import annotations

import math

import pytest
import torch

import partool_kernels
from partool_kernels import _native
from partool_kernels.reductions import Mode, block_sums, total

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MODES: list[Mode] = ["torch", "native"] if _native.library() else ["torch"]


def finite_sum_squares(x: torch.Tensor, mode: Mode = "auto") -> tuple[float, bool]:
    """Return the sum of squares of all blocks, and whether all elements are finite."""
    blocks, finite = block_sums(x, mode)
    return total(blocks), finite


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1001])
def test_sum_and_verdict(mode: Mode, dtype: torch.dtype, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(dtype)
    squares, finite = finite_sum_squares(x, mode)
    assert finite
    assert squares == pytest.approx(math.fsum(v * v for v in x.double().tolist()), rel=1e-13, abs=0.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 7, 36])
def test_one_bad_element_is_seen(mode: Mode, dtype: torch.dtype, bad: float, at: int) -> None:
    x = torch.ones(37, dtype=dtype)
    x[at] = bad
    assert finite_sum_squares(x, mode)[1] is False


@pytest.mark.parametrize("mode", MODES)
def test_extremes(mode: Mode) -> None:
    half = torch.tensor([6e-8, 65504.0, -6.1e-5], dtype=torch.float16)  # subnormal, largest, smallest normal
    assert finite_sum_squares(half, mode)[0] == pytest.approx(float(half.double().square().sum()), rel=1e-14)
    single = torch.full((40,), torch.finfo(torch.float32).max)
    assert finite_sum_squares(single, mode) == (
        pytest.approx(40 * float(single[0].double()) ** 2, rel=1e-14),
        True,
    )
    # Finite values whose squares overflow: the sum is infinite, but the values count as finite.
    assert finite_sum_squares(torch.full((3,), 1e200, dtype=torch.float64), mode) == (math.inf, True)


def test_non_contiguous_and_integer_codes_fall_back() -> None:
    x = torch.arange(24.0).reshape(4, 6).t()
    assert finite_sum_squares(x)[0] == pytest.approx(float(x.square().sum()), rel=1e-14)


@pytest.mark.skipif(_native.library() is None, reason="no compiled library")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype) -> None:
    lib = _native.library()
    assert lib is not None
    x = torch.randn(10007, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    before, seen = _native.isa() or "", set()
    try:
        for name in _native.isas():
            assert lib.partool_set_isa(name.encode()) == 0
            seen.add(finite_sum_squares(x, "native"))
    finally:
        lib.partool_set_isa(before.encode())
    assert len(seen) == 1


def test_missing_library_is_an_error_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "library", lambda: None)
    x = torch.ones(5)
    assert finite_sum_squares(x) == (pytest.approx(5.0, rel=1e-14), True)
    with pytest.raises(partool_kernels.KernelUnavailableError, match="compiler"):
        finite_sum_squares(x, "native")
