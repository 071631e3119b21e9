"""The load of experts: counted in the passes of a step, balanced by losses or by selection biases, limited by capacity.

Counts are those of the choices that routers make, before any is dropped, and of the first pass where a layer is
recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from partool.plan.types import Plan
from partool.spec.model import Moe
from partool_kernels.moe.op import route
from partool_runtime.mesh import Ranks
from partool_runtime.model import StagedDecoder
from partool_runtime.model.moe import MixtureOfExperts
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.expert.tokens import TokenShares
from partool_runtime.torch_internals.collectives import finished, start_gather

_NUMBERS = count()
_LOADS: WeakValueDictionary[str, LayerLoad] = WeakValueDictionary()
"""Loads by name, as operators cannot take objects; an entry disappears with its load."""


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
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        """Number of choices of this rank's tokens that were dropped in the step so far."""

    def counted(self, experts_TK: torch.Tensor, sequences: int) -> torch.Tensor | None:
        """See ``Observer``."""
        scope = self._moe.aux_scope
        parts = sequences if scope == "sequence" else 1
        counted: torch.Tensor = torch.ops.partool.moe_count(
            experts_TK, parts, self._moe.experts, scope == "global_batch", self._name
        )
        if not self._moe.aux_loss:
            return None
        counts_BE = counted.double()
        # Summed in a new tensor: recomputation keeps the counts themselves.
        group = self._scopes.stage if scope == "global_batch" else self._scopes.sharers
        counts_BE = sum_over(counts_BE.clone(), group)
        return self._moe.experts * counts_BE / counts_BE.sum(dim=-1, keepdim=True).clamp(min=1)

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
            of_ranks = finished(start_gather(shares.padded(of_all_BSK)[None], group.size(), group.group_name))
            of_all_BSK = shares.joined(of_ranks)
        rows_RK = of_all_BSK.flatten(0, 1)
        routing = route(rows_RK, self._moe.experts)
        begins_E = routing.ends - routing.counts
        most = math.ceil(self._moe.capacity * rows_RK.numel() / self._moe.experts)
        kept_RK = rows_RK.masked_fill(routing.places - begins_E[rows_RK] >= most, -1)
        kept_BSK = kept_RK.view_as(of_all_BSK)
        mine = kept_BSK if group is None else shares.mine(kept_BSK)
        return mine.reshape(experts_TK.shape)

    def add(self, counts_BE: torch.Tensor) -> torch.Tensor:
        """Add counts to those of the step; return the sum."""
        self.counts_E += counts_BE.sum(dim=0)
        return self.counts_E


@torch.library.custom_op(
    "partool::moe_count",
    mutates_args=(),
    schema="(Tensor experts, int parts, int number, bool total, str name) -> Tensor",
)
def _count(experts: torch.Tensor, parts: int, number: int, total: bool, name: str) -> torch.Tensor:
    counts = experts.new_zeros(parts, number)
    flat = experts.view(parts, -1)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    sums = _LOADS[name].add(counts)
    return sums[None].clone() if total else counts


@_count.register_fake
def _(experts: torch.Tensor, parts: int, number: int, total: bool, name: str) -> torch.Tensor:
    del total, name
    return experts.new_empty(parts, number)


COUNT: Any = torch.ops.partool.moe_count.default
"""The operator that counts choices."""


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
        self.counts_LE: torch.Tensor | None = None
        """Choices of each expert in the last step over all ranks of this stage, a row per layer; None before it."""

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, ranks: Ranks) -> ExpertLoads | None:
        """Return the loads of the layers of experts of a rank's part of a model, which they observe from now on.

        Returns None for a dense model. A collective of all ranks.
        """
        if plan.model.moe is None or not isinstance(model, StagedDecoder) or plan.hf is not None:
            return None
        scopes = _scopes(plan, plan.model.moe, ranks)
        weight = torch.zeros((), dtype=torch.float64, device=ranks.device)
        layers = []
        for number, block in model.blocks():
            moe = getattr(block, "moe", None)
            if isinstance(moe, MixtureOfExperts):
                load = LayerLoad(plan.model.moe, scopes, ranks.device, weight)
                moe.router.observer = load
                layers.append((number, moe, load))
        return cls(layers, scopes, weight, plan.frozen)

    def begin(self, scale: float, tokens: int) -> None:
        """Begin a step over ``tokens`` tokens of all ranks; gradients of losses are multiplied by ``scale``."""
        self._weight.fill_(scale / (tokens * self._scopes.copies))
        for _, _, load in self._layers:
            load.counts_E.zero_()

    @torch.no_grad()
    def end(self, *, updated: bool) -> None:
        """End a step: sum the counts over ranks and, if the step ``updated`` the weights, change the selection biases.

        An expert with less than the mean load becomes more likely to be chosen (arXiv 2408.15664, algorithm 1).
        """
        if not self._layers:
            return
        counts_LE = sum_over(torch.stack([load.counts_E for _, _, load in self._layers]), self._scopes.stage)
        self.counts_LE = counts_LE
        means_L1 = counts_LE.double().mean(dim=1, keepdim=True)
        for (number, moe, _), less_E in zip(self._layers, torch.sign(means_L1 - counts_LE), strict=True):
            bias, rate = moe.router.bias, moe.router.moe.bias_rate or 0.0
            if any(fnmatchcase(f"layers.{number}.moe.router.bias", pattern) for pattern in self._frozen):
                continue
            if updated and bias is not None:
                bias.add_(less_E.to(bias.dtype), alpha=rate)


def _scopes(plan: Plan, moe: Moe, ranks: Ranks) -> Scopes:
    """Return the scopes of a plan's layers; tensor ranks share tokens only if whole experts are shared."""
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
