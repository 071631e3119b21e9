"""Table of policies; a policy says which activations are recomputed, and what is offloaded to host memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import RECOMPUTE, Layouts
from partool.planner.forms.runnable import within
from partool.planner.problem import Problem
from partool.spec.parallel import Recompute
from partool.strategies.optimizers import OPTIMIZERS

SHARES = (0.25, 0.5, 1.0)
"""Shares of layers that may recompute; all are tried if the spec leaves the policy ``auto``."""
_OPEN = ("attention", "selective", "full")
"""Recomputation policies that are tried if the spec leaves the policy ``auto``."""
GPU_FRACTIONS = tuple(eighths / 8 for eighths in range(8))
"""Shares of an offloaded optimizer state that may stay on the device."""


@dataclass(frozen=True)
class Policies:
    """Recomputation and offload; one entry per policy.

    The first policy recomputes and offloads least, the last policy most. Among the policies without offload of
    parameters, the first also recomputes and offloads least, and the last most.
    """

    recompute: NDArray[np.float64]
    """Index in :data:`partool.cost.case.RECOMPUTE`."""
    share: NDArray[np.float64]
    gpu_fraction: NDArray[np.float64]
    """Share of the optimizer state that stays on the device; 1 means that nothing is offloaded."""
    parameters: NDArray[np.float64]
    """1 if parameter shards are in host memory, else 0; 1 needs ZeRO-3."""
    activations: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.recompute)

    @property
    def rows(self) -> Layouts:
        """The policies as rows of layouts on one device."""
        return Layouts(
            recompute=self.recompute,
            gpu_fraction=self.gpu_fraction,
            offload_parameters=self.parameters,
            offload_activations=self.activations,
        )


def policies_of(problem: Problem) -> Policies:
    """Return the table of policies that the spec allows: all combinations of recomputation and offload."""
    parallel, offload = problem.spec.parallel, problem.spec.parallel.offload
    pinned = parallel.recompute
    if isinstance(pinned, list):
        recompute = [(RECOMPUTE.index(_mildest(pinned)), 1.0)]
    elif pinned != "auto":
        recompute = [(RECOMPUTE.index(pinned), 1.0)]
    else:
        shares = (1.0,) if problem.engine.uniform else SHARES
        recompute = [(0, 1.0), *((index, share) for index in _open_policies(problem) for share in shares)]
    has_host_link = problem.host_link
    can_offload_state = has_host_link and OPTIMIZERS[problem.spec.optimizer.name].host
    several = GPU_FRACTIONS if can_offload_state and not problem.engine.uniform else (0.0,)
    fractions = several if offload.gpu_fraction == "auto" else (offload.gpu_fraction,)
    fractions = (0.0,) if offload.parameters in ("cpu", "nvme") else fractions
    # Pinned offload of parameters implies offload of the optimizer's state.
    follows = offload.parameters in ("cpu", "nvme") and offload.optimizer == "auto"
    stays = sorted((round(float(fraction), 6) for fraction in fractions), reverse=True)
    optimizer = _open("cpu" if follows else offload.optimizer, 1.0, stays, allowed=can_offload_state)
    activations = _open(offload.activations, 0, [1], allowed=has_host_link)
    parameters = _open(offload.parameters, 0, [1], allowed=can_offload_state and parallel.data.zero in ("auto", 3))
    rows = [
        (policy, share, kept, stored, saved)
        for stored in parameters
        for saved in activations
        for kept in optimizer
        if not stored or kept == 0
        for policy, share in recompute
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    table = Policies(columns[0], *(column.astype(float) for column in columns[1:3]), *columns[3:])
    kept = within(problem.engine, table.rows)
    return table if kept.all() else Policies(*(getattr(table, column.name)[kept] for column in fields(table)))


def _open_policies(problem: Problem) -> list[int]:
    """Return the indices of the recomputation policies to try, starting with the policy that recomputes least.

    ``keep_attention`` is tried for long sequences: attention is a relevant part of a layer's work there (a twelfth if
    the number of tokens equals the hidden size), and grows with the square of the length.
    """
    long = problem.spec.training.sequence_length >= problem.model.hidden
    names = (*_OPEN, *(("keep_attention",) if long else ()))
    return sorted(RECOMPUTE.index(name) for name in names)


def _mildest(policies: list[Recompute]) -> Recompute:
    return min(policies, key=RECOMPUTE.index)


def _open(pinned: str, stays: float, leaves: list[Any], *, allowed: bool) -> list[Any]:
    """Return the values to try for one kind of offload; ``stays`` offloads nothing, ``leaves`` offload something."""
    if pinned == "none" or (pinned == "auto" and not allowed):
        return [stays]
    return [stays, *leaves] if pinned == "auto" else list(leaves)
