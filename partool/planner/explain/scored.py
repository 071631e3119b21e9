"""The score of a plan by its terms, and that of plans that were made before plans recorded it."""

from __future__ import annotations

from pydantic import ValidationError

from partool.cost.codec import encode
from partool.cost.evidence import WORDS, mechanisms
from partool.plan.layout import Layout
from partool.plan.types import Plan, Score
from partool.planner.problem import Problem
from partool.planner.search.price import Priced
from partool.planner.search.score import EMPTY, KAPPA, charged, complexity_of, risk_of
from partool.spec.spec import Spec


def score_of(priced: Priced) -> Score:
    """Return the score of a layout by its terms."""
    memory = priced.memory
    return _score(priced.problem, priced.layout, priced.step_time_s, priced.unfit, memory.total_bytes)


def rescored(plan: Plan) -> Score | None:
    """Return a plan's score; for a plan without one, that of its layout and predictions; None if its spec is refused.

    A plan does not record whether it needed settings that save memory, so a score made anew leaves these out.
    """
    if plan.prediction.score is not None:
        return plan.prediction.score
    try:
        spec = Spec.model_validate(plan.spec)
    except ValidationError:
        return None
    problem, memory = Problem(spec, plan.model, plan.devices), plan.prediction.memory
    unfit, step_time_s = 1.0 - memory.fit_probability, plan.prediction.time.step_time_s
    return _score(problem, plan.layout, step_time_s, unfit, memory.total_bytes)


def score_beside(plan: Plan, present: Plan) -> float:
    """Return a plan's score in seconds for somebody who runs ``present``, whose mechanisms are known to work there.

    It is the step time where the plan's spec is refused.
    """
    score, runs = rescored(plan), {WORDS[name] for name in mechanisms(present.layout)}
    shares = {} if score is None else score.shares
    more = sum(share for name, share in shares.items() if name not in runs)
    return plan.prediction.time.step_time_s * (1.0 + more)


def _score(problem: Problem, layout: Layout, step_time_s: float, unfit: float, total_bytes: int) -> Score:
    row = encode(layout)
    shares = {WORDS[name]: error for name, error in charged(problem, row).items()}
    others = float(risk_of(problem, row)) - sum(shares.values())
    if problem.spec.limits.prefer != "fastest" and others > 1e-9:
        shares["rare settings"] = others
    shares["not fitting"] = KAPPA * max(unfit, 0.0)
    shares["filled memory"] = EMPTY * total_bytes / problem.devices.memory_bytes
    shares["settings"] = float(complexity_of(problem, row))
    return Score(score_s=step_time_s * (1.0 + sum(shares.values())), shares=shares)
