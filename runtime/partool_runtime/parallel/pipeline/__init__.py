"""Pipelines: a schedule's action lists, executed with point-to-point transfers."""
