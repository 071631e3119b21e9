"""Pipelines: a schedule's lists executed over point-to-point transfers."""
