"""What may be computed again and what may go to host memory, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partool.cost.case import OVERLAPS, RECOMPUTE, SCHEDULES, SEQUENCE_METHODS, Layouts
from partool.layout.capabilities import runs
from partool.planner.problem import Problem
from partool.planner.runnable import nothing_runs
from partool.spec.parallel import Recompute

SHARES = (0.25, 0.5, 1.0)
"""Shares of the layers that recompute, where the policy is open."""
_OPEN = ("attention", "selective", "full")
"""Policies that are tried where the spec leaves them open."""
GPU_FRACTIONS = (0.0, 0.25, 0.5, 0.75)
"""Shares of an offloaded optimizer's state that may stay on the device."""


@dataclass(frozen=True)
class Policies:
    """What is computed again and what goes to the host; one entry per policy.

    The first recomputes and offloads least, the last most; so it is within those that leave parameters alone.
    """

    recompute: Any
    """Index in :data:`partool.cost.case.RECOMPUTE`."""
    share: Any
    optimizer: Any
    """Share of the optimizer state in host memory."""
    parameters: Any
    """1 where parameter shards are in host memory; with ZeRO-3 only."""
    activations: Any

    def __len__(self) -> int:
        return len(self.recompute)


def policies_of(problem: Problem) -> Policies:
    """Return the table of policies that the spec allows, as a product of its choices."""
    parallel, offload = problem.spec.parallel, problem.spec.parallel.offload
    pinned = parallel.recompute
    if isinstance(pinned, list):
        recompute = [(RECOMPUTE.index(_mildest(pinned)), 1.0)]
    elif pinned != "auto":
        recompute = [(RECOMPUTE.index(pinned), 1.0)]
    else:
        recompute = [(0, 1.0), *((index, share) for index in _open_policies(problem) for share in SHARES)]
    may = problem.host_link
    # Where the state has to leave, all of it does, but for what hides the host's last work once a layout is found,
    # and for what host memory has no room for.
    several = GPU_FRACTIONS if may and (offload.optimizer == "auto" or "split" in problem.relaxed) else (0.0,)
    fractions = several if offload.gpu_fraction == "auto" else (offload.gpu_fraction,)
    fractions = (0.0,) if offload.parameters in ("cpu", "nvme") else fractions
    host = sorted(round(1.0 - fraction, 6) for fraction in fractions)
    # Parameters that have to leave take the optimizer's state with them.
    follows = offload.parameters in ("cpu", "nvme") and offload.optimizer == "auto"
    optimizer = _open("cpu" if follows else offload.optimizer, host, may=may)
    activations = _open(offload.activations, [1], may=may)
    parameters = _open(offload.parameters, [1], may=may and parallel.data.zero in ("auto", 3))
    rows = [
        (policy, share, moved, stored, saved)
        for stored in parameters
        for saved in activations
        for moved in optimizer
        if not stored or moved == 1
        for policy, share in recompute
    ]
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Policies(columns[0], *(column.astype(float) for column in columns[1:3]), *columns[3:])


def _open_policies(problem: Problem) -> list[int]:
    """Return the policies to try, by index, mildest first.

    Among them keeping attention where sequences are long: its work then is a part of a layer's that counts (a twelfth
    at as many tokens as the model is wide), and grows with the square.
    """
    long = problem.spec.training.sequence_length >= problem.model.hidden
    names = (*_OPEN, *(("keep_attention",) if long else ()))
    return sorted(RECOMPUTE.index(name) for name in names)


def _mildest(policies: list[Recompute]) -> Recompute:
    return min(policies, key=RECOMPUTE.index)


def _open(pinned: str, host: list[Any], *, may: bool) -> list[Any]:
    """Return the shares in host memory to try for something that is pinned to a side or open."""
    if pinned == "none" or (pinned == "auto" and not may):
        return [0]
    return [0, *host] if pinned == "auto" else list(host)


def runnable_masks(problem: Problem, groups: Layouts, policies: Policies) -> tuple[Any, Any]:
    """Return masks of the groups and of the policies that the runtime can run."""
    if nothing_runs(problem):
        return np.zeros(np.shape(groups.pp), dtype=bool), np.zeros(len(policies), dtype=bool)
    able = np.ones(np.shape(groups.pp), dtype=bool)
    for aspect, asked in (
        ("tensor", groups.tp > 1),
        ("tensor in two dimensions", groups.tensor_inner > 1),
        ("norms on shares of the sequence", (groups.tp > 1) & (groups.sequence_norms == 1)),
        ("tensor with fused collectives", groups.tensor_overlap == OVERLAPS.index("symmetric")),
        ("tensor in a pipeline", (groups.tp > 1) & (groups.pp > 1)),
        *((f"schedule {name}", (groups.pp > 1) & (groups.schedule == at)) for at, name in enumerate(SCHEDULES)),
        *(
            (f"sequence {name}", (groups.cp > 1) & (groups.sequence_method == at))
            for at, name in enumerate(SEQUENCE_METHODS)
        ),
        ("expert", groups.ep > 1),
        ("hybrid sharding", (groups.zero > 0) & (groups.replicas > 1)),
        ("accumulation", groups.accumulation > 1),
        *((f"zero {zero}", groups.zero == zero) for zero in range(4)),
    ):
        if not runs(aspect):
            able &= ~asked
    policy = np.ones(len(policies), dtype=bool)
    for aspect, asked in (
        *((f"recompute {name}", policies.recompute == index) for index, name in enumerate(RECOMPUTE)),
        ("offload", policies.optimizer > 0),
        ("offload of parameters", policies.parameters > 0),
        ("offload of activations", policies.activations > 0),
    ):
        if not runs(aspect):
            policy &= ~asked
    return able, policy
