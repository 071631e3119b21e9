"""Results that recomputation takes from the first pass."""

from __future__ import annotations

from typing import Any

import torch

from partool_runtime.parallel.recompute import kept_contexts


def test_results_that_are_no_tensors_are_kept_too() -> None:
    """Attention on a GPU has results that are None or numbers beside its tensors."""
    library = torch.library.Library("kept_test", "DEF")
    library.define("attend(Tensor x) -> (Tensor, Tensor?, int, Tensor[])")
    calls = []

    def attend(x: torch.Tensor) -> tuple[Any, ...]:
        calls.append(1)
        return x * 2, None, 7, [x + 1]

    library.impl("attend", attend, "CPU")
    operator = torch.ops.kept_test.attend.default
    first, second = kept_contexts({operator})
    x = torch.arange(3.0)
    with first:
        want = operator(x)
    with second:
        found = operator(x)
    assert len(calls) == 1
    assert found[1:3] == (None, 7) == want[1:3]
    assert torch.equal(found[0], 2 * x)
    assert torch.equal(found[3][0], x + 1)
