"""Layouts that need no exact price: one of the same group is faster, and recomputes and offloads no more."""

from __future__ import annotations

from typing import Any

import numpy as np

from partool.planner.problem import Problem
from partool.planner.search.leaves import Leaves
from partool.planner.search.price import SLACK, host_limit, pinned_limit
from partool.planner.search.score import EMPTY, KAPPA, UNFIT_BELOW
from partool.planner.search.space import Space

_SAVED = EMPTY + KAPPA * UNFIT_BELOW
"""Most that a layout can save in its share for filled memory beside one that surely fits."""


def dominated(problem: Problem, space: Space, leaves: Leaves, queued: Any) -> Any:
    """Return a mask of leaves that a queued leaf of the same group dominates.

    The dominating leaf is faster by more than its memory costs, recomputes and offloads no more, and is sure to
    fit. Only without pipeline ranks, and with whole networks, do bounds differ from exact times by the same amount.
    """
    out = np.zeros(len(leaves), dtype=bool)
    comparable = (np.asarray(space.groups.pp)[leaves.group] == 1) & (not problem.mlp_tile)
    index = np.flatnonzero(queued & _surely_fit(problem, leaves) & comparable)
    for start in np.split(index, np.flatnonzero(np.diff(leaves.group[index])) + 1):
        if len(start):
            # A smaller layout saves a part of the price of filled memory; exact times are below twice the bounds.
            faster = (1.0 + 2.0 * _SAVED) * leaves.bound_s[start][:, None] <= leaves.bound_s[start][None, :]
            milder = _milder(space, leaves.policy[start]) & faster
            np.fill_diagonal(milder, False)
            out[start] = milder.any(axis=0)
    return out


def _surely_fit(problem: Problem, leaves: Leaves) -> Any:
    """Return a mask of leaves whose exact memory is sure to fit; others must not rule out layouts.

    A leaf over a limit by less than the slack may not fit after all. Activations in host memory take more of it the
    less is recomputed, so layouts that use host memory are sure only where the limits of host memory are far.
    """
    surely = (leaves.probability >= 1.0 - UNFIT_BELOW) & (leaves.memory_bytes <= problem.capacity_bytes)
    stays = leaves.host_bytes == 0
    if pinned_limit(problem) != float("inf"):
        return surely & stays
    return surely & (stays | ((1.0 + SLACK) * leaves.host_bytes <= host_limit(problem)))


def _milder(space: Space, policy: Any) -> Any:
    """Return a matrix of pairs of policies, True where the first recomputes and offloads no more."""
    table = space.policies
    mild = np.ones((len(policy), len(policy)), dtype=bool)
    for column in (table.recompute, -table.gpu_fraction, table.parameters, table.activations):
        mild &= column[policy][:, None] <= column[policy][None, :]
    share = table.share[policy]
    return mild & ((table.recompute[policy] == 0)[:, None] | (share[:, None] <= share[None, :]))
