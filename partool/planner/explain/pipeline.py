"""Reasons for a pipeline schedule, from the step times and the traffic of other schedules on the same ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from partool.cost.case import SCHEDULES
from partool.cost.time.pipeline import moves_weights, sent_bytes
from partool.cost.training.predict import pipeline_idle_share
from partool.layout.stages import balance
from partool.plan.layout import Layout, PipelineLayout
from partool.planner.problem import Problem
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced
from partool.planner.search.schedules import schedules
from partool.planner.search.solve import Solution
from partool.schedule import check
from partool.spec.numbers import GIB
from partool.spec.parallel import Pipeline
from partool.strategies.schedules import MOVING_WEIGHTS

_NARROWING = ("waves", "in_flight", "chunks")
"""Fields of the spec that set sizes of a schedule; each of these fields exists for only some schedules."""
_CLEARLY = 0.02
"""Share of the time of the passes; a remark is given only if another schedule idles less by more than this share."""


def pipelined(problem: Problem) -> str:
    """Return text on a setting that implies several stages although ``stages`` is not set; empty if no setting does."""
    pipeline = problem.spec.parallel.pipeline
    if problem.lists is not None:
        return f"the schedule's file has {problem.lists.ranks} rows, one per rank."
    if pipeline.layers != "auto":
        return f"layers gives {len(pipeline.layers)} stages." if len(pipeline.layers) > 1 else ""
    name = next((name for name in _NARROWING if getattr(pipeline, name) not in ("auto", 1)), "")
    name = name or next((name for name in ("waves", "in_flight") if getattr(pipeline, name) != "auto"), "")
    return f"{name}: {getattr(pipeline, name)} asks for a pipeline." if name else ""


def pipeline_reasons(solution: Solution, best: Priced) -> Iterator[str]:
    """Yield sentences on the schedule of a pipeline; yield nothing for a single pipeline rank."""
    layout = best.layout
    if layout.mesh.pp == 1:
        return
    idle = _idle(best)
    others = list(_others(solution, best))
    pinned = solution.problem.spec.parallel.pipeline.schedule != "auto"
    narrowed = _narrowed(solution.problem, layout)
    text = f"Schedule {layout.pipeline.form}: ranks idle {idle:.1%} of the passes' time"
    if pinned:
        yield f"{text}; {solution.problem.why_fixed('pipeline.schedule')}."
        yield from _uneven(solution, best)
    else:
        listed = ", ".join(
            f"{one.layout.pipeline.form}{'' if one.layout.compile == layout.compile else _compiled(one.layout)} "
            f"{_more(one, best)}"
            for one in others
            if not moves_weights(one.layout)
        )
        text += f"; {narrowed}." if narrowed else "."
        yield f"{text} With the same ranks and micro-batches: {listed}." if listed else text
        yield from _halved(solution.problem, best)
    yield from _travels(solution, best, others)


def _narrowed(problem: Problem, layout: Layout) -> str:
    """Return text that lists the schedules with the sizes that the spec sets; empty if the spec sets no size."""
    pipeline = problem.spec.parallel.pipeline
    given = [f"{name}: {getattr(pipeline, name)}" for name in _NARROWING if getattr(pipeline, name) != "auto"]
    if not given:
        return ""
    names = list(dict.fromkeys(SCHEDULES[one.schedule] for one in schedules(problem, layout.mesh.pp)))
    if len(names) == 1:
        return f"{', '.join(given)} ask{'s' * (len(given) == 1)} for {names[0]}"
    return f"{', '.join(given)} leave{'s' * (len(given) == 1)} {', '.join(names[:-1])} and {names[-1]}"


def _uneven(solution: Solution, best: Priced) -> Iterator[str]:
    """Yield a remark if the schedule zb-v idles more than one of the schedules zb-h1, 1f1b and interleaved.

    This can happen because the action list of zb-v is made without the real times of its actions.
    """
    layout = best.layout
    if layout.pipeline.schedule != "zb-v":
        return
    others = [_under(solution, best, name, chunks) for name, chunks in (("zb-h1", 1), ("1f1b", 1), ("interleaved", 2))]
    other = min((one for one in others if one is not None), key=_idle, default=None)
    if other is not None and _idle(other) < _idle(best) - _CLEARLY:
        form = other.layout.pipeline.form
        yield (
            f"{form} would idle {_idle(other):.1%} on the same ranks, and take {_more(other, best)}: "
            "the list of zb-v is made for equal times of forward passes and both halves of backward passes, and for "
            "stages alike."
        )


def _idle(one: Priced) -> float:
    return pipeline_idle_share(one.job, one.layout)


def _others(solution: Solution, best: Priced) -> Iterator[Priced]:
    """Yield the best layout for each other schedule, fastest first; mesh and micro-batch size are those of ``best``."""
    groups, search, mesh = solution.space.groups, solution.search, best.layout.mesh
    layout = best.layout
    same = (groups.pp == mesh.pp) & (groups.tp == mesh.tp) & (groups.cp == mesh.cp) & (groups.ep == layout.expert)
    same &= groups.etp == layout.expert_tensor
    same &= (groups.micro_batch == layout.micro_batch) & ((groups.zero == layout.data.zero) | groups.ring)
    same &= (groups.shards == mesh.dp_shard) | groups.ring
    same &= groups.schedule != SCHEDULES.index(layout.pipeline.schedule)
    index = np.flatnonzero(same)
    if not len(index):
        return
    policy = next((key[1] for key, one in search.exact.items() if one is best), int(search.policies[0]))
    policies = np.full(len(index), policy)
    only = np.flatnonzero(solution.space.only)
    if len(only):
        policies[np.asarray(groups.ring)[index]] = only[0]
    allowed = solution.space.allowed(index, policies)
    index, policies = index[allowed], policies[allowed]
    bounds, _ = search.columns(index, policies)
    seen: dict[str, Priced] = {}
    for at in np.argsort(bounds, kind="stable"):
        name = SCHEDULES[int(groups.take(index[at]).schedule)]
        if np.isfinite(bounds[at]) and name not in seen:
            seen[name] = search.price(int(index[at]), int(policies[at]))
    yield from sorted(seen.values(), key=lambda one: one.time.step_time_s)


def _halved(problem: Problem, best: Priced) -> Iterator[str]:
    """Yield a sentence on why the blocks (layers) of a pipelined layout are compiled, or why not."""
    if not problem.compiles_later:
        return
    name = best.layout.pipeline.schedule
    if best.layout.compile == "block":
        text = "excludes halved backward passes and weights that travel"
        yield f"Blocks are compiled, which {text}: zb-h1, zb-v and WeiPipe were priced with blocks that are not."
    elif bool(problem.excludes_compile(SCHEDULES.index(name))):
        yield f"Blocks are not compiled: {name} excludes it, and idles so much less that it is faster all the same."


def _travels(solution: Solution, best: Priced, others: list[Priced]) -> Iterator[str]:
    """Yield a sentence that compares the traffic of sending weights with the traffic of sending activations."""
    problem, layout = solution.problem, best.layout
    if not problem.job.backward:
        return
    ring = moves_weights(layout)
    count, pp = layout.derived.accumulation, layout.mesh.pp
    if not ring and check("weipipe", pp, count, 1) is not None:
        yield f"WeiPipe takes multiples of {pp} micro-batches, not {count}."
        return
    other = _the_other_way(problem, layout)
    mine, theirs = (sent_bytes(best.job, one, best.job.master_bytes) for one in (layout, other))
    weights, activations = (mine, theirs) if ring else (theirs, mine)
    tokens = layout.micro_batch * problem.spec.training.sequence_length // layout.mesh.cp
    even = tokens * weights / max(activations, 1)
    verb = "sends" if ring else "would send"
    text = (
        f"WeiPipe {verb} {_size(weights)} of weights and gradients per rank and step, activations "
        f"{'would take' if ring else 'take'} {_size(activations)}: weights are less from {even:,.0f} tokens per "
        f"micro-batch on, there are {tokens:,}"
    )
    wanted = [one for one in others if moves_weights(one.layout) != ring]
    if wanted:
        text += f"; {'its step' if not ring else wanted[0].layout.pipeline.form} would take {_more(wanted[0], best)}"
    elif not ring:
        pinned = _pinned_away(problem)
        text += f"; the spec rules it out ({pinned})" if pinned else "; it does not fit"
    yield text + "."


def _the_other_way(problem: Problem, layout: Layout) -> Layout:
    """Return the layout under WeiPipe, or under 1F1B if ``layout`` has WeiPipe, to predict the traffic."""
    name = "1f1b" if moves_weights(layout) else "weipipe"
    stages = balance([1.0] * problem.model.blocks, layout.mesh.pp)
    pipeline = PipelineLayout(
        stages=layout.mesh.pp, schedule=name, layers=tuple(stop - start for start, stop in stages)
    )
    return layout.changed({"pipeline": pipeline, "derived.schedule_text": "", "derived.schedule_hash": ""})


def _under(solution: Solution, best: Priced, name: str, chunks: int) -> Priced | None:
    """Return ``best`` with the schedule ``name`` and with layers split anew into stages; None if this is impossible."""
    problem, layout, mesh = solution.problem, best.layout, best.layout.mesh
    given = problem.spec.parallel.pipeline.layers
    kept = given if given != "auto" and len(given) == mesh.pp * chunks else "auto"
    pipeline = Pipeline(stages=mesh.pp, schedule=name, chunks=chunks, layers=kept)  # type: ignore[arg-type]
    tensor = problem.spec.parallel.tensor.model_copy(update={"degree": mesh.tp})
    other = problem.with_parallel(
        pipeline=pipeline,
        micro_batch=layout.micro_batch,
        tensor=tensor,
        expert=layout.expert,
        **({name: getattr(layout, name) for name in ("expert_tensor", "expert_exchange") if layout.expert > 1}),
    )
    space = build(other)
    groups = space.groups
    same = (groups.cp == mesh.cp) & (groups.zero == layout.data.zero) & (groups.shards == mesh.dp_shard)
    policy = next((key[1] for key, one in solution.search.exact.items() if one is best), None)
    if policy is None or not np.any(same):
        return None
    return Priced(other, layout_of(other, space.rows(int(np.argmax(same)), policy)))


def _pinned_away(problem: Problem) -> str:
    """Return the setting of the spec that excludes WeiPipe; empty if no setting does."""
    parallel = problem.spec.parallel
    if parallel.pipeline.schedule != "auto" and parallel.pipeline.schedule not in MOVING_WEIGHTS:
        return "schedule"
    for name in ("waves", "in_flight"):
        if (value := getattr(parallel.pipeline, name)) != "auto":
            return f"{name}: {value}"
    if {"cpu", "nvme"} & {parallel.offload.optimizer, parallel.offload.parameters, parallel.offload.activations}:
        return "offload"
    if parallel.data.zero not in ("auto", 0):
        return f"zero: {parallel.data.zero}"
    if parallel.recompute not in ("auto", "full"):
        return "recompute"
    return "compile: block" if parallel.compile == "block" else ""


def _compiled(layout: Layout) -> str:
    return " (not compiled)" if layout.compile == "none" else " (compiled)"


def _more(one: Priced, best: Priced) -> str:
    ratio = one.time.step_time_s / best.time.step_time_s - 1.0
    if abs(ratio) < 0.0005:
        return "as long"
    size = f"{abs(ratio):.1%} {'longer' if ratio > 0 else 'less'}"
    return size if one.fits else f"{size}, but does not fit"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.1f} MiB"
