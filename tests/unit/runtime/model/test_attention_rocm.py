"""Attention's kernels by name where builds of torch for CUDA and for ROCm differ; the kernels are emulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partool_runtime.model import kernels


@pytest.mark.parametrize(("hip", "queries", "rows"), [(None, 40, 64), ("6.4", 40, 40), (None, 64, 64), ("6.4", 64, 64)])
def test_logarithms_are_padded_for_cuda_only(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, queries: int, rows: int
) -> None:
    """The efficient kernel of ROCm views the logarithms as [batch x heads, queries]; the kernel is emulated."""
    seen: list[torch.Size] = []

    def emulated(*args: Any, scale: float) -> tuple[torch.Tensor, ...]:
        assert scale == 8**-0.5
        seen.append(args[6].shape)
        return args[1], args[2], args[3], args[4]

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(kernels, "_kernel", lambda *_: "efficient")
    monkeypatch.setattr(kernels, "_aten", SimpleNamespace(_scaled_dot_product_efficient_attention_backward=emulated))
    q_BNQD, k_BKSD = torch.zeros(2, 4, queries, 8), torch.zeros(2, 2, 24, 8)
    grads = kernels.backward(q_BNQD, (q_BNQD, k_BKSD, k_BKSD), (q_BNQD, torch.zeros(2, 4, queries)), kernels.Sight())
    assert seen == [torch.Size([2, 4, rows])]
    assert [grad.shape for grad in grads] == [q_BNQD.shape, k_BKSD.shape, k_BKSD.shape]
