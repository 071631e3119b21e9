"""What a plan's screen says about checkpoints and stops."""

from __future__ import annotations

from partool.plan.types import Plan
from partool.planner.stopping import LONG_RUN_S, in_words, worst_loss
from partool.strategies.jobs import JOBS


def stop_text(plan: Plan) -> str:
    """Return the time that a stop request leaves the run and what it needs; empty for other training systems."""
    if plan.stopping is None:
        return ""
    given_s, needed_s = plan.launch.window_s, plan.stopping.needed_s
    enough = "" if given_s >= needed_s else f", and may take {needed_s} s"
    if not JOBS[plan.job].backward:
        return f"within {given_s} s; a stopped {JOBS[plan.job].title} goes on where it was"
    sooner = f"a shorter notice (spot) loses {worst_loss(plan.checkpoint.every)}"
    return f"within {given_s} s{enough}: {in_words(plan, plan.stopping)}; {sooner}"


def saves_text(plan: Plan) -> str:
    """Return when the run writes checkpoints, and the reason where partool has decided it."""
    every, keep = plan.checkpoint.every, plan.checkpoint.keep
    written = plan.spec.get("checkpoint", {})
    asked = isinstance(written, dict) and written.get("every", "auto") != "auto"
    if every in (0, "auto"):
        text = "at the end only"
    else:
        text = f"every {every}" if isinstance(every, str) else f"every {every:,} steps"
        text += f", the last {keep} kept" if keep > 1 else ""
    if asked or plan.stopping is None:
        return text
    return f"{text} (auto: {'up to' if every == 0 else 'over'} {LONG_RUN_S / 3600:g} h)"
