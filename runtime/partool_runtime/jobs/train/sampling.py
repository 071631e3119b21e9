"""Texts by the model: each prompt of ``training.validation.prompts`` continued by its likeliest tokens.

Every token takes a forward pass over the prompts so far, padded to full sequences, without a cache of keys and values:
so the passes are those of a validation in every layout, and every rank runs the same number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from partool.plan.types import Plan
from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch
from partool_runtime.losses import put_around_loss
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.next_tokens import NextTokens
from partool_runtime.parallel.passes import Passes
from partool_runtime.preparation import Prepared
from partool_runtime.telemetry import ContinuedPrompt
from partool_runtime.tokens.prompts import prompt_text, prompt_tokens


class PromptSampler:
    """Continues the plan's prompts; all ranks call it, and all get the same texts."""

    def __init__(self, plan: Plan, ranks: Ranks, passes: Passes, next_tokens: NextTokens) -> None:
        """Take the passes whose losses ``next_tokens`` are around; raises ConfigurationError PT605 or PT637."""
        validation, self._length = plan.training.validation, plan.training.sequence_length
        self._plan, self._ranks, self._passes, self._next_tokens = plan, ranks, passes, next_tokens
        self._most = validation.new_tokens
        self._shown = [prompt_text(prompt) for prompt in validation.prompts]
        self._maker, self._prompts = prompt_tokens(
            validation.prompts, plan.data, length=self._length, vocab=plan.model.vocab
        )

    @classmethod
    def of(cls, plan: Plan, ranks: Ranks, prepared: Prepared) -> PromptSampler | None:
        """Return what continues the plan's prompts with a prepared model; None without prompts."""
        if not plan.training.validation.prompts:
            return None
        next_tokens = NextTokens()
        put_around_loss(prepared.model, next_tokens.around)
        return cls(plan, ranks, prepared.model_passes, next_tokens)

    @torch.no_grad()
    def texts(self, stopping: Callable[[], bool]) -> list[ContinuedPrompt] | None:
        """Return each prompt with what the model adds; None on all ranks once ``stopping`` returns True.

        ``stopping`` is called before each micro-batch and must return the same value on all ranks.
        """
        tokens = [list(ids) for ids in self._prompts]
        ended = [False] * len(tokens)
        for _ in range(self._most):
            growing = [n for n, ids in enumerate(tokens) if not ended[n] and len(ids) < self._length]
            if not growing:
                break
            following = self._following(tokens, growing, stopping)
            if following is None:
                return None
            for number in growing:
                ended[number] = following[number] in self._maker.ends
                if not ended[number]:
                    tokens[number].append(following[number])
        added = [ids[len(prompt) :] for ids, prompt in zip(tokens, self._prompts, strict=True)]
        texts = map(self._maker.decode, added)
        return [ContinuedPrompt(*each) for each in zip(self._shown, texts, map(tuple, added), ended, strict=True)]

    def _following(
        self, tokens: Sequence[Sequence[int]], growing: Sequence[int], stopping: Callable[[], bool]
    ) -> list[int] | None:
        """Return the token after each prompt so far; those of prompts that do not grow have no meaning."""
        with self._next_tokens.looking(len(tokens), self._ranks.device) as next_P:
            if self._passes.evaluate(self._micro_batches(tokens, growing), stopping) is None:
                return None
            seen_P = next_P >= 0  # several ranks may have the same token
            sums_2P = sum_over(torch.stack([next_P.where(seen_P, 0), seen_P.long()]), self._ranks.world)
        return [int(total) // max(int(times), 1) for total, times in sums_2P.T.tolist()]

    def _micro_batches(self, tokens: Sequence[Sequence[int]], growing: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches, as many as any rank's, with empty rows behind the last prompt.

        The label of a prompt's last token is the prompt's number (:mod:`partool_runtime.parallel.next_tokens`).
        """
        rows, dp = self._plan.layout.micro_batch, self._ranks.dp
        shape = rows, self._length
        for start in range(0, len(growing), rows * dp.size):
            tokens_BS = torch.zeros(shape, dtype=torch.int64)
            labels_BS = torch.full(shape, IGNORED_LABEL, dtype=torch.int64)
            first = start + dp.place * rows
            for row, number in enumerate(growing[first : first + rows]):
                ids = tokens[number]
                tokens_BS[row, : len(ids)] = torch.tensor(ids)
                labels_BS[row, len(ids) - 1] = number
            documents_BL = torch.zeros(shape, dtype=torch.int32) if self._plan.data.separates else None
            yield MicroBatch(tokens_BS, labels_BS, documents_BL)
