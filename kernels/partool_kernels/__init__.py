"""Compiled kernels; this package does not use Spec or Plan, and imports torch only inside functions."""

from partool_kernels._native import isa
from partool_kernels.reductions import KernelUnavailableError

__all__ = ["KernelUnavailableError", "isa"]
