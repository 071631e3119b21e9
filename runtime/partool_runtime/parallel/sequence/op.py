"""What stands in the place of attention in layers whose ranks exchange keys and values."""

from __future__ import annotations

import torch

from partool_runtime.errors import ConfigurationError
from partool_runtime.model.attention import AttentionLayout, Tokens
from partool_runtime.model.operator import attend_by, register
from partool_runtime.parallel.sequence.types import Exchange


class ExchangeAttend:
    """An :class:`Attend` that is an :class:`Exchange`, and one operator to everything else."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.name = register(exchange)

    def __call__(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None = None,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries, ``[B, N, S, D]``.

        Raises ConfigurationError PT653 for a layer that attends along the lines of a grid.
        """
        if layout.axis is not None:
            fix = "Use parallel.sequence: {method: dsp} or ulysses."
            raise ConfigurationError("PT653", "tokens of a line of the grid are met as if all earlier ones were", fix)
        documents_BL = None if tokens is None else tokens.documents_BL
        return attend_by((q_BNSD, k_BKSD, v_BKSD), layout, documents_BL, self.name)
