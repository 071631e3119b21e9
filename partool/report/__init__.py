"""Plans and runs as terminal output, HTML pages, traces and data."""

from partool.report.plan import View, render_plan

__all__ = ["View", "render_plan"]
