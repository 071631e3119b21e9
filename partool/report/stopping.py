"""The lines of a plan about stops: how long they take, and what is lost where a machine gives less time."""

from __future__ import annotations

from collections.abc import Iterator

from partool.plan.types import Plan
from partool.planner.stopping import LONG_RUN_S, in_words, worst_loss


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the checkpoints that the run writes, and of the time that a stop request leaves it."""
    if plan.stopping is None:
        return
    yield "Saves", _saves(plan)
    given_s, needed_s = plan.launch.window_s, plan.stopping.needed_s
    enough = "" if given_s >= needed_s else f", and may take {needed_s} s"
    sooner = f"a shorter notice (spot) loses {worst_loss(plan.checkpoint.every)}"
    yield "Stop", f"within {given_s} s{enough}: {in_words(plan, plan.stopping)}; {sooner}"


def _saves(plan: Plan) -> str:
    every = plan.checkpoint.every
    written = plan.spec.get("checkpoint", {})
    asked = isinstance(written, dict) and written.get("every", "auto") != "auto"
    text = "at the end and on a stop request" if every in (0, "auto") else f"every {every}"
    text += "" if isinstance(every, str) or not every else " steps"
    if asked:
        return text
    hours = LONG_RUN_S / 3600
    return f"{text} (auto: {'at most' if every == 0 else 'over'} {hours:g} h as predicted)"
