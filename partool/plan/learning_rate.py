"""The learning rate of each step, and what another plan changes in it for a run that is resumed."""

from __future__ import annotations

import math

from partool.plan.types import Plan
from partool.spec.training import LrSchedule


def lr_factor(schedule: LrSchedule, step: int, steps: int) -> float:
    """Return the learning rate of step ``step`` (from 0) of ``steps`` as a fraction of the peak learning rate.

    The warm-up is linear and reaches 1 on its last step. ``cosine`` (Loshchilov and Hutter, arXiv 1608.03983) and
    ``linear`` fall to ``min_ratio`` on the last step; ``wsd`` (Hu et al., arXiv 2404.06395) stays at 1 and falls
    linearly over the final ``decay_steps``.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    begin = schedule.warmup_steps
    if schedule.kind == "wsd":
        begin = max(begin, steps - (schedule.decay_steps or math.ceil(steps / 5)))
        if step < begin:
            return 1.0
    progress = min(1.0, (step + 1 - begin) / max(1, steps - begin))
    fall = 0.5 * (1 - math.cos(math.pi * progress)) if schedule.kind == "cosine" else progress
    return 1.0 - (1.0 - schedule.min_ratio) * fall


def learning_rate(plan: Plan, step: int) -> float:
    """Return the learning rate of step ``step``, counted from 1."""
    return plan.optimizer.lr * lr_factor(plan.optimizer.schedule, step - 1, plan.training.steps)


def rate_changes(old: Plan, new: Plan, done: int | None) -> str:
    """Return how the learning rate of a resumed run changes with its new plan; empty if it does not.

    ``done`` is the step after which the run goes on; None if it is not known.
    """
    last = new.training.steps
    steps = range(1, last + 1) if done is None else range(done + 1, last + 1)
    # whole schedules of millions of steps need not be compared: their forms differ at their ends or in the middle
    some = {*steps[:: max(1, len(steps) // 100)], last}
    if all(math.isclose(learning_rate(old, step), learning_rate(new, step)) for step in some):
        return ""
    why = "the learning rate's schedule changes"
    if old.training.steps != last:
        why += f" with training.steps {old.training.steps:,} -> {last:,}"
    if done is None or done >= last:
        return why
    next_step = done + 1
    before = f", not {learning_rate(old, next_step):.3g}" if next_step <= old.training.steps else ""
    return (
        f"{why}: step {next_step:,} has {learning_rate(new, next_step):.3g}{before}, "
        f"and the last step {learning_rate(new, last):.3g}"
    )
