"""The load of experts: counted in the passes of a step, balanced by losses or by selection biases, limited by capacity.

Counts are those of the choices that routers make, before any is dropped, and of the first pass where a layer is
recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from partool.plan.types import Plan
from partool.spec.experts import Moe
from partool_kernels.moe.op import route
from partool_runtime.mesh import Ranks
from partool_runtime.model import StagedDecoder
from partool_runtime.model.moe import MixtureOfExperts
from partool_runtime.parallel.comm import EXPERT, LOADS, counted_as, sum_over
from partool_runtime.parallel.expert.tokens import TokenShares
from partool_runtime.torch_internals.collectives import finished, start_gather, start_sum

_NUMBERS = count()
_LOADS: WeakValueDictionary[str, LayerLoad] = WeakValueDictionary()
"""Loads by name, as operators cannot take objects; an entry disappears with its load."""


def _of_loads() -> AbstractContextManager[None]:
    """Return a context in which exchanges count as those of statistics; compiled exchanges are not counted."""
    return nullcontext() if torch.compiler.is_compiling() else counted_as(purpose=LOADS)


@dataclass(frozen=True, slots=True)
class Scopes:
    """The ranks whose tokens are counted together."""

    sharers: dist.ProcessGroup | None
    """Ranks that hold shares of the same sequences; None if a rank holds whole sequences."""
    stage: dist.ProcessGroup | None
    """Ranks that together hold the tokens of all data-parallel ranks; None for one rank."""
    copies: int
    """Number of tensor ranks that route the same tokens, each for its parts of the experts."""
    shares: TokenShares
    """Places in the sequence of the tokens of each of the sharers."""


class LayerLoad:
    """Load of one layer's experts; see :class:`partool_runtime.model.routing.Observer`."""

    def __init__(self, moe: Moe, scopes: Scopes, device: torch.device, weight: torch.Tensor) -> None:
        self._moe, self._scopes, self._weight = moe, scopes, weight
        self._name = f"{next(_NUMBERS)}"
        _LOADS[self._name] = self
        self.counts_E = torch.zeros(moe.experts, dtype=torch.int64, device=device)
        """Number of choices of each expert by this rank's tokens in the step so far."""
        self.dropped = torch.zeros((), dtype=torch.float64, device=device)
        """Number of choices that were dropped in the step so far, of this rank's tokens and those of its sharers."""
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        """Sum over this rank's tokens of the entropy of their scores, in nats, in the step so far."""

    def begin(self) -> None:
        """Forget the counts of the step before."""
        for counts in (self.counts_E, self.dropped, self.entropy):
            counts.zero_()

    def counted(
        self, experts_TK: torch.Tensor, scores_TE: torch.Tensor, sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``Observer``."""
        scope = self._moe.aux_scope
        parts = sequences if scope == "sequence" else 1
        experts_TK, counted = torch.ops.partool.moe_count(
            experts_TK, scores_TE, parts, scope == "global_batch", self._name
        )
        if not self._moe.aux_loss:
            return experts_TK, None
        counts_BE = counted.double()
        # Summed in a new tensor: recomputation keeps the counts themselves.
        group = self._scopes.stage if scope == "global_batch" else self._scopes.sharers
        if group is not None:
            with _of_loads():
                counts_BE = finished(start_sum(counts_BE, group.group_name, in_place=False), EXPERT)
        return experts_TK, self._moe.experts * counts_BE / counts_BE.sum(dim=-1, keepdim=True).clamp(min=1)

    def loss_weight(self) -> torch.Tensor:
        """See ``Observer``."""
        return self._weight

    def kept(self, experts_TK: torch.Tensor, sequences: int) -> torch.Tensor:
        """See ``Observer``; the tokens of a micro-batch compete in the order of their sequences and places."""
        if self._moe.capacity is None:
            return experts_TK
        shares, group = self._scopes.shares, self._scopes.sharers
        of_all_BSK = experts_TK.view(sequences, -1, self._moe.top_k)
        if group is not None:
            with _of_loads():
                of_ranks = finished(start_gather(shares.padded(of_all_BSK)[None], group.size(), group.group_name))
            of_all_BSK = shares.joined(of_ranks)
        most = math.ceil(self._moe.capacity * of_all_BSK.numel() / self._moe.experts)
        name = self._name if torch.is_grad_enabled() else ""
        kept_BSK = torch.ops.partool.moe_limit(of_all_BSK, self._moe.experts, most, name)
        mine = kept_BSK if group is None else shares.mine(kept_BSK)
        return mine.reshape(experts_TK.shape)

    def without_row(self, experts_TK: torch.Tensor, kept_TK: torch.Tensor, parts: int) -> torch.Tensor:
        """See ``Observer``."""
        if not torch.is_grad_enabled():
            return kept_TK
        kept: torch.Tensor = torch.ops.partool.moe_without_row(experts_TK, kept_TK, parts, self._name)
        return kept

    def drop(self, choices: torch.Tensor) -> None:
        """Add a number of choices that were dropped of this rank's tokens, a scalar."""
        self.dropped += choices * len(self._scopes.shares.places)

    def add(self, counts_BE: torch.Tensor, scores_TE: torch.Tensor) -> torch.Tensor:
        """Add counts, and the entropy of scores, to those of the step; return the counts' sum."""
        self.counts_E += counts_BE.sum(dim=0)
        shares_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
        self.entropy += torch.special.entr(shares_TE).sum()
        return self.counts_E

    def report(self, most: int) -> torch.Tensor:
        """Return ``[most + 2]``: counts of up to ``most`` experts, dropped choices and entropy, of this rank's tokens.

        Experts that the layer lacks have counts of 0.
        """
        dropped = self.dropped / len(self._scopes.shares.places)
        counts = F.pad(self.counts_E.double(), (0, most - len(self.counts_E)))
        return torch.cat([counts, torch.stack([dropped, self.entropy])])


# Counts are kept by recomputation, so a second pass adds nothing to them.
@torch.library.custom_op(
    "partool::moe_count",
    mutates_args=(),
    schema="(Tensor experts, Tensor scores, int parts, bool total, str name) -> (Tensor, Tensor)",
)
def _count(
    experts: torch.Tensor, scores: torch.Tensor, parts: int, total: bool, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = experts.new_zeros(parts, scores.shape[1])
    flat = experts.view(parts, -1)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    sums = _LOADS[name].add(counts, scores)
    return experts.clone(), sums[None].clone() if total else counts


@_count.register_fake
def _(
    experts: torch.Tensor, scores: torch.Tensor, parts: int, total: bool, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    del total, name
    return torch.empty_like(experts), experts.new_empty(parts, scores.shape[1])


@torch.library.custom_op(
    "partool::moe_limit",
    mutates_args=(),
    schema="(Tensor experts, int number, int most, str name) -> Tensor",
)
def _limit(experts: torch.Tensor, number: int, most: int, name: str) -> torch.Tensor:
    rows_RK = experts.flatten(0, 1)
    routing = route(rows_RK, number)
    begins_E = routing.ends - routing.counts
    beyond_RK = routing.places - begins_E[rows_RK] >= most
    if name:
        _LOADS[name].dropped += beyond_RK.sum()
    return rows_RK.masked_fill(beyond_RK, -1).view_as(experts)


@_limit.register_fake
def _(experts: torch.Tensor, number: int, most: int, name: str) -> torch.Tensor:
    del number, most, name
    return torch.empty_like(experts)


@torch.library.custom_op(
    "partool::moe_without_row",
    mutates_args=(),
    schema="(Tensor experts, Tensor kept, int parts, str name) -> Tensor",
)
def _without_row(experts: torch.Tensor, kept: torch.Tensor, parts: int, name: str) -> torch.Tensor:
    _LOADS[name].drop(((experts >= 0) & ~kept).sum() / parts)
    return kept.clone()


@_without_row.register_fake
def _(experts: torch.Tensor, kept: torch.Tensor, parts: int, name: str) -> torch.Tensor:
    del experts, parts, name
    return torch.empty_like(kept)


COUNTING: frozenset[Any] = frozenset(
    {
        torch.ops.partool.moe_count.default,
        torch.ops.partool.moe_limit.default,
        torch.ops.partool.moe_without_row.default,
    }
)
"""Operators that count."""


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Load of one layer's experts in a step, over all ranks."""

    layer: int
    tokens: list[int]
    """Choices of each expert, before any was dropped."""
    dropped: float
    """Share of the choices that were dropped."""
    entropy: float
    """Mean entropy of a token's scores in nats; ln E if all experts have the same score."""
    bias: tuple[float, float] | None
    """Smallest and largest selection bias; None without one."""

    @property
    def imbalance(self) -> float:
        """Load of the busiest expert as a multiple of the mean."""
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)


class ExpertLoads:
    """The loads of a rank's layers of experts."""

    def __init__(
        self,
        layers: Sequence[tuple[int, MixtureOfExperts, LayerLoad]],
        scopes: Scopes,
        weight: torch.Tensor,
        frozen: Sequence[str] = (),
    ) -> None:
        self._layers, self._scopes, self._weight, self._frozen = layers, scopes, weight, frozen
        self._sums_LX: torch.Tensor | None = None
        """Reports of the layers in the last step, summed over all ranks of this stage; None before it."""

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, ranks: Ranks) -> ExpertLoads | None:
        """Return the loads of the layers of experts of a rank's part of a model, which they observe from now on.

        Returns None for a dense model. A collective of all ranks.
        """
        if plan.model.moe is None or not isinstance(model, StagedDecoder) or not plan.own_decoder:
            return None
        scopes = _scopes(plan, plan.model.moe, ranks)
        weight = torch.zeros((), dtype=torch.float64, device=ranks.device)
        layers = []
        for number, block in model.blocks():
            moe = getattr(block, "moe", None)
            if isinstance(moe, MixtureOfExperts):
                load = LayerLoad(moe.router.moe, scopes, ranks.device, weight)
                moe.router.observer = load
                layers.append((number, moe, load))
        return cls(layers, scopes, weight, plan.frozen)

    def begin(self, scale: float, tokens: int) -> None:
        """Begin a step over ``tokens`` tokens of all ranks; gradients of losses are multiplied by ``scale``."""
        self._weight.fill_(scale / (tokens * self._scopes.copies))
        for _, _, load in self._layers:
            load.begin()

    @torch.no_grad()
    def end(self, *, updated: bool) -> None:
        """End a step: sum the counts over ranks and, if the step ``updated`` the weights, change the selection biases.

        An expert with less than the mean load becomes more likely to be chosen (arXiv 2408.15664, algorithm 1).
        """
        if not self._layers:
            return
        most = max(moe.number for _, moe, _ in self._layers)
        self._sums_LX = sum_over(torch.stack([load.report(most) for _, _, load in self._layers]), self._scopes.stage)
        for (number, moe, _), sums_X in zip(self._layers, self._sums_LX, strict=True):
            counts_E = sums_X[: moe.number]
            less_E = torch.sign(counts_E.mean() - counts_E)
            bias, rate = moe.router.bias, moe.router.moe.bias_rate or 0.0
            if any(fnmatchcase(f"layers.{number}.moe.router.bias", pattern) for pattern in self._frozen):
                continue
            if updated and bias is not None:
                bias.add_(less_E.to(bias.dtype), alpha=rate)

    def reports(self) -> list[LayerReport]:
        """Return the loads of the last step, the same on all ranks of this stage; the host waits for the device."""
        if self._sums_LX is None:
            return []
        reports = []
        for (number, moe, _), sums in zip(self._layers, self._sums_LX.tolist(), strict=True):
            counts, (dropped, entropy) = sums[: moe.number], sums[-2:]
            bias = None if moe.router.bias is None else (float(moe.router.bias.min()), float(moe.router.bias.max()))
            choices = max(sum(counts), 1.0)
            tokens = choices / moe.router.moe.top_k
            reports.append(LayerReport(number, [int(n) for n in counts], dropped / choices, entropy / tokens, bias))
        return reports


def _scopes(plan: Plan, moe: Moe, ranks: Ranks) -> Scopes:
    """Return the scopes of a plan's layers; tensor ranks share tokens only if ranks share experts."""
    mesh = plan.layout.mesh
    copies = 1 if plan.layout.expert > 1 else mesh.tp

    def parts(size: int) -> list[range]:
        starts = range(0, ranks.world_size, size)
        return [range(start + place, start + size, copies) for start in starts for place in range(copies)]

    tensor = mesh.tp // copies
    shares = TokenShares.of(plan, ranks.cp.place, ranks.tp.place if copies == 1 else 0, tensor=tensor)
    sharers, stage = parts(mesh.cp * mesh.tp), parts(mesh.dp * mesh.cp * mesh.tp)
    # Only the losses and limits of micro-batches and sequences need the group of those that share a sequence.
    apart = moe.capacity is not None or (moe.aux_loss and moe.aux_scope != "global_batch")
    return Scopes(ranks.groups.of(sharers) if apart else None, ranks.groups.of(stage), copies, shares)
