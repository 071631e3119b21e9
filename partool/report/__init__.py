"""What a terminal shows of a plan and of a run."""

from partool.report.plan import render_plan

__all__ = ["render_plan"]
