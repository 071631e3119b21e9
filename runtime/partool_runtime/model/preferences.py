"""Losses of pairs of answers from the sums of their tokens' log-probabilities (``training.objective``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from partool.spec.objective import ObjectiveSpec


class PairLosses(NamedTuple):
    """What an objective says of ``P`` pairs."""

    loss_P: torch.Tensor  # noqa: N815
    chosen_P: torch.Tensor  # noqa: N815
    """Reward of the chosen answer."""
    rejected_P: torch.Tensor  # noqa: N815
    log_odds_P: torch.Tensor  # noqa: N815
    """Logarithm of the ratio of the answers' odds; the difference of the rewards for all objectives but orpo."""
    logps_D: torch.Tensor  # noqa: N815
    """Log-probabilities of the documents that the objective compares: sums over tokens of dpo, else means."""


def pair_losses(
    spec: ObjectiveSpec, sums_D: torch.Tensor, lengths_D: torch.Tensor, reference_D: torch.Tensor | None
) -> PairLosses:
    """Return the losses of pairs, whose answers are the documents 2j (chosen) and 2j + 1 (rejected).

    ``sums_D`` are the sums of the log-probabilities of each document's ``lengths_D`` labels, and ``reference_D`` those
    of the model that training started from. The formulas are those of docs/guide/preferences.md.
    """
    if spec.kind == "orpo":
        return _orpo(spec, sums_D / lengths_D)
    if spec.kind == "simpo":
        means_D = sums_D / lengths_D
        rewards_D = spec.scale * means_D
        return _by_margin(spec, means_D, rewards_D, rewards_D[::2] - rewards_D[1::2] - spec.gamma)
    assert reference_D is not None, "dpo has a reference"
    ratios_D = sums_D - reference_D.to(sums_D.dtype)
    rewards_D = spec.scale * ratios_D
    if spec.form == "ipo":
        # Means over tokens, so that beta says the same for answers of any length; TRL's, too (its authors asked IPO's).
        means_D = ratios_D / lengths_D
        loss_P = (means_D[::2] - means_D[1::2] - 1.0 / (2.0 * spec.scale)).square()
        return PairLosses(loss_P, rewards_D[::2], rewards_D[1::2], rewards_D[::2] - rewards_D[1::2], sums_D)
    margin_P = rewards_D[::2] - rewards_D[1::2]
    if spec.form == "hinge":
        return PairLosses((1.0 - margin_P).relu(), rewards_D[::2], rewards_D[1::2], margin_P, sums_D)
    return _by_margin(spec, sums_D, rewards_D, margin_P)


def _by_margin(
    spec: ObjectiveSpec, logps_D: torch.Tensor, rewards_D: torch.Tensor, margin_P: torch.Tensor
) -> PairLosses:
    """Return the negative logarithm of the probability that the chosen answer is preferred, given a margin."""
    swapped = spec.smoothing
    loss_P = -(1.0 - swapped) * F.logsigmoid(margin_P)
    if swapped:
        loss_P = loss_P - swapped * F.logsigmoid(-margin_P)
    return PairLosses(loss_P, rewards_D[::2], rewards_D[1::2], rewards_D[::2] - rewards_D[1::2], logps_D)


def _orpo(spec: ObjectiveSpec, means_D: torch.Tensor) -> PairLosses:
    # log(p / (1 - p)) of p = exp(mean); a mean of 0, where every label is certain, has no odds.
    odds_D = means_D - torch.log(-torch.expm1(means_D))
    log_odds_P = odds_D[::2] - odds_D[1::2]
    loss_P = -means_D[::2] - spec.weight * F.logsigmoid(log_odds_P)
    rewards_D = spec.weight * means_D
    return PairLosses(loss_P, rewards_D[::2], rewards_D[1::2], log_odds_P, means_D)
