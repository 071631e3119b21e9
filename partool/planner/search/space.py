"""The search space: all possible combinations of values that a spec allows, in columns with one entry per group.

A *group* is a mesh with ZeRO stage, schedule, micro-batch and so on; a *policy* says what is recomputed and what is
offloaded. Layouts are groups times policies. Groups are columns in memory, policies a short table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import RECOMPUTE, Layouts
from partool.planner.search.policies import Policies

GROUP_COLUMNS = (
    "pp", "replicas", "shards", "cp", "tp", "ep", "etp", "zero", "micro_batch", "accumulation", "schedule", "chunks",
    "in_flight", "sequence_method", "sequence_order", "sequence_inner", "sequence_teams", "sequence_inside",
    "tensor_inner", "sequence_norms",
)  # fmt: skip
"""Columns of groups that are enumerated."""


def wide(layouts: Layouts) -> Layouts:
    """Return layouts whose columns of whole numbers have 64 bits; groups of a space have half, to take less memory."""
    columns = {name: column for name, column in layouts.__dict__.items() if getattr(column, "dtype", None) == np.int32}
    return layouts.with_columns(**{name: column.astype(np.int64) for name, column in columns.items()})


@dataclass(frozen=True)
class Space:
    """The space of a search: groups of layouts and policies."""

    groups: Layouts
    """Columns of 32 bits: products of them may not fit, those of :meth:`rows` do."""
    size: int
    """Number of groups."""
    policies: Policies
    runnable: NDArray[np.bool_]
    """Mask of groups that the runtime can run."""
    runnable_policies: NDArray[np.bool_]
    """Mask of policies that the runtime can run."""
    enumerated: int = 0
    """Number of layouts before pruning."""
    pruned: dict[str, int] = field(default_factory=dict)
    """Number of layouts that constraints ruled out, by reason."""

    layers: int = 1
    offloads_from: int = 0
    """Lowest ZeRO stage with which the optimizer's state may be in host memory."""

    def rows(self, group: Any, policy: Any) -> Layouts:
        """Return the layouts for pairs of group and policy indices.

        The share of layers that recompute is rounded up to whole layers only without pipeline ranks: the policy's
        share bounds the time of rows with several ranks from below.
        """
        taken, chosen = wide(self.groups.take(group)), self.policies
        share = np.where(taken.pp == 1, self._shares[1][policy], chosen.share[policy])
        values = {
            "recompute": chosen.recompute[policy],
            "recompute_share": share,
            "gpu_fraction": chosen.gpu_fraction[policy],
            "offload_parameters": chosen.parameters[policy],
            "offload_activations": chosen.activations[policy],
        }
        if np.any(ring := taken.ring):
            # Schedules that send weights around a ring allow one policy: full recomputation, no offload.
            only = {"recompute": RECOMPUTE.index("full"), "recompute_share": 1.0, "gpu_fraction": 1.0}
            values = {name: np.where(ring, only.get(name, 0), value) for name, value in values.items()}
        return taken.with_columns(**values)

    def allowed(self, group: Any, policy: Any) -> Any:
        """Return a mask of the pairs (group, policy) that are possible and worth trying.

        Parameters are offloaded as ZeRO-3 shards only. If several shares round to the same number of layers, only the
        least share is kept. Schedules that move weights have one policy.
        """
        taken = self._some(group)
        return self._goes(taken, policy) & (self._differs[np.asarray(taken.pp, dtype=int), policy] | taken.ring)

    def goes(self, group: Any, policy: Any) -> Any:
        """Return a mask of possible pairs (group, policy), including shares that round to the same number of layers."""
        return self._goes(self._some(group), policy)

    def _some(self, group: Any) -> Layouts:
        """Return the groups with only those of their columns that decide which policies are possible."""
        return Layouts(**{name: np.asarray(getattr(self.groups, name))[group] for name in ("pp", "zero", "schedule")})

    def _goes(self, taken: Layouts, policy: Any) -> Any:
        table = self.policies
        possible = (table.parameters[policy] == 0) | (taken.zero == 3)
        possible &= (table.gpu_fraction[policy] == 1.0) | (taken.zero >= self.offloads_from)
        return np.where(taken.ring, self.only[policy], possible)

    def counted(self, group: Any, policy: Any) -> NDArray[np.bool_]:
        """Return a mask of pairs (group, policy) that count as layouts: offload of parameters only with ZeRO-3."""
        mask: NDArray[np.bool_] = (self.policies.parameters[policy] == 0) | (np.asarray(self.groups.zero)[group] == 3)
        return mask

    def count(self, groups: Any, policies: Any) -> int:
        """Return the number of pairs of these groups and policies that count as layouts."""
        moved = int((self.policies.parameters[policies] != 0).sum())
        zero = np.asarray(self.groups.zero)[groups]
        return len(zero) * (len(policies) - moved) + int((zero == 3).sum()) * moved

    @cached_property
    def only(self) -> NDArray[np.bool_]:
        """Mask of policies; True for the one policy that schedules that move weights have, if the spec allows it."""
        table = self.policies
        moved = 1.0 - table.gpu_fraction + table.parameters + table.activations
        mask: NDArray[np.bool_] = (table.recompute == RECOMPUTE.index("full")) & (table.share == 1.0) & (moved == 0)
        return mask

    @cached_property
    def _differs(self) -> NDArray[np.bool_]:
        """Mask [numbers of pipeline ranks, policies].

        False where a policy recomputes as many layers as one with a smaller share.
        """
        share = self.policies.share
        less = np.array([0.0, *sorted(set(share.tolist()))])
        before = self._rounded(less[np.searchsorted(less, share) - 1])
        mask: NDArray[np.bool_] = (self.policies.recompute == 0) | (self._shares > before)
        return mask

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """The policies' shares of layers, rounded up, as an array [numbers of pipeline ranks, policies]."""
        return self._rounded(self.policies.share)

    def _rounded(self, share: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of all layers that recompute if pipeline ranks with even stages round up to whole layers.

        The result has a row for each number of ranks, up to the most of any group.
        """
        ranks = np.maximum(np.arange(max(2, int(np.max(self.groups.pp, initial=1)) + 1)), 1)[:, None]
        # As many ranks have a layer more as stages of the last, incomplete round over the ranks.
        small, more = self.layers // ranks, self.layers % ranks
        layers = (ranks - more) * np.ceil(share * small - 1e-9) + more * np.ceil(share * (small + 1) - 1e-9)
        rounded: NDArray[np.float64] = layers / self.layers
        return rounded
