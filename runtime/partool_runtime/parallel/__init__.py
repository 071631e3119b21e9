"""What turns one rank's model into this rank's share of the model: recompute → compile → data parallel."""

from partool_runtime.parallel.apply import parallelize

__all__ = ["parallelize"]
