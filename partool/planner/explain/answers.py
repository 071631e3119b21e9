"""A plan's first answers: whether it fits, why it was taken, what is the next best, what limits it, how sure it is.

The answers take at most :data:`MOST_LINES` lines of a terminal of 80 columns; the sentences behind them are the plan's
reasons.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from partool.cost.evidence import fit_limit
from partool.plan.types import PlanAnswer, Prediction
from partool.planner.explain.choice import MechanismComparison
from partool.planner.explain.limits import Limit
from partool.planner.explain.summary import brief, short_time
from partool.planner.problem import Problem
from partool.planner.search.price import Priced
from partool.planner.search.solve import Solution
from partool.spec.numbers import GIB

MOST_LINES = 7
"""Most lines of all answers on a terminal of 80 columns."""
WIDTH = 68
"""Columns of an answer beside its question on such a terminal."""


@dataclass(frozen=True)
class Compared:
    """What a plan's layout is compared with."""

    without: Sequence[MechanismComparison]
    """The best layouts without one mechanism each."""
    rows: Sequence[tuple[str, Problem, Priced]]
    """Other layouts with their roles and problems (:func:`partool.planner.explain.comparison.rows`)."""
    limit: Limit
    """What keeps the step from being faster."""


def answers(solution: Solution, best: Priced, compared: Compared, prediction: Prediction) -> tuple[PlanAnswer, ...]:
    """Return the answers in the order of a reader's questions."""
    after = (
        PlanAnswer(question="Next best", text=_next_best(solution, best, compared)),
        PlanAnswer(question="Limit", text=f"{compared.limit.kind}{compared.limit.short}"),
        PlanAnswer(question="Sure", text=_sure(prediction)),
    )
    fits = PlanAnswer(question="Fits", text=_fits(best))
    free_lines = MOST_LINES - sum(_lines(one.text) for one in (fits, *after))
    return fits, PlanAnswer(question="Why", text=_why(solution, best, compared, free_lines)), *after


def _lines(text: str) -> int:
    return len(textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def _fits(best: Priced) -> str:
    memory, devices = best.memory, best.problem.devices
    what = "rank" if devices.backend == "cpu" else "device"
    sure = min(1.0 - best.unfit, fit_limit()[0])
    return f"{sure:.0%} sure: {memory.total_bytes / GIB:.1f} of {devices.memory_bytes / GIB:.1f} GiB per {what}"


def _why(solution: Solution, best: Priced, compared: Compared, most_lines: int) -> str:
    """Return the comparisons behind the choice, as many as the lines take."""
    count = solution.space.enumerated
    if count == 1:
        return "the spec leaves one layout"
    text = f"least time × (1 + risk) of {count:,} layouts: {short_time(best.step_time_s)}, risk {_risk(best)}"
    for one in compared.without:
        longer = f"{text}; {_without(best, one)}"
        if _lines(longer) > max(most_lines, 1):
            break
        text = longer
    return text


def _risk(one: Priced) -> str:
    """Return the share that the score of a layout adds to its step time."""
    return f"{one.factor - 1.0:.1%}"


def _without(best: Priced, compared: MechanismComparison) -> str:
    other = compared.other
    name = compared.name if compared.without == "it" else compared.without
    without = f"without {name[:1].lower()}{name[1:]}"
    if other is None:
        return f"none fits {without}" if compared.none_fits else f"there is none {without}"
    risk = f", risk {_risk(other)}" if other.step_time_s <= best.step_time_s else ""
    return f"{without} {short_time(other.step_time_s)}{risk}"


def _next_best(solution: Solution, best: Priced, compared: Compared) -> str:
    """Return the layout with the next score among those that fit on the same devices and that no other line names."""
    named = solution.on_paper if compared.limit.kind == "evidence" else None
    others = [
        one
        for _, problem, one in compared.rows
        if one.fits
        and one is not named
        and one is not solution.better
        and problem.world_size == best.problem.world_size
    ]
    other = min(others, key=lambda one: one.score_s, default=None)
    if other is None:
        return "none: no layout of another kind was found to fit"
    here = f"here {short_time(best.step_time_s)}, {_risk(best)}"
    return f"{brief(other.layout, best.layout)}: {short_time(other.step_time_s)}, risk {_risk(other)} ({here})"


def _sure(prediction: Prediction) -> str:
    below = prediction.relative_error_below or 0.0
    text = f"five in six runs take {below:.0%} less to {prediction.relative_error:.0%} more"
    first = prediction.first_run_slowdown
    return text + (f"; most first runs {first:.0%} more" if first else "")
