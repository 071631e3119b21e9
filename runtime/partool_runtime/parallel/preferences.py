"""The loss of pairs of answers, in place of the sum of token losses (``training.objective``; preferences.md).

The model's loss function yields the loss of each token. These are summed by document, over all ranks that share a
sequence, before the objective compares the documents of a pair. The gradient of a document's sum then scales those of
its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from partool.spec.objective import ObjectiveSpec
from partool_runtime.data.batches import AnswerPairs, MicroBatch
from partool_runtime.mesh import Ranks
from partool_runtime.model.preferences import PairLosses, pair_losses
from partool_runtime.parallel.comm import sum_over

FIGURES = ("pairs", "chosen", "rejected", "accuracy", "log_odds", "logps_chosen", "logps_rejected", "ratio", "tokens")
"""Sums over pairs that a rank keeps: their number, both rewards, the pairs whose chosen answer has the higher reward,
the log odds, the log-probabilities of both answers, and over both answers the logarithm of the ratio to the reference
and the number of trained tokens."""


def means_of(spec: ObjectiveSpec, sums: Sequence[float]) -> dict[str, float]:
    """Return the means over pairs, and the divergence from the reference per token, from sums of :data:`FIGURES`."""
    pairs, *totals, ratio, tokens = sums
    means = {name: total / max(pairs, 1.0) for name, total in zip(FIGURES[1:-2], totals, strict=True)}
    if spec.kind != "orpo":
        del means["log_odds"]
    if spec.has_reference:
        means["kl"] = ratio / max(tokens, 1.0)
    return {**means, "margin": means["chosen"] - means["rejected"], "pairs": pairs}


class PreferenceLoss:
    """The objective of a rank that computes losses; ranks without the last stage only take part in sums over ranks."""

    def __init__(self, spec: ObjectiveSpec, ranks: Ranks) -> None:
        """Open the group of the ranks that share a sequence: a collective of all ranks."""
        self._spec, self._ranks = spec, ranks
        self._sequence: dist.ProcessGroup | None = ranks.groups.of(ranks.cp.parts) if ranks.cp.size > 1 else None
        self._micro: MicroBatch | None = None
        self._sums = {trains: self._zeros() for trains in (True, False)}
        """Sums of :data:`FIGURES` over pairs since they were last read, of passes with and without gradients."""
        self._recorded: list[tuple[npt.NDArray[np.int64], torch.Tensor]] | None = None
        """Documents and their sums of log-probabilities; None unless they are being recorded."""
        self._reference: dict[bytes, torch.Tensor] = {}
        """Sums of the reference's log-probabilities of the next micro-batches, by the numbers of their documents."""

    def begin(self, micro: MicroBatch) -> None:
        """Take the micro-batch whose forward pass is next to compute a loss."""
        self._micro = micro

    def around(self, before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a loss function that yields the sum of the losses of pairs, from one that yields those of tokens."""

        def loss(*args: Any, **how: Any) -> torch.Tensor:
            return self._of_tokens(before(*args, **how, reduction="none"))

        loss.__wrapped__ = before  # type: ignore[attr-defined]
        return loss

    def record(self) -> None:
        """Begin to record the log-probabilities of the documents that pass."""
        self._recorded = []

    def recorded(self, documents: int) -> npt.NDArray[np.float64]:
        """Return the recorded sums over all ranks, NaN for documents that have not passed; a collective of all ranks.

        ``documents`` is their number in the corpus. Nothing more is recorded.
        """
        passed, self._recorded = self._recorded or [], None
        sums_2D = torch.zeros((2, documents), dtype=torch.float64)
        for numbers, log_probabilities_D in passed if self._counts else ():
            index_D = torch.from_numpy(numbers)
            sums_2D[0, index_D] = log_probabilities_D.double().cpu()
            sums_2D[1, index_D] = 1.0
        total_D, times_D = sum_over(sums_2D.to(self._ranks.device), self._ranks.world).cpu()
        means: npt.NDArray[np.float64] = (total_D / times_D).numpy()
        return means

    def passed(self) -> dict[bytes, torch.Tensor]:
        """Return the recorded sums of this rank's micro-batches, by the numbers of their documents, and end recording.

        They are on the rank's device, and empty on ranks that compute no losses.
        """
        passed, self._recorded = self._recorded or [], None
        return {numbers.tobytes(): sums_D for numbers, sums_D in passed}

    def refer(self, sums: dict[bytes, torch.Tensor]) -> None:
        """Take the reference's sums of the micro-batches whose passes follow, as :meth:`passed` returns them."""
        self._reference = sums

    def figures(self, *, trains: bool) -> dict[str, float]:
        """Return the means over the pairs of all ranks since the last call, with the margin; a collective of all ranks.

        ``trains`` selects the passes with gradients.
        """
        sums, self._sums[trains] = self._sums[trains], self._zeros()
        return means_of(self._spec, sum_over(sums, self._ranks.world).tolist())

    @property
    def _counts(self) -> bool:
        """Whether this rank counts its pairs, which the ranks that share its sequences have, too."""
        return self._ranks.cp.place == self._ranks.tp.place == 0

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(len(FIGURES), dtype=torch.float64, device=self._ranks.device)

    def _of_tokens(self, losses_BS: torch.Tensor) -> torch.Tensor:
        micro = self._micro
        assert micro is not None, "passes name the micro-batch"
        assert micro.pairs is not None, "data of preferences come in pairs"
        assert micro.documents_BL is not None, "answers do not attend to each other"
        pairs, device = micro.pairs, losses_BS.device
        if not pairs.count:
            return losses_BS.sum() * 0.0  # a graph like that of other ranks, whose collectives this rank takes part in
        sums_D = self._by_document(losses_BS, pairs, micro.documents_BL)
        if self._recorded is not None:
            self._recorded.append((pairs.numbers_D, sums_D.detach()))
            return sums_D.new_zeros(())
        reference_D = self._reference.get(pairs.numbers_D.tobytes())
        if reference_D is None and pairs.reference_D is not None:
            reference_D = pairs.reference_D.to(device)
        lengths_D = pairs.lengths_D.to(device)
        losses = pair_losses(self._spec, sums_D, lengths_D, reference_D)
        self._note(losses, sums_D.detach() if reference_D is None else sums_D.detach() - reference_D, lengths_D)
        total = losses.loss_P.sum()
        # The ranks of a sequence have the same losses, which one of them counts; each has gradients of its own tokens.
        return total if self._ranks.cp.place == 0 else total - total.detach()

    def _by_document(self, losses_BS: torch.Tensor, pairs: AnswerPairs, documents_BL: torch.Tensor) -> torch.Tensor:
        """Return the sum of the log-probabilities of each document."""
        device = losses_BS.device
        place_BS = documents_BL.to(device) if pairs.index_S is None else documents_BL[:, pairs.index_S].to(device)
        place_BS = place_BS + pairs.first_B.to(device)[:, None]
        # Rows without documents have no labels, and their place may lie behind the last document.
        place_T = place_BS.flatten().clamp(max=len(pairs.numbers_D) - 1)
        sums_D = losses_BS.new_zeros(len(pairs.numbers_D)).index_add(0, place_T, -losses_BS.flatten())
        if self._sequence is None:
            return sums_D
        mine_D = sums_D.detach()
        # Every rank has the sums of all; its tokens' gradients are summed over the ranks with those of the others.
        return sums_D + (sum_over(mine_D.clone(), self._sequence) - mine_D)

    def _note(self, losses: PairLosses, ratios_D: torch.Tensor, lengths_D: torch.Tensor) -> None:
        if not self._counts:
            return
        chosen_P, rejected_P, logps_D = (each.detach() for each in (losses.chosen_P, losses.rejected_P, losses.logps_D))
        summed = (
            torch.ones_like(chosen_P),
            chosen_P,
            rejected_P,
            chosen_P > rejected_P,
            losses.log_odds_P.detach(),
            logps_D[::2],
            logps_D[1::2],
            ratios_D,
            lengths_D,
        )
        self._sums[torch.is_grad_enabled()].add_(torch.stack([each.double().sum() for each in summed]))
