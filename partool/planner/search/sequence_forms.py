"""Forms of sequence parallelism that are worth searching, as no other form is better in both time and memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from partool.cost.case import Column, Layouts
from partool.planner.forms.sequence_rules import SequenceForm, all_forms
from partool.planner.problem import Problem
from partool.planner.search.price import bounds_s, room

Forms = dict[tuple[int, int], tuple[SequenceForm, ...]]
"""Forms of sequence parallelism by (sequence ranks, tensor ranks)."""
MICRO_BATCHES = (1, 8)
"""Sequences per micro-batch at which forms are compared: latency matters for small micro-batches, message size for
large."""


def every_form(problem: Problem, meshes: Iterable[tuple[int, int]]) -> Forms:
    """Return all forms for each pair (sequence ranks, tensor ranks)."""
    return {(ranks, tensor): tuple(all_forms(problem, ranks, tensor)) for ranks, tensor in meshes}


def best_forms(problem: Problem, every: Forms) -> Forms:
    """Return, for each pair (sequence ranks, tensor ranks), the forms that no other form of the pair replaces.

    A form replaces another form if it needs no more memory and is faster, or as fast and preferred. All forms are
    priced at once. Costs that are equal for all forms of a mesh are left out.
    """
    several = {mesh: forms for mesh, forms in every.items() if len(forms) > 1}
    if not several:
        return every
    rows = [(*mesh, *form) for mesh, forms in several.items() for form in forms]
    kept = np.zeros(len(rows), dtype=bool)
    columns = np.array(rows).T
    ends = np.cumsum([len(forms) for forms in several.values()])
    layouts = _layouts(np.tile(columns, len(MICRO_BATCHES)), np.repeat(MICRO_BATCHES, len(rows)))
    prices = np.stack([bounds_s(problem, layouts), np.asarray(room(problem, layouts).total_bytes)])
    for times, sizes in prices.reshape(2, len(MICRO_BATCHES), len(rows)).swapaxes(0, 1):
        for start, stop in zip([0, *ends[:-1]], ends, strict=True):
            kept[start:stop] |= _front(times[start:stop], sizes[start:stop])
    remaining = dict(every)
    for (mesh, forms), stop in zip(several.items(), ends, strict=True):
        mask = kept[stop - len(forms) : stop]
        remaining[mesh] = tuple(form for form, keep in zip(forms, mask, strict=True) if keep)
    return remaining


def seconds(problem: Problem, rows: list[tuple[int, ...]], micro_batch: int) -> Any:
    """Return a lower bound of the step time in seconds for each row (sequence ranks, tensor ranks, *form)."""
    return bounds_s(problem, _layouts(np.array(rows).T, micro_batch))


def _layouts(columns: Any, micro_batch: Column) -> Layouts:
    cp, tp, method, order, inner, teams, inside = columns
    return Layouts(
        pp=1 + 0 * cp, cp=cp, tp=tp, micro_batch=micro_batch, sequence_method=method, sequence_order=order,
        sequence_inner=inner, sequence_teams=teams, sequence_inside=inside,
    )  # fmt: skip


def _front(times: Any, sizes: Any) -> Any:
    """Return a mask of the entries (a time and a size each) that no other entry replaces.

    An entry replaces another entry if it is at least as fast and as small, and also faster, smaller or earlier in the
    list. Figures are not rounded, so the best of the remaining entries is the best of all, whatever a size costs.
    """
    as_good = (times[:, None] <= times[None, :]) & (sizes[:, None] <= sizes[None, :])
    better = (times[:, None] < times[None, :]) | (sizes[:, None] < sizes[None, :])
    before = np.arange(len(times))[:, None] < np.arange(len(times))[None, :]
    return ~(as_good & (better | before)).any(axis=0)
