"""Ordinary host memory that the ranks of a node take, with the copies that they make while they save."""

from __future__ import annotations

from partool.plan.types import Plan
from partool.spec.numbers import GIB

PROCESS_BYTES = 4 * GIB
"""Host memory per device rank that no other prediction includes: interpreter, libraries, pinned buffers (assumed)."""
_BLOCKS_AT_ONCE = 2
"""Copies of a block that exist while it is written: one from the device, and one if it is a view of other memory."""


def ranks_bytes(plan: Plan) -> int:
    """Return the bytes of host memory that the ranks of a node take at most.

    On a CPU these are all their memory; with devices, what is offloaded and 4 GiB per rank. The copies of a save are
    added. Pages of files do not count: the kernel drops them before it ends a process.
    """
    memory, ranks = plan.prediction.memory, plan.devices.per_node
    on_cpu = plan.devices.backend == "cpu"
    training = memory.total_bytes * ranks if on_cpu else memory.host_bytes + PROCESS_BYTES * ranks
    return training + copied_bytes(plan, in_background=plan.checkpoint.mode == "async")


def copied_bytes(plan: Plan, *, in_background: bool) -> int:
    """Return the bytes of host memory in which the ranks of a node copy their state while they save.

    A save in the background first copies all that a rank writes; another save copies one block at a time.
    """
    memory = plan.prediction.memory
    of_rank = memory.saved_bytes if in_background else _BLOCKS_AT_ONCE * memory.saved_block_bytes
    return of_rank * plan.devices.per_node
