"""Table of candidates in a plan: the fastest layout of each kind, and the Pareto front of time, memory and devices."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from partool.diagnostics.record import Diagnostic
from partool.plan.types import CandidateRow
from partool.planner.explain.front import front, quickest
from partool.planner.explain.summary import short_time, summary, why_lost
from partool.planner.forms.runnable import runnable
from partool.planner.problem import Problem
from partool.planner.search.ordered import fastest_of_kinds
from partool.planner.search.price import Priced
from partool.planner.search.solve import Solution

ROWS = 40
_FASTEST = 10
_SMALLER = 2
"""How many times the number of devices is halved to find layouts on fewer devices."""


def candidates(solution: Solution, best: Priced, fewer: Iterable[tuple[Problem, Priced]]) -> tuple[CandidateRow, ...]:
    """Return at most :data:`ROWS` rows of the table, fastest first; one row is the plan's layout.

    ``fewer`` are good layouts on fewer devices, each with the problem that it solves.
    """
    by_id = {id(best): (solution.problem, best)}
    for priced in [*islice(fastest_of_kinds(solution.search, kind), _FASTEST), *front(solution)]:
        by_id.setdefault(id(priced), (solution.problem, priced))
    for problem, priced in fewer:
        by_id[id(priced)] = (problem, priced)
    rows = [_row(problem, priced, best) for problem, priced in list(by_id.values())[:ROWS]]
    ends = _on_front(rows)
    marked = [row.model_copy(update={"pareto": on}) for row, on in zip(rows, ends, strict=True)]
    return tuple(sorted(marked, key=lambda row: (row.step_time_s, row.memory_bytes, row.summary)))


def fewer_are_faster(problem: Problem, best: Priced, rows: Iterable[CandidateRow], error: float) -> list[Diagnostic]:
    """Return a finding if a step on half or a quarter of the devices is faster by more than ``error``.

    ``error`` is the relative error of predictions.

    The plan uses all devices of the spec even if a small training on many devices mostly communicates.
    """
    world, devices = problem.world_size, problem.devices
    limit_s = best.step_time_s * (1.0 - error)
    least = devices.per_node * (problem.spec.launch.min_nodes or 0)
    enough = (row for row in rows if max(1, least) <= row.devices < world)
    faster = [row for row in enough if row.step_time_s < limit_s and row.runnable and row.verdict == "green"]
    if not faster:
        return []
    row = min(faster, key=lambda one: (one.step_time_s, one.devices))
    message = (
        f"{row.devices} of the {world} devices would take {short_time(row.step_time_s)} per step, all of them take "
        f"{short_time(best.step_time_s)}: {row.summary}"
    )
    nodes, part = divmod(row.devices, devices.per_node)
    one = "nodes: 1, " if devices.nodes > 1 else ""
    help = f"write hardware: {{nodes: {nodes}}}" if nodes else f"write hardware: {{{one}per_node: {part}}}"
    path = ("hardware", "nodes" if nodes else "per_node")
    return [Diagnostic("PT276", message, severity="warning", path=path, help=f"{help}, or a larger global_batch")]


def kind(priced: Priced) -> tuple[Any, ...]:
    """Return the kind of a layout: a tuple of features. Layouts with equal features are of one kind."""
    layout, mesh = priced.layout, priced.layout.mesh
    return (
        mesh.tp > 1, mesh.pp > 1, mesh.cp > 1, layout.expert > 1,
        layout.data.zero, mesh.dp_replicate > 1 and layout.data.zero > 0,
        max(layout.recompute), layout.offload.optimizer, layout.offload.parameters, layout.offload.activations,
    )  # fmt: skip


def fewer_devices(problem: Problem) -> list[tuple[Problem, Priced]]:
    """Return good layouts on half and on a quarter of the devices, each with the problem that the layout solves.

    Where the spec leaves schedule, offload or sequence ``auto``, the layouts have 1F1B, no offload, and sequence
    parallelism only for long sequences.
    """
    layouts = []
    devices, parallel = problem.devices, problem.spec.parallel
    pipeline, offload = parallel.pipeline, parallel.offload
    if pipeline.schedule == "auto" and pipeline.chunks == "auto":
        pipeline = pipeline.model_copy(update={"schedule": "1f1b", "chunks": 1})
    # Pinned offload of parameters implies offload of the optimizer's state.
    follows = offload.parameters in ("cpu", "nvme")
    names = ("parameters", "activations") if follows else ("optimizer", "parameters", "activations")
    kept = {name: "none" for name in names if getattr(offload, name) == "auto"}
    sequence = parallel.sequence
    if sequence.degree == "auto" and not problem.granted & {"sequence", "long_sequence"}:
        sequence = sequence.model_copy(update={"degree": 1})
    plain = problem.with_parallel(pipeline=pipeline, sequence=sequence, offload=offload.model_copy(update=kept))
    for _ in range(_SMALLER):
        if devices.nodes > 1:
            devices = devices.model_copy(update={"nodes": devices.nodes // 2})
        elif devices.per_node > 1 and devices.backend != "cpu":
            devices = devices.model_copy(update={"per_node": devices.per_node // 2})
        else:
            break
        smaller = plain.on(nodes=devices.nodes, per_node=devices.per_node)
        best = quickest(smaller)
        if best is not None and best.safe:
            layouts.append((smaller, best))
    return layouts


def _row(problem: Problem, priced: Priced, best: Priced) -> CandidateRow:
    devices = problem.world_size
    why = "" if priced is best else why_lost(best, priced)
    able = runnable(problem, priced.layout)
    return CandidateRow(
        summary=summary(priced.layout),
        step_time_s=priced.step_time_s,
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
