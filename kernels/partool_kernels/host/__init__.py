"""Optimizer steps on the CPU in one pass over memory; results have equal bits for all processors and thread counts."""

from partool_kernels.host.pool import IdlePool, Pool
from partool_kernels.host.types import MOMENTS, HostKernelError, Part, StepRule, Sums, UpdatePass
from partool_kernels.host.update import accumulate, sums, update, zero

__all__ = [
    "MOMENTS",
    "HostKernelError",
    "IdlePool",
    "Part",
    "Pool",
    "StepRule",
    "Sums",
    "UpdatePass",
    "accumulate",
    "sums",
    "update",
    "zero",
]
