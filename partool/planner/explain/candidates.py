"""Table of candidates in a plan: the best layout of each kind, and the Pareto front of time, memory and devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from partool.plan.types import CandidateRow
from partool.planner.explain.front import front
from partool.planner.explain.summary import summary, why_lost
from partool.planner.forms.runnable import runnable
from partool.planner.problem import Problem
from partool.planner.search.ordered import best_of_kinds
from partool.planner.search.price import Priced
from partool.planner.search.solve import Solution

ROWS = 40
_KINDS = 10


def candidates(solution: Solution, best: Priced, fewer: Iterable[tuple[Problem, Priced]]) -> tuple[CandidateRow, ...]:
    """Return at most :data:`ROWS` rows of the table, best score first; one row is the plan's layout.

    ``fewer`` are good layouts on fewer devices, each with the problem that it solves.
    """
    by_id = {id(best): (solution.problem, best)}
    for priced in [*islice(best_of_kinds(solution.search, kind), _KINDS), *front(solution)]:
        by_id.setdefault(id(priced), (solution.problem, priced))
    for problem, priced in fewer:
        by_id[id(priced)] = (problem, priced)
    pairs = sorted(by_id.values(), key=lambda pair: (pair[1].score_s, summary(pair[1].layout)))
    rows = [_row(problem, priced, best) for problem, priced in pairs[:ROWS]]
    ends = _on_front(rows)
    return tuple(row.model_copy(update={"pareto": on}) for row, on in zip(rows, ends, strict=True))


def kind(priced: Priced) -> tuple[Any, ...]:
    """Return the kind of a layout: a tuple of features. Layouts with equal features are of one kind."""
    layout, mesh = priced.layout, priced.layout.mesh
    return (
        mesh.tp > 1, mesh.pp > 1, mesh.cp > 1, layout.expert > 1,
        layout.data.zero, mesh.dp_replicate > 1 and layout.data.zero > 0,
        max(layout.recompute), layout.offload.optimizer, layout.offload.parameters, layout.offload.activations,
    )  # fmt: skip


def _row(problem: Problem, priced: Priced, best: Priced) -> CandidateRow:
    devices = problem.world_size
    why = "" if priced is best else why_lost(best, priced)
    able = runnable(problem, priced.layout)
    return CandidateRow(
        summary=summary(priced.layout),
        step_time_s=priced.step_time_s,
        score_s=priced.score_s,
        memory_bytes=priced.memory.total_bytes,
        host_bytes=priced.host_bytes,
        devices=devices,
        fit_probability=priced.memory.fit_probability,
        verdict=priced.memory.verdict,
        runnable=able,
        why_not=why if able or not why else f"{why}; not runnable yet",
    )


def _on_front(rows: list[CandidateRow]) -> list[bool]:
    points = [(row.step_time_s, row.memory_bytes, row.devices) for row in rows]

    def dominated(point: tuple[float, int, int]) -> bool:
        return any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)

    return [row.verdict != "red" and not dominated(point) for row, point in zip(rows, points, strict=True)]
