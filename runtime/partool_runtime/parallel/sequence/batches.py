"""Cuts every sequence to a rank's share of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from partool.layout.sequence import Spans, index, tokens
from partool_runtime.data.batches import MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.model.multi_token import look_ahead
from partool_runtime.parallel.passes import Passes, Timer


class SharedSequences:
    """Passes (``partool_runtime.parallel.passes.Passes``) over one rank's share of sequences that are loaded whole.

    All ranks of a team get the same sequences. Tokens and labels are cut to this rank's share; document numbers are
    not cut, since attention masks need the document numbers of all tokens.
    """

    def __init__(self, passes: Passes, shares: Sequence[Spans], rank: int, predictions: int = 0) -> None:
        """``shares`` are the shares of all ranks of the team, ``rank`` is this rank's place in the team.

        ``predictions`` is the number of further tokens that the model predicts in training.
        """
        self._passes = passes
        self._predictions = predictions
        self._length = sum(map(tokens, shares))
        self._index_S = torch.tensor(index(shares[rank]), dtype=torch.int64)

    def step(self, batch: Sequence[MicroBatch], weight: torch.Tensor, timer: Timer) -> torch.Tensor:
        """See ``Passes``; the loss covers this rank's tokens."""
        with timer("data"):
            mine = [self._cut(micro) for micro in batch]
        return self._passes.step(mine, weight, timer)

    def evaluate(self, batches: Iterable[MicroBatch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """See ``Passes``."""

        def mine() -> Iterator[MicroBatch]:
            return (self._cut(micro) for micro in batches)

        return self._passes.evaluate(mine(), stopping)

    def close(self) -> None:
        """See ``Passes``."""
        self._passes.close()

    def _cut(self, micro: MicroBatch) -> MicroBatch:
        if micro.tokens_BS.shape[1] != self._length:
            message = f"sequences of {micro.tokens_BS.shape[1]} tokens, but the plan expects {self._length}"
            raise ConfigurationError("PT651", message, "Use sequences of training.sequence_length tokens.")
        tokens_BS, labels_BS = self._share(micro.tokens_BS), self._share(micro.labels_BS)
        pairs = None if micro.pairs is None else replace(micro.pairs, index_S=self._index_S)
        return MicroBatch(tokens_BS, labels_BS, micro.documents_BL, micro.first, pairs, self._ahead(micro))

    def _ahead(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what predictions of further tokens read; it is looked for before the cut, beyond the share's ends."""
        if not self._predictions:
            return None
        ahead = look_ahead(micro.tokens_BS, micro.labels_BS, micro.documents_BL, self._predictions)
        return self._share(ahead.tokens_DBS), self._share(ahead.labels_DBS)

    def _share(self, whole_BL: torch.Tensor) -> torch.Tensor:
        share_BS = whole_BL.index_select(-1, self._index_S)
        # Pinned like the whole tensor: a copy from pageable memory to a device would wait for all earlier work.
        return share_BS.pin_memory() if whole_BL.is_pinned() else share_BS
