"""Why a layout was taken: comparisons with the best layouts without one mechanism, and with one faster on paper.

Each sentence comes from one comparison of two priced layouts, and carries both of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from partool.planner.explain.summary import but, short_time, summary, times
from partool.planner.search.price import Priced
from partool.planner.search.solve import Solution


@dataclass(frozen=True)
class MechanismComparison:
    """The plan's layout beside the best layout without one of its mechanisms."""

    name: str
    """The mechanism with its degree, as in ``Tensor 8``."""
    without: str
    """The mechanism in a sentence, as in ``tensor parallelism``."""
    other: Priced | None
    """The best layout without it, by score; None if there is none."""
    why_none: str = ""
    """Why there is no such layout, as the end of a sentence."""
    none_fits: bool = False
    """True if there are such layouts, and none of them fits."""


def comparisons(solution: Solution, best: Priced) -> Iterator[MechanismComparison]:
    """Yield a comparison for each parallel dimension and each offload that the layout has and the spec leaves open."""
    parallel, layout, mesh, groups = (
        solution.problem.spec.parallel,
        best.layout,
        best.layout.mesh,
        solution.space.groups,
    )
    for name, field, degree, column in (
        ("Tensor", solution.problem.tensor_degree, mesh.tp, groups.tp),
        ("Pipeline", parallel.pipeline.stages, mesh.pp, groups.pp),
        ("Sequence", parallel.sequence.degree, mesh.cp, groups.cp),
        ("Expert", parallel.expert, layout.expert, groups.ep),
        ("Expert tensor", parallel.expert_tensor, layout.expert_tensor, groups.etp),
    ):
        if degree > 1 and field == "auto":
            mask = np.broadcast_to(np.asarray(column) == 1, solution.space.size)
            yield _compared(solution, f"{name} {degree}", f"{name.lower()} parallelism", mask, None)
    policies, offload, asked = solution.space.policies, layout.offload, parallel.offload
    for part, where, open_, stays in (
        ("optimizer's state", offload.optimizer, asked.optimizer == "auto", policies.gpu_fraction == 1.0),
        ("parameters", offload.parameters, asked.parameters == "auto", policies.parameters == 0),
        ("activations", offload.activations, asked.activations == "auto", policies.activations == 0),
    ):
        if where != "none" and open_:
            place = "files" if where == "nvme" else "host memory"
            yield _compared(solution, f"The {part} in {place}", "it", None, stays)


def _compared(solution: Solution, name: str, without: str, groups: Any, policies: Any) -> MechanismComparison:
    if not all(mask is None or bool(np.any(mask)) for mask in (groups, policies)):
        return MechanismComparison(name, without, None, f"the spec's sizes leave no layout without {without}")
    result = solution.without(groups, policies)
    if result is None:
        return MechanismComparison(name, without, None, f"no layout without {without} can run")
    limited = "" if result.complete else " among those that the search came to before its limit of work"
    why_none = f"no layout without {without} fits{limited}"
    return MechanismComparison(name, without, result.best, why_none, none_fits=result.best is None)


def sentence(best: Priced, compared: MechanismComparison) -> str:
    """Return a comparison in one sentence, with both step times and what else tells the layouts apart."""
    other, start = compared.other, f"{compared.name}: "
    if other is None:
        return f"{start}{compared.why_none}."
    takes = f"takes {times(other, best)}{_rest(best, other)}"
    return f"{start}the best found without {compared.without} {takes}: {summary(other.layout)}."


def _rest(best: Priced, other: Priced) -> str:
    """Return how the two layouts differ beside their times, where that decides."""
    if other.step_time_s > best.step_time_s:
        gain = other.step_time_s / best.step_time_s - 1.0
        more = best.risk - other.risk
        errs = f", where such predictions err by {more:.0%}" if 0 < more < gain else ""
        return f", {gain:.1%} more than here{errs}"
    return f", but {but(best, other)}"


def on_paper(solution: Solution, best: Priced) -> str:
    """Return the sentence on a layout that is faster if predictions of mechanisms do not err; empty without one."""
    other = solution.on_paper
    if other is None or other.step_time_s >= best.step_time_s:
        return ""
    gain = 1.0 - other.step_time_s / best.step_time_s
    return (
        f"Not chosen: {summary(other.layout)}. It is {gain:.1%} faster on paper ({short_time(other.step_time_s)}, here "
        f"{short_time(best.step_time_s)}), but {but(best, other)}. limits: {{prefer: fastest}} would leave that out."
    )
