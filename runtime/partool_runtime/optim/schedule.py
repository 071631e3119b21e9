"""Learning rate as a function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from partool.spec.training import LrSchedule


def lr_factor(schedule: LrSchedule, step: int, steps: int) -> float:
    """Return the factor of the peak learning rate for a step, counted from 0, of ``steps`` in all.

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
