"""1-bit compression as operators: results of the torch fallback, and refused inputs."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.onebit.op import OneBitTensor, pack, unpack


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_sent_and_what_is_lost_add_up(norm: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    x, error = torch.randn(11, 131, dtype=dtype), torch.randn(11, 131, dtype=wide)
    x[0, :3], error[0, :3] = 0.0, 0.0
    before = error.clone()
    packed = pack(x, error, 512, norm)
    assert packed.bits.shape == (3, 64)
    assert packed.scales.dtype == wide
    whole = (x.to(wide) + before).flatten()
    last = whole[1024:]
    scale = last.abs().mean() if norm == "l1" else last.square().mean().sqrt()
    assert torch.allclose(packed.scales[2], scale, rtol=1e-6)
    sent = unpack(packed, x.numel(), wide)
    assert torch.equal(sent.sign(), torch.where(whole >= 0, 1, -1).to(wide))  # zero is sent as +1
    assert torch.allclose(sent + error.flatten(), whole, rtol=1e-6, atol=1e-6)
    assert int(packed.bits[2, -1]) == 0  # padding


def test_errors_that_are_fed_back_are_not_lost() -> None:
    torch.manual_seed(1)
    gradient, error, sent = torch.randn(700).double(), torch.zeros(700).double(), torch.zeros(700).double()
    for _ in range(400):
        sent += unpack(pack(gradient, error, 512), 700, torch.float64)
    assert torch.allclose(sent / 400 + error / 400, gradient, rtol=1e-10, atol=1e-10)
    assert float((sent / 400 - gradient).abs().mean()) < 0.01


def test_several_senders_are_averaged() -> None:
    torch.manual_seed(2)
    packs = [pack(torch.randn(1500), torch.zeros(1500), 512) for _ in range(3)]
    alone = torch.stack([unpack(one, 1500, torch.float64) for one in packs]).mean(0)
    together = unpack(OneBitTensor(*(torch.stack(parts) for parts in zip(*packs, strict=True))), 1500)
    assert torch.allclose(together.double(), alone, rtol=1e-6, atol=1e-7)


def test_operators_are_what_their_registrations_say() -> None:
    x, error = torch.randn(600), torch.zeros(600)
    torch.library.opcheck(torch.ops.partool.onebit_pack, (x, error, 512, "l2", "auto"))
    packed = pack(x, error, 512)
    inputs = (packed.bits[None], packed.scales[None], 600, torch.bfloat16, "auto")
    torch.library.opcheck(torch.ops.partool.onebit_unpack, inputs)


def test_nothing_and_what_is_no_number() -> None:
    packed = pack(torch.empty(0), torch.empty(0))
    assert unpack(packed, 0).shape == (0,)
    x, error = torch.ones(1024), torch.zeros(1024)
    x[600] = torch.inf
    packed = pack(x, error, 512)
    assert packed.scales.isfinite().tolist() == [True, False]
    assert error[:512].eq(0).all()


def test_what_does_not_fit_is_refused() -> None:
    x, packed = torch.zeros(4, 6), OneBitTensor(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2))
    for error in (torch.zeros(24), torch.zeros(4, 6, dtype=torch.float64), torch.zeros(6, 4).T):
        with pytest.raises(ValueError, match=r"x \[4, 6\] float32 on cpu: contiguous"):
            pack(x, error)
    with pytest.raises(ValueError, match="float32"):
        pack(torch.zeros(3, dtype=torch.int32), torch.zeros(3))
    with pytest.raises(ValueError, match="chunks of 1000"):
        pack(x, torch.zeros(4, 6), 1000)
    with pytest.raises(ValueError, match="norm 'max'"):
        pack(x, torch.zeros(4, 6), norm="max")
    for size in (512, 1025):
        with pytest.raises(ValueError, match=rf"\[2, 64\] uint8 .* are not those of {size} elements"):
            unpack(packed, size)
    with pytest.raises(ValueError, match=r"scales \[3\]"):
        unpack(OneBitTensor(packed.bits, torch.zeros(3)), 1000)
