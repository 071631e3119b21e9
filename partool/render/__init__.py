"""Rendering of a plan as the text that a cluster runs: pure functions, one module per target."""

from partool.render.job import Job, Rendered
from partool.render.render import findings, render

__all__ = ["Job", "Rendered", "findings", "render"]
