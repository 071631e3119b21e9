"""The threads that optimizer passes run on."""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """Threads of the compiled library, one per core where cores are named; results do not depend on their number."""

    def __init__(self, threads: int = 1, cores: Sequence[int] = ()) -> None:
        if threads < 1:
            raise ValueError(f"a pool needs a thread, not {threads}")
        self.threads, self.cores = threads, tuple(cores)

    def close(self) -> None:
        """End the threads; the pool is not used any more."""
