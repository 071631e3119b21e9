"""TokenPrediction of further tokens in training (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The module at depth k combines a position's hidden state of depth k − 1 with the embedding of the token k positions
later. Its block and norm make the hidden state of depth k, from which the model's head predicts the token after that.
Depth 0 is the model, whose hidden state is that after its final norm, as inference engines use DeepSeek-V3's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from partool.spec.model import ModelConfig
from partool_runtime.model.loss import IGNORED
from partool_runtime.model.norm import make_norm


class Ahead(NamedTuple):
    """What the modules read of later positions; index d is that of depth d + 1."""

    tokens_DBS: torch.Tensor  # noqa: N815
    """Tokens d + 1 positions later; 0 where the sequence ends before."""
    labels_DBS: torch.Tensor  # noqa: N815
    """Labels d + 1 positions later; −100 where sequence or document ends before."""


def look_ahead(
    tokens_BS: torch.Tensor, labels_BS: torch.Tensor, documents_BL: torch.Tensor | None, depth: int
) -> Ahead:
    """Return the later tokens and labels of whole sequences, for modules up to ``depth``."""
    tokens, labels = [], []
    for distance in range(1, depth + 1):
        later_BS = _later(labels_BS, distance, IGNORED)
        if documents_BL is not None:
            same_BS = _later(documents_BL, distance, -1) == documents_BL
            later_BS = later_BS.where(same_BS.to(later_BS.device), IGNORED)
        tokens.append(_later(tokens_BS, distance, 0))
        labels.append(later_BS)
    return Ahead(torch.stack(tokens), torch.stack(labels))


def _later(x_BS: torch.Tensor, distance: int, beyond: int) -> torch.Tensor:
    """Return the values ``distance`` positions later, and ``beyond`` where the sequence ends before."""
    return F.pad(x_BS[:, distance:], (0, min(distance, x_BS.shape[1])), value=beyond)


class TokenPrediction(nn.Module):
    """What the module of a further token has beside its block; embedding and head are the model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding_norm = make_norm(config)
        self.hidden_norm = make_norm(config)
        self.projection = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        nn.init.normal_(self.projection.weight, std=config.init_std)
        self.final_norm = make_norm(config)

    def joined(self, hidden_BSH: torch.Tensor, later_BSH: torch.Tensor) -> torch.Tensor:
        """Return the block's input ``[B, S, H]`` from hidden states and embeddings of later tokens.

        The projection's first columns are those of the embedding, as in DeepSeek-V3's folders.
        """
        pair = torch.cat([self.embedding_norm(later_BSH), self.hidden_norm(hidden_BSH)], dim=-1)
        return cast(torch.Tensor, self.projection(pair))


class MultiTokenLosses:
    """Weighs the losses of further tokens, and sums them up for the log."""

    weight: float = 0.0
    """Factor of the mean of the modules' losses, ``training.multi_token_weight``."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def added(self, main: torch.Tensor, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a scalar with the value of the loss ``main``, and the gradient of the weighed sum with ``losses``.

        A value that is not finite makes the result so.
        """
        mean = torch.stack(list(losses)).mean()
        counted = mean.detach().double()
        self._total = counted if self._total is None else self._total + counted
        weighed = self.weight * mean
        return main + (weighed - weighed.detach())

    def take(self) -> torch.Tensor | float:
        """Return the sum of the mean losses since the last call, a float64 scalar on the device; 0 without any."""
        total, self._total = self._total, None
        return 0.0 if total is None else total
