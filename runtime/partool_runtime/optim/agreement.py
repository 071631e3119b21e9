"""What ranks agree on in a step: the number of tokens, the gradients' norm, and whether gradients are finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from partool.layout.one_bit import LOCAL
from partool_runtime.exchanges import Exchanges
from partool_runtime.mesh import Ranks
from partool_runtime.optim.grad_norm import GradientCheck, LocalSums, check_gradients
from partool_runtime.parallel.comm import maximum_over, sum_over

Flags = Callable[[], Sequence[float | torch.Tensor]]


class Agreement(Protocol):
    """Collectives of a step beside those of its gradients."""

    local: bool
    """Whether data-parallel ranks agree on nothing in the current step."""
    skipped: bool
    """Whether gradients were not finite in a step since ranks last agreed, on any rank."""

    def begin(self, step: int) -> None:
        """Begin step ``step``, counted from 0."""

    def tokens(self, count: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' ``count`` of tokens, by which losses are divided; may change ``count``."""

    def check(self, sums: LocalSums, loss_sum: torch.Tensor, flags: Flags) -> GradientCheck:
        """Return the norm of the gradients, whether they are finite, and the sums of losses and flags."""

    def most(self, nonfinite: int) -> int:
        """Return the largest of the ranks' numbers of steps in a row whose gradients were not finite."""


def agreement(ranks: Ranks) -> Agreement:
    """Return what the ranks agree on in each step; a collective of all ranks."""
    return _Together(ranks) if ranks.exchanges is None else _Apart(ranks, ranks.exchanges)


class _Together:
    """All ranks agree on everything in every step."""

    local = False
    skipped = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def begin(self, step: int) -> None:
        """See :class:`Agreement`."""

    def tokens(self, count: torch.Tensor) -> torch.Tensor:
        """See :class:`Agreement`."""
        return sum_over(count, self._ranks.world)

    def check(self, sums: LocalSums, loss_sum: torch.Tensor, flags: Flags) -> GradientCheck:
        """See :class:`Agreement`."""
        return check_gradients(sums, loss_sum, self._ranks, flags())

    def most(self, nonfinite: int) -> int:
        """See :class:`Agreement`."""
        return nonfinite


class _Apart:
    """Copies of the model have gradients of their own, and agree only in steps with an exchange.

    A norm is that of this rank's copy, whose gradients stand for the sum over all copies: it is multiplied by their
    number. Numbers of tokens and losses are multiplied so in local steps.
    """

    def __init__(self, ranks: Ranks, exchanges: Exchanges) -> None:
        self._ranks, self._exchanges = ranks, exchanges
        self._copy = ranks.groups.of(ranks.replica.parts)
        self.local = self.skipped = False
        self._since = 0
        """Number of steps since ranks last agreed that this rank's copy skipped."""
        self._some = False

    def begin(self, step: int) -> None:
        """See :class:`Agreement`."""
        self._exchanges.begin(step)
        self.local = self._exchanges.kind == LOCAL
        if self._exchanges.kind == "full":
            self.skipped = self._some = False

    def tokens(self, count: torch.Tensor) -> torch.Tensor:
        """See :class:`Agreement`."""
        if not self.local:
            return sum_over(count, self._ranks.world)
        return sum_over(count, self._copy) * self._ranks.replicate.size

    def check(self, sums: LocalSums, loss_sum: torch.Tensor, flags: Flags) -> GradientCheck:
        """See :class:`Agreement`."""
        if self._exchanges.kind == "full":
            return check_gradients(sums, loss_sum, self._ranks, flags())
        copies = self._ranks.replicate.size
        local_check = check_gradients(sums, loss_sum, self._ranks, copies=1, over=self._copy)
        if self.local:
            self._since += not local_check.finite
            return GradientCheck(local_check.norm * copies, local_check.finite, local_check.loss_sum * copies)
        everyone = check_gradients(sums, loss_sum, self._ranks, [*flags(), float(self._since)])
        self.skipped = self._some = everyone.flags[-1] > 0
        self._since = 0
        return GradientCheck(local_check.norm * copies, everyone.finite, everyone.loss_sum, everyone.flags[:-1])

    def most(self, nonfinite: int) -> int:
        """See :class:`Agreement`."""
        if self.local or not self._some:
            return nonfinite
        return maximum_over(nonfinite, self._ranks.world, self._ranks.device)
