"""Log-likelihoods of rows of labels: what tasks of an evaluation ask of a model (docs/guide/evaluation.md).

The passes of a training or an evaluation run without gradients; in place of the loss the model yields the scores of
single labels, which are summed by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch
from partool_runtime.losses import put_around_loss
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.passes import BeforePass, Passes


class Scoring:
    """Puts the scores of labels in the place of a rank's loss, as long as it is asked for them."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        """Take the loss of tokens of ``model``; what is put around it later does not change the scores."""
        self._ranks = ranks
        self._of_tokens: Callable[..., torch.Tensor] | None = None
        self._micro: MicroBatch | None = None
        self._sums_2R: torch.Tensor | None = None
        self.passes: Passes | None = None
        """Passes of the model, which the caller sets once there are any."""
        put_around_loss(model, self._learn)

    def put(self, model: nn.Module) -> None:
        """Put the scores around the loss of ``model``, which stays what it is outside of :meth:`rows`."""
        put_around_loss(model, self._around)

    def before(self, other: BeforePass | None) -> BeforePass:
        """Return the function that learns of each pass, for this object and for ``other``."""

        def both(micro: MicroBatch) -> None:
            self._micro = micro
            if other is not None:
                other(micro)

        return both

    def rows(self, batches: Sequence[MicroBatch], count: int, stopping: Callable[[], bool]) -> torch.Tensor | None:
        """Return of each of ``count`` rows the sum of its labels' log-probabilities, and its labels that are not first.

        ``batches`` are this rank's micro-batches; ``first`` of each is the number of its first row, rows from ``count``
        on are padding. The result is float64 ``[2, count]``, the same on all ranks, on the CPU. None once ``stopping``,
        which ranks agree on, returns True. A collective of all ranks.
        """
        assert self.passes is not None, "prepare() has set them"
        device = self._ranks.device
        most = max([count, *(micro.first + len(micro.tokens_BS) for micro in batches)])
        self._sums_2R = torch.zeros((2, most), dtype=torch.float64, device=device)
        try:
            ended = self.passes.evaluate(batches, stopping) is None
            sums_2R = self._sums_2R[:, :count].contiguous()
        finally:
            self._sums_2R = None
        if ended:
            return None
        if self._ranks.tp.place:  # tensor ranks have the same sums, which one of them counts
            sums_2R.zero_()
        return sum_over(sums_2R, self._ranks.world).cpu()

    def _learn(self, before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        self._of_tokens = before
        return before

    def _around(self, before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def loss(*args: Any, **how: Any) -> torch.Tensor:
            if self._sums_2R is None:
                return before(*args, **how)
            assert self._of_tokens is not None, "it was learnt"
            return self._add(self._of_tokens(*args, **how, reduction="scores"))

        return loss

    def _add(self, scores_2BS: torch.Tensor) -> torch.Tensor:
        """Add the scores of a micro-batch to the sums of its rows; return a loss of 0."""
        micro, sums_2R = self._micro, self._sums_2R
        assert micro is not None, "passes name the micro-batch"
        assert sums_2R is not None, "scores were asked for"
        labelled_BS = micro.labels_BS.to(scores_2BS.device) != IGNORED_LABEL
        rows = slice(micro.first, micro.first + scores_2BS.shape[1])
        sums_2R[0, rows] -= scores_2BS[0].double().sum(1)
        sums_2R[1, rows] += (labelled_BS & (scores_2BS[1] == 0.0)).sum(1)
        return scores_2BS.new_zeros(())
