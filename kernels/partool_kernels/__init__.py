"""Compiled kernels; this package does not use Spec or Plan, and imports torch only inside functions."""

from partool_kernels._native import isa
from partool_kernels.reductions import KernelUnavailableError, finite_sum_squares

__all__ = ["KernelUnavailableError", "finite_sum_squares", "isa"]
