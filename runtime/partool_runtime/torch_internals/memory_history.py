"""History and snapshots of CUDA's allocator, which torch documents under private names.

https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

from pathlib import Path

from torch.cuda import memory

_MOST_ENTRIES = 1_000_000
"""Number of allocations that a history keeps; one takes a few hundred bytes of host memory."""


def record_history() -> None:
    """Begin to record allocations of CUDA's allocator, with the Python code that asked for them."""
    memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def stop_history() -> None:
    """Stop recording."""
    memory._record_memory_history(enabled=None)


def dump_snapshot(file: Path) -> None:
    """Write what the allocator holds, and the recorded history, for https://pytorch.org/memory_viz.

    Raises OSError.
    """
    memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
