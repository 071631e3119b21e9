"""From a plan to what a cluster runs, as text: pure functions, one module per target."""

from partool.render.job import Job, Rendered
from partool.render.render import findings, render

__all__ = ["Job", "Rendered", "findings", "render"]
