"""Plans and runs as terminal output, HTML pages, traces and data."""

from partool.report.plan import render_plan

__all__ = ["render_plan"]
