"""Steps that turn a model into one rank's share of it: recompute → compile → data parallel."""

from partool_runtime.parallel.apply import parallelize

__all__ = ["parallelize"]
