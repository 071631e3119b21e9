"""Turns a model into one rank's share of the model, in steps: recompute → compile → data parallel."""

from partool_runtime.parallel.apply import parallelize

__all__ = ["parallelize"]
