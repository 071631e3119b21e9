"""The error bound itself: wrong results that it must reject."""

from __future__ import annotations

import pytest
import torch

from partool_kernels.cases import excess


def test_torchs_own_overflow_lets_nothing_pass() -> None:
    exact = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sound, wrong = exact.half(), exact.flip(0).half()
    for bad in (torch.inf, -torch.inf, torch.nan):
        eager = exact.half()
        eager[0] = bad
        assert excess(wrong, eager, exact) > 1
        assert excess(sound, eager, exact) <= 1


@pytest.mark.parametrize("beyond", [1e6, torch.inf])
def test_what_its_type_cannot_hold_is_infinite_in_both(beyond: float) -> None:
    exact = torch.tensor([1.0, beyond, 3.0], dtype=torch.float64)
    right, wrong, short = torch.tensor([[1.0, torch.inf, 3.0], [2.0, torch.inf, 3.0], [1.0, 6e4, 3.0]]).half()
    assert excess(right, right, exact) <= 1
    assert excess(wrong, right, exact) > 1
    assert excess(short, right, exact) > 1
