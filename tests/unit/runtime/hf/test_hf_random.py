"""Random numbers of tensor ranks: equal where all hold the same values, different within sharded parts."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from partool_runtime.parallel.tensor.hf_random import Random


def drawn(rank: int) -> list[torch.Tensor]:
    """Draw before, within and after a sharded part, and within and after a second one."""
    torch.manual_seed(5)
    random, found = Random(rank), [torch.rand(3)]
    for _ in range(2):
        random.enter()
        random.enter()  # parallel matrices (query, key, value) each enter the part
        found.append(torch.rand(3))
        random.leave()
        random.leave()
        found.append(torch.rand(3))
    return found


def test_ranks_draw_alike_outside_and_apart_inside() -> None:
    one, two = drawn(0), drawn(1)
    alike = [torch.equal(a, b) for a, b in zip(one, two, strict=True)]
    assert alike == [True, False, True, False, True]
    assert not torch.equal(one[1], one[3]), "each part draws anew"


def test_recomputation_draws_the_same() -> None:
    random, seen = Random(1), []

    def block(x: torch.Tensor) -> torch.Tensor:
        random.enter()
        kept = torch.nn.functional.dropout(x, 0.5)
        random.leave()
        seen.append(kept.detach())
        return kept * kept

    x = torch.ones(64, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)
    torch.rand(7)
    out.sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_evaluations_draw_from_the_common_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        Random(1).enter()
        assert torch.equal(torch.rand(3), expected)
