"""How far from the truth a kernel may be: no further than torch's own operators in the same precision, or little.

The rule follows the FlashAttention tests (https://github.com/Dao-AILab/flash-attention, tests/test_flash_attn.py):
errors of both against a wider computation are compared, instead of absolute tolerances that hold for no size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FORWARD, BACKWARD = 1.5, 2.0
"""Most error, as a multiple of that of torch's operators, of results and of gradients."""
ULPS = 2.0
"""Allowed besides, in units in the last place of the largest element."""


def excess(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, factor: float = FORWARD) -> float:
    """Return our largest error over the largest that is allowed: above 1 it is wrong.

    ``exact`` is float64, computed from the same inputs; ``ours`` and ``eager`` are of one type. Infinite where ours is
    not finite and the exact result, in its type, is, or the other way round.
    """
    import torch

    if exact.numel() == 0:
        return 0.0
    if not torch.equal(ours.isfinite(), exact.to(ours.dtype).isfinite()):
        return float("inf")
    finite = exact.to(ours.dtype).isfinite()
    mine, theirs, exact = (x.detach().double()[finite] for x in (ours, eager, exact))
    if exact.numel() == 0:
        return 0.0
    unit = torch.finfo(ours.dtype).eps * exact.abs().max()
    # Where torch's operators overflow they allow nothing: else a single such element would let anything pass.
    allowed = factor * (theirs - exact).abs().nan_to_num(nan=0.0, posinf=0.0).max() + ULPS * unit
    return float((mine - exact).abs().max() / allowed.clamp_min(torch.finfo(torch.float64).tiny))
