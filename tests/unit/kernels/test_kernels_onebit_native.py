"""1-bit compression by the compiled library: its bits are those of the torch form, at odd sizes, on every build."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partool_kernels import _native, isa
from partool_kernels.onebit import native
from partool_kernels.onebit.op import OneBitTensor, pack, reference_pack, reference_unpack, unpack

pytestmark = pytest.mark.skipif(isa() is None, reason="nothing was compiled: a C++ compiler is missing")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(0, 3000),
    chunk=st.sampled_from([512, 1024]),
    norm=st.sampled_from(["l1", "l2"]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_bits_and_errors_are_those_of_the_torch_form(
    size: int, chunk: int, norm: str, dtype: torch.dtype, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(size, generator=random).to(dtype)
    error = torch.randn(size, generator=random).to(wide)
    x[: size // 7], error[: size // 7] = 0.0, 0.0  # zero is sent as +1
    bits, scales, lost = reference_pack(x, error, chunk, norm)
    assert native.takes("auto", x, error)
    packed = pack(x, error, chunk, norm)
    assert torch.equal(packed.bits, bits)
    close = {"rtol": 1e-13, "atol": 1e-13} if wide == torch.float64 else {"rtol": 2e-6, "atol": 1e-6}
    torch.testing.assert_close(packed.scales, scales, **close)
    torch.testing.assert_close(error, lost, **close)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 2000), senders=st.integers(1, 5), dtype=st.sampled_from(TYPES))
def test_means_are_those_of_the_torch_form(size: int, senders: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(size)
    wide = torch.promote_types(dtype, torch.float32)
    chunks = -(-size // 512)
    bits = torch.randint(0, 256, (senders, chunks, 64), generator=random, dtype=torch.uint8)
    scales = torch.rand(senders, chunks, generator=random, dtype=wide)
    ours = unpack(OneBitTensor(bits, scales), size, dtype)
    torch.testing.assert_close(ours, reference_unpack(bits, scales, size, dtype), rtol=8e-3, atol=1e-6)
    if dtype == wide:
        torch.testing.assert_close(ours, reference_unpack(bits, scales, size, dtype), rtol=2e-6, atol=1e-7)


def test_all_builds_give_the_same_bits() -> None:
    lib = _native.library()
    assert lib is not None
    found = []
    before = _native.isa()
    assert before is not None
    try:
        for name in _native.isas():
            assert lib.partool_set_isa(name.encode()) == 0
            x, error = torch.randn(5001, generator=torch.Generator().manual_seed(5)), torch.zeros(5001)
            packed = pack(x, error, 2048, "l1")
            found.append((*packed, error, unpack(packed, 5001)))
    finally:
        lib.partool_set_isa(before.encode())
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))
    assert len(found) >= 1


def test_what_is_no_number_spoils_only_its_chunk() -> None:
    x, error = torch.ones(1024), torch.zeros(1024)
    x[600] = torch.nan
    packed = pack(x, error, 512, "l1")
    assert packed.scales.isfinite().tolist() == [True, False]
    assert not packed.bits[1, (600 - 512) // 8] & 1  # not a number is not above zero


def test_arguments_are_checked() -> None:
    lib = _native.library()
    assert lib is not None
    assert lib.partool_onebit_pack(None, 0, None, 2, 0, 512, 0, None, None) == -1
    assert lib.partool_onebit_pack(None, 0, None, 0, 0, 12, 0, None, None) == -1
    assert lib.partool_onebit_unpack(None, None, 0, 1, 1, 512, 513, None, 0) == -1
    assert not native.takes("torch", torch.ones(3))
