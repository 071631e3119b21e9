"""Reasons for a layout, the runners-up and why each of them lost, and the tightest limit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from partool.cost.case import RECOMPUTE
from partool.cost.time.pipeline import moves_weights
from partool.diagnostics.record import Diagnostic
from partool.plan.as_spec import as_yaml
from partool.plan.types import Alternative
from partool.planner.explain.candidates import kind
from partool.planner.explain.pipeline import pipeline_reasons, pipelined
from partool.planner.explain.sequence import sequence_reasons
from partool.planner.explain.summary import TIE, recompute, summary, why_lost
from partool.planner.explain.tensor import tensor_reasons
from partool.planner.kernels import fused
from partool.planner.search import gathers, offload, tiles
from partool.planner.search.branch_and_bound import SLACK, firsts
from partool.planner.search.ordered import fastest_of_kinds
from partool.planner.search.price import Priced
from partool.planner.search.runnable import runnable
from partool.planner.search.solve import Solution
from partool.spec.numbers import GIB

_ALTERNATIVES = 4
_LOOKED_AT = 5
"""Number of kinds of layouts for which the best layout is priced exactly, to find runners-up."""
_NEAREST = 20_000
"""Number of layouts that are searched for different kinds: the layouts with the least time bounds."""

_MESHES = 16
"""Number of groups (mesh, micro-batch and so on) without pipeline that are searched per ZeRO stage for runners-up."""


def reasons(solution: Solution, best: Priced) -> tuple[str, ...]:
    """Return one sentence for each decision that the layout contains."""
    found = [_searched(solution, best)]
    layout, mesh, parallel = best.layout, best.layout.mesh, solution.problem.spec.parallel
    if solution.better is not None:
        found.append(_better(best, solution.better))
    found.append(_zero(solution, best))
    found += gathers.sentences(solution.problem, layout)
    groups = solution.space.groups
    for name, field, degree, column in (
        ("Tensor", solution.problem.tensor_degree, mesh.tp, groups.tp),
        ("Pipeline", parallel.pipeline.stages, mesh.pp, groups.pp),
        ("Sequence", parallel.sequence.degree, mesh.cp, groups.cp),
        ("Expert", parallel.expert, layout.expert, groups.ep),
    ):
        if degree > 1:
            pinned = field != "auto"
            found.append(
                f"{name} {degree}: "
                + (
                    "the spec asks for it."
                    if pinned
                    else (pipelined(solution.problem) if name == "Pipeline" else "")
                    or _without(solution, best, name, column)
                )
            )
    found += tensor_reasons(solution.problem, best)
    found += sequence_reasons(solution.problem, best)
    found += pipeline_reasons(solution, best)
    found.append(_recompute(solution, best))
    found += tiles.sentences(solution.problem, layout)
    found += fused.words(solution.problem, layout)
    found += offload.sentences(solution.problem, best)
    if parallel.micro_batch == "auto":
        share = layout.micro_batch * layout.derived.accumulation
        found.append(f"Micro-batch {layout.micro_batch}: the fastest way to split {share} sequences per rank and step.")
    return tuple(found)


def _searched(solution: Solution, best: Priced) -> str:
    counts = solution.summary()
    if counts.enumerated == 1:
        return "The spec leaves one layout."
    able = " that can run" if solution.able is not None and solution.able.best is best else ""
    sure = "and is sure to fit" if able else "that is sure to fit"
    if not best.safe:
        sure = "and may fit; none is sure to" if able else "that may fit; none is sure to"
    founds = [one for one in (solution.overall, solution.able) if one is not None]
    ended = "" if all(one.complete for one in founds) else " of those that the search came to before its limit of work"
    return (
        f"{counts.enumerated:,} layouts: {sum(counts.pruned.values()):,} ruled out, {counts.evaluated:,} prices "
        f"computed, {counts.simulated:,} simulated. This is the fastest{able} {sure}{ended}."
    )


def _better(best: Priced, better: Priced) -> str:
    gain = 1.0 - better.time.step_time_s / best.time.step_time_s
    return f"{summary(better.layout)} would take {gain:.1%} less time, but cannot run yet."


def _zero(solution: Solution, best: Priced) -> str:
    layout = best.layout
    if solution.problem.spec.parallel.data.zero != "auto":
        return f"ZeRO-{layout.data.zero}: the spec asks for it."
    if layout.mesh.dp * layout.mesh.cp == 1 and layout.data.zero == 3:
        return "ZeRO-3 on one rank: a layer's copies of parameters exist only while it computes."
    if layout.mesh.dp * layout.mesh.cp == 1:
        return "ZeRO-0: there is one data-parallel rank, so there is nothing to share."
    if layout.data.zero == 0:
        return "ZeRO-0: copies of the state fit, and sharing it would not be faster."
    mesh, groups = layout.mesh, solution.space.groups
    same = (groups.tp == mesh.tp) & (groups.pp == mesh.pp) & (groups.cp == mesh.cp) & (groups.zero < layout.data.zero)
    same = same & (groups.micro_batch == layout.micro_batch)
    fits = {zero for zero in range(layout.data.zero) if _any_fits(solution, same & (groups.zero == zero))}
    none = [str(zero) for zero in range(layout.data.zero) if zero not in fits]
    if len(none) == layout.data.zero:
        return f"ZeRO-{layout.data.zero}: on this mesh, stage{'s' * (len(none) > 1)} {', '.join(none)} would not fit."
    return f"ZeRO-{layout.data.zero}: the fastest of the stages that fit."


def _any_fits(solution: Solution, groups: Any) -> bool:
    """Return True if device memory is enough for at least one layout of the given groups of layouts."""
    index = np.flatnonzero(groups)
    if not len(index):
        return False
    return bool((solution.search.least_bytes[index] <= solution.problem.capacity_bytes).any())


def _without(solution: Solution, best: Priced, name: str, column: Any) -> str:
    """Return the end of a sentence that compares ``best`` with the layouts that do not use the parallelism ``name``."""
    search = solution.search
    if not np.any(column == 1):
        return "the spec's sizes leave no layout without it."
    index = np.flatnonzero((column == 1) & (search.least_bytes <= solution.problem.capacity_bytes * (1.0 + SLACK)))
    if not len(index):
        return f"no layout without {name.lower()} parallelism fits."
    bound = float(search.bound_s[index].min())
    slower = bound / best.time.step_time_s - 1.0
    if slower > TIE:
        return f"every layout without it is slower, by {slower:.1%} or more."
    return "the layouts without it that would be faster do not fit."


def _recompute(solution: Solution, best: Priced) -> str:
    text = recompute(best.layout)
    if solution.problem.spec.parallel.recompute != "auto":
        return f"Recompute {text}: the spec asks for it."
    if moves_weights(best.layout):
        return "Recompute full: WeiPipe keeps the inputs of stages only, and computes the rest again."
    if text == "none":
        where = ", in host memory" if best.layout.offload.activations != "none" else ""
        return f"Recompute none: all activations fit{where}."
    if "keep_attention" in best.layout.recompute:
        return (
            f"Recompute {text}: layouts that keep more do not fit, or are slower for what else they need; attention, "
            "whose work grows with the square of the sequence, is not done twice."
        )
    return f"Recompute {text}: layouts that keep more do not fit, or are slower for what else they need."


def alternatives(solution: Solution, best: Priced) -> tuple[Alternative, ...]:
    """Return runners-up of different kinds, fastest first.

    A runner-up that is faster than the plan was not taken because it cannot run, does not fit, or is not sure to fit.
    """
    found: list[Priced] = [solution.better] if solution.better is not None else []
    found += (_too_large(solution, best) or _unsure(solution, best))[:1]
    kinds = {kind(priced) for priced in [best, *found]}
    able = runnable(solution.problem, best.layout)
    _price_runners_up(solution)

    def other(priced: Priced) -> bool:
        return kind(priced) not in kinds and priced.fits

    def ready(priced: Priced) -> bool:
        return other(priced) and runnable(solution.problem, priced.layout)

    # A runnable plan is compared with other runnable plans first.
    for wanted in (ready, other) if able else (other,):
        for priced in islice(fastest_of_kinds(solution.search, kind, wanted), max(0, _ALTERNATIVES - len(found))):
            kinds.add(kind(priced))
            found.append(priced)
    rows = sorted(found, key=lambda priced: (priced.time.step_time_s, summary(priced.layout)))
    return tuple(_alternative(solution, best, priced) for priced in rows)


def _price_runners_up(solution: Solution) -> None:
    """Price the best layouts of several kinds."""
    if solution.able is not None and solution.able.best is not None:
        _price_kinds(solution, solution.able.leaves)
    _price_unstaged(solution)
    _price_kinds(solution, solution.overall.leaves)


def _price_unstaged(solution: Solution) -> None:
    """Price the fastest runnable layout without pipeline for each ZeRO stage and recomputation policy, at most five.

    Bounds of pipelines are loose, so the search prices many pipelines before a runner-up without pipeline.
    """
    search, space, groups = solution.search, solution.space, solution.space.groups
    index = np.flatnonzero(space.runnable & (groups.pp == 1))
    index = index[np.argsort(search.bound_s[index], kind="stable")]
    index = np.concatenate([index[np.asarray(groups.zero)[index] == zero][:_MESHES] for zero in range(4)])
    policies = np.flatnonzero(space.runnable_policies)
    group, policy = np.repeat(index, len(policies)), np.tile(policies, len(index))
    allowed = space.allowed(group, policy)
    group, policy = group[allowed], policy[allowed]
    bound, _ = search.columns(group, policy)
    order = np.argsort(bound, kind="stable")
    order = order[np.isfinite(bound[order])]
    code = len(RECOMPUTE) * np.asarray(groups.zero)[group[order]] + space.policies.recompute[policy[order]]
    for at in np.sort(firsts(code))[:_LOOKED_AT]:
        search.price(int(group[order[at]]), int(policy[order[at]]))


def _price_kinds(solution: Solution, leaves: Any) -> None:
    """Price the fastest layout of each of several kinds; kinds differ in parallelism, recomputation or offload."""
    table = solution.space.policies
    sure = np.flatnonzero(leaves.probability >= 0.99)
    order = sure[np.argsort(leaves.bound_s[sure], kind="stable")][:_NEAREST]
    group, policy = leaves.group[order], leaves.policy[order]
    row = solution.space.groups.take(group)
    code = np.zeros(len(order), dtype=np.int64)
    for column in (
        row.tp > 1, row.pp > 1, row.cp > 1, row.ep > 1, row.zero,
        table.recompute[policy], table.gpu_fraction[policy] < 1, table.parameters[policy], table.activations[policy],
    ):  # fmt: skip
        code = len(RECOMPUTE) * code + column
    for index in np.sort(firsts(code))[:_LOOKED_AT]:
        solution.search.price(group[index], policy[index])


def _unsure(solution: Solution, best: Priced) -> list[Priced]:
    """Return layouts that are faster than ``best`` and predicted to fit, but not sure to fit."""
    if not best.safe:
        return []
    leaves = solution.overall.leaves
    faster = np.flatnonzero((leaves.bound_s < best.time.step_time_s * (1.0 - TIE)) & (leaves.probability < 0.99))
    order = faster[np.argsort(leaves.bound_s[faster], kind="stable")][:3]
    priced = [solution.search.price(leaves.group[index], leaves.policy[index]) for index in order]
    return [one for one in priced if one.fits and not one.safe and one.time.step_time_s < best.time.step_time_s]


def _too_large(solution: Solution, best: Priced) -> list[Priced]:
    """Return the layout that is fastest without memory limits; nothing if it fits or is not faster than ``best``."""
    fastest = solution.fastest
    slower = fastest is None or fastest.time.step_time_s > best.time.step_time_s * (1.0 - TIE)
    return [] if fastest is None or fastest.fits or slower else [fastest]


def _alternative(solution: Solution, best: Priced, other: Priced) -> Alternative:
    return Alternative(
        summary=summary(other.layout),
        step_time_s=other.time.step_time_s,
        memory_bytes=other.memory.total_bytes,
        runnable=runnable(solution.problem, other.layout),
        why_not=why_lost(best, other),
        change=as_yaml(other.layout, solution.problem.spec.parallel),
    )


def limit(solution: Solution, best: Priced) -> str:
    """Return text on what keeps the step from being faster: memory, compute, or another term of the step time."""
    fastest = solution.fastest
    if fastest is not None and not fastest.fits and fastest.time.step_time_s < best.time.step_time_s * (1.0 - TIE):
        terms = fastest.memory.terms_bytes
        name = max(terms, key=lambda key: terms[key])
        over = fastest.memory.total_bytes - fastest.memory.capacity_bytes
        gain = 1.0 - fastest.time.step_time_s / best.time.step_time_s
        return (
            f"memory. {summary(fastest.layout)} would take {gain:.1%} less time, but needs {over / GIB:.1f} GiB more "
            f"than there is; its {name} alone take{'' if name.endswith('s') else 's'} {terms[name] / GIB:.1f} GiB."
        )
    terms_s = best.time.terms_s
    waits = {name: value for name, value in terms_s.items() if name not in ("forward", "backward")}
    name = max(waits, key=lambda key: waits[key])
    share = waits[name] / best.time.step_time_s
    if share < 0.02:
        return "compute. The step is almost all forward and backward pass; faster devices or more of them would help."
    return f"{name}, {share:.1%} of the step: more than anything else beside compute."


def tight(solution: Solution, best: Priced) -> Iterator[Diagnostic]:
    """Yield a warning if the layout is not sure to fit in memory."""
    if best.safe:
        return
    memory, devices = best.memory, solution.problem.devices
    message = (
        f"the plan needs {memory.total_bytes / GIB:.1f} of {devices.memory_bytes / GIB:.1f} GiB per rank; with the "
        f"uncertainty of the prediction it fits with a probability of {memory.fit_probability:.0%}"
    )
    yield Diagnostic("PT302", message, severity="warning", path=("hardware",), help=f"safer: {_safer(solution)}")


def _safer(solution: Solution) -> str:
    from partool.planner.explain.changes import single_changes

    for text, changed in single_changes(solution.problem):
        if changed.best is not None and changed.best.safe:
            return text
    return "devices with more memory"
