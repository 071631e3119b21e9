"""Losses without gradients, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

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


def counts_of(batch: Sequence[MicroBatch], device: torch.device) -> torch.Tensor:
    """Return what a rank's micro-batches hold: what their losses are divided by, and their labels, ``[2]``, float64.

    The losses of pairs of answers are divided by the pairs, others by the labels.
    """
    labels = labels_of(batch, device)
    pairs = [micro.pairs.count for micro in batch if micro.pairs is not None]
    units = torch.full((), sum(pairs), dtype=torch.float64, device=device) if pairs else labels
    return torch.stack([units, labels])


def loss_over(passes: Passes, ranks: Ranks, batches: Iterable[MicroBatch]) -> tuple[float, int]:
    """Return the sum of the token losses of all ranks' micro-batches, in nats, and the number of these tokens."""
    result = loss_until(passes, ranks, batches, lambda: False)
    assert result is not None, "nothing stops it"
    return result.loss_sum, result.tokens


class Losses(NamedTuple):
    """Losses of all ranks' micro-batches."""

    loss_sum: float
    """Sum of the losses of tokens, or of pairs of answers, in nats."""
    units: int
    """Number of these tokens, or pairs."""
    tokens: int
    """Number of labels."""


@torch.no_grad()
def loss_until(
    passes: Passes, ranks: Ranks, batches: Iterable[MicroBatch], stopping: Callable[[], bool]
) -> Losses | None:
    """Return the losses of all ranks' micro-batches, or None once ``stopping`` returns True.

    ``stopping`` is called before each micro-batch and must return the same value on all ranks.
    """
    counted = torch.zeros(2, dtype=torch.float64, device=ranks.device)

    def seen() -> Iterator[MicroBatch]:
        for micro in batches:
            yield micro
            counted.add_(counts_of([micro], ranks.device))

    loss_sum = passes.evaluate(seen(), stopping)
    if loss_sum is None:
        return None
    total, units, tokens = sum_over(torch.cat([loss_sum[None], counted]), ranks.world).tolist()
    shared = sharers(ranks)
    return Losses(total / ranks.tp.size, int(units / shared), int(tokens / shared))  # tensor ranks hold the same loss
