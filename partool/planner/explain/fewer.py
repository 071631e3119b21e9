"""Layouts on fewer devices than the spec has: rows of tables, and a finding where they are as fast."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from partool.diagnostics.record import Diagnostic
from partool.planner.explain.front import least_bound
from partool.planner.explain.summary import short_time, summary
from partool.planner.forms.runnable import runnable
from partool.planner.problem import Problem
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.price import Priced

AS_FAST = 0.02
"""Share by which a step on fewer devices may take longer, and have a worse score, to be called as fast."""
_SHARES = tuple(Fraction(*one) for one in ((7, 8), (5, 6), (3, 4), (2, 3), (5, 8), (1, 2), (1, 3), (1, 4)))
"""Shares of the nodes that are tried: batches divide among them as a rule."""
_SAVED = 0.05
"""Share of the passes' time per device that larger pieces of work on fewer devices save at most."""
_HALVED = 2
"""How many times the number of devices is halved to find layouts for tables."""


def plain(problem: Problem) -> Problem:
    """Return the problem with 1F1B, no offload, and sequence ranks for long sequences only, where these are open."""
    parallel = problem.spec.parallel
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
    return problem.with_parallel(pipeline=pipeline, sequence=sequence, offload=offload.model_copy(update=kept))


def fewer_devices(problem: Problem) -> list[tuple[Problem, Priced]]:
    """Return good layouts on half and on a quarter of the devices, each with the :func:`plain` problem it solves."""
    layouts, devices, simpler = [], problem.devices, plain(problem)
    for _ in range(_HALVED):
        if devices.nodes > 1:
            devices = devices.model_copy(update={"nodes": devices.nodes // 2})
        elif devices.per_node > 1 and devices.backend != "cpu":
            devices = devices.model_copy(update={"per_node": devices.per_node // 2})
        else:
            break
        smaller = simpler.on(nodes=devices.nodes, per_node=devices.per_node)
        best = least_bound(smaller)
        if best is not None and best.safe:
            layouts.append((smaller, best))
    return layouts


def fewer_are_as_fast(problem: Problem, best: Priced) -> Iterator[Diagnostic]:
    """Yield a finding if a step on fewer devices is predicted to be faster, or slower by :data:`AS_FAST` at most.

    The plan uses all devices of the spec even if a small training on many devices mostly communicates. Only numbers of
    devices are searched on which the passes alone do not take longer, and only for layouts that are as good.
    """
    as_fast = [(smaller, one) for smaller, one in _as_fast(problem, best) if one.safe]
    able = [pair for pair in as_fast if runnable(pair[0], pair[1].layout) or not runnable(problem, best.layout)]
    if not able:
        return
    smaller, one = min(able, key=lambda pair: (pair[1].score_s, pair[0].world_size))
    message = (
        f"{smaller.world_size} of the {problem.world_size} devices would take {short_time(one.step_time_s)} per step, "
        f"all of them take {short_time(best.step_time_s)}: {summary(one.layout)}"
    )
    nodes, per_node = smaller.devices.nodes, smaller.devices.per_node
    if per_node == problem.devices.per_node:
        change, path = f"nodes: {nodes}", "nodes"
    else:
        change, path = ("nodes: 1, " if problem.devices.nodes > 1 else "") + f"per_node: {per_node}", "per_node"
    help = f"write hardware: {{{change}}}, or a larger global_batch"
    yield Diagnostic("PT276", message, severity="warning", path=("hardware", path), help=help)


def _as_fast(problem: Problem, best: Priced) -> Iterator[tuple[Problem, Priced]]:
    """Yield the best layout on each smaller number of devices on which one is as good and as fast."""
    world, simpler = problem.world_size, plain(problem)
    passes_s = (1.0 - _SAVED) * (best.terms_s["forward"] + best.terms_s["backward"])
    longest_s = (1.0 + AS_FAST) * best.step_time_s
    for nodes, per_node in _sizes(problem):
        if passes_s * world / (nodes * per_node) > longest_s:
            continue
        smaller = simpler.on(nodes=nodes, per_node=per_node)
        smaller.budget.subject = f"layouts on only {smaller.world_size:,} devices"
        one = Search(smaller, build(smaller), limit_s=(1.0 + AS_FAST) * best.score_s).run().best
        if one is not None and one.step_time_s <= longest_s:
            yield smaller, one


def _sizes(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield the smaller numbers of nodes and of devices per node to try, that the launch section allows."""
    devices, least = problem.devices, problem.spec.launch.min_nodes or 0
    nodes = [share * devices.nodes for share in _SHARES]
    yield from ((int(count), devices.per_node) for count in nodes if count.denominator == 1 and count >= least)
    if devices.backend != "cpu" and devices.nodes <= 2 and least <= 1:
        parts = [share * devices.per_node for share in (Fraction(1, 2), Fraction(1, 4))]
        yield from ((1, int(part)) for part in parts if part.denominator == 1)
