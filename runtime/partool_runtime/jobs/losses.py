"""Losses without gradients, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.passes import Passes


def sharers(ranks: Ranks) -> int:
    """Return the number of ranks that count the same tokens: those of a pipeline and those that share sequences."""
    return ranks.pp.size * ranks.cp.size * ranks.tp.size


def labels_of(batch: Sequence[MicroBatch], device: torch.device) -> torch.Tensor:
    """Return the number of labels in a rank's micro-batches, a float64 scalar on ``device``."""
    count = sum(int((micro.labels_BS != IGNORED_LABEL).sum()) for micro in batch)
    # The value is filled in on the device: a copy from the host would wait for all earlier work.
    return torch.full((), count, dtype=torch.float64, device=device)


def loss_over(passes: Passes, ranks: Ranks, batches: Iterable[MicroBatch]) -> tuple[float, int]:
    """Return the sum of the token losses of all ranks' micro-batches, in nats, and the number of these tokens."""
    result = loss_until(passes, ranks, batches, lambda: False)
    assert result is not None, "nothing stops it"
    return result


@torch.no_grad()
def loss_until(
    passes: Passes, ranks: Ranks, batches: Iterable[MicroBatch], stopping: Callable[[], bool]
) -> tuple[float, int] | None:
    """Return what :func:`loss_over` returns, or None once ``stopping`` returns True.

    ``stopping`` is called before each micro-batch and must return the same value on all ranks.
    """
    counted = torch.zeros((), dtype=torch.float64, device=ranks.device)

    def seen() -> Iterator[MicroBatch]:
        for micro in batches:
            yield micro
            counted.add_(labels_of([micro], ranks.device))

    loss_sum = passes.evaluate(seen(), stopping)
    if loss_sum is None:
        return None
    total, tokens = sum_over(torch.stack([loss_sum, counted]), ranks.world).tolist()
    return total / ranks.tp.size, int(tokens / sharers(ranks))  # all tensor ranks hold the same loss
