"""Stores that keep parameter shards in host memory, or in a file on a disk, while their units are not gathered."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from partool.plan.layout import OffloadLayout
from partool_runtime import threads
from partool_runtime.offload.buckets import ALIGNED, Bucket, Member
from partool_runtime.offload.disk import DiskStore
from partool_runtime.offload.lanes import Lanes, Mark
from partool_runtime.offload.memory import HostMemory

_UNITS = torch.int16
"""Element type of a file of shards. Its size is two bytes, so that :data:`ALIGNED` elements fill whole pages."""


class ShardStore(Protocol):
    """Store of parameter shards, in which the shards of each unit are contiguous."""

    homes: Sequence[torch.Tensor]
    """One uint8 tensor per unit that holds the unit's shards; it may be written to while no fetch is in flight."""
    notes: tuple[str, ...]
    """Notes for the run's log."""

    def begin(self) -> None:
        """Mark the start of a step's passes: units are expected in the order of the last step."""

    def fetch(self, unit: int, into: torch.Tensor, after: Mark | None) -> Mark:
        """Start to copy a unit's shards to the device, once the mark ``after`` is reached."""

    def settle(self) -> None:
        """Mark the end of a step's passes."""

    def written(self) -> None:
        """Store the content that was written to :attr:`homes`."""

    def close(self) -> None:
        """Free memory and files."""


class MemoryShardStore:
    """Store of shards in host memory."""

    def __init__(self, sizes_bytes: Sequence[int], memory: HostMemory, lanes: Lanes) -> None:
        self.notes: tuple[str, ...] = ()
        self.homes: Sequence[torch.Tensor] = [memory.take(size, "parameters") for size in sizes_bytes]
        self._lanes = lanes

    def begin(self) -> None:
        """See :class:`ShardStore`."""

    def fetch(self, unit: int, into: torch.Tensor, after: Mark | None) -> Mark:
        """See :class:`ShardStore`."""
        return self._lanes.up.copy(into, self.homes[unit], after)

    def settle(self) -> None:
        """See :class:`ShardStore`."""

    def written(self) -> None:
        """See :class:`ShardStore`."""

    def close(self) -> None:
        """See :class:`ShardStore`."""


class DiskShardStore:
    """Store of shards in a file. Units are read ahead in the order of the last step and verified by checksums.

    New weights are written to the file's mapping as backward passes end, and to the disk after the step. Reads bypass
    the mapping. Units are therefore read ahead only within the passes of a step: a unit read while it is being written
    would match neither its old nor its new checksum.
    """

    def __init__(self, sizes_bytes: Sequence[int], work: OffloadLayout, lanes: Lanes, *, owner: str) -> None:
        self._lanes = lanes
        self._store = DiskStore(
            _buckets(sizes_bytes), (_UNITS,), work.dir or "", buffers=work.buffers, what="parameters", owner=owner
        )
        self.notes = self._store.notes
        (flat,) = self._store.flat()
        starts = accumulate((_paged(size) for size in sizes_bytes), initial=0)
        content = flat.view(torch.uint8)
        self.homes: Sequence[torch.Tensor] = [
            content[first : first + size] for first, size in zip(starts, sizes_bytes, strict=False)
        ]
        self._last: list[int] = []
        """Indices of the units that the last step fetched, in the order of fetching."""
        self._order: list[int] = []
        """Indices of the units that this step has fetched so far, in the order of fetching."""
        self._in_step = False
        """Whether a step's passes run; fetches between steps, as by an evaluation, do not predict the next step."""
        self._follows = False
        """Whether the units of this step have so far come in the same order as in the last step."""
        self._work: queue.SimpleQueue[tuple[int, torch.Tensor, Mark | None, _Fetched] | None] = queue.SimpleQueue()
        self._thread = threads.start(self._run, "partool-parameters")

    def begin(self) -> None:
        """See :class:`ShardStore`."""
        self._order, self._in_step, self._follows = [], True, True
        self._store.expect(self._last)

    def fetch(self, unit: int, into: torch.Tensor, after: Mark | None) -> Mark:
        """See :class:`ShardStore`."""
        place = len(self._order)
        if self._in_step:
            self._order.append(unit)
        if self._follows and self._last[place : place + 1] != [unit]:
            self._follows = False
            self._store.expect(())
        fetched = _Fetched()
        self._work.put((unit, into, after, fetched))
        return fetched

    def settle(self) -> None:
        """See :class:`ShardStore`."""
        if self._in_step:
            self._last, self._order = self._order, []
        self._in_step = self._follows = False
        self._store.rest()

    def written(self) -> None:
        """See :class:`ShardStore`; raises ConfigurationError PT670 or PT671 if the disk write fails."""
        self._store.written()

    def close(self) -> None:
        """See :class:`ShardStore`."""
        self._work.put(None)
        self._thread.join()
        self._store.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            unit, into, after, fetched = work
            try:
                with self._store.open(unit, write=False) as (content,):
                    mark = self._lanes.up.copy(into, content.view(torch.uint8)[: len(into)], after)
                    fetched.started(mark)
                    mark.wait()  # until the mark, the copy reads the file's memory
            except BaseException as error:  # raised by the wait for this fetch
                fetched.failed(error)
            work = into = after = None  # type: ignore[assignment]  # frees tensors while idle


class _Fetched:
    """Mark after a copy to the device; the copy begins once its source has been read from the disk."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._copied: Mark | None = None
        self._error: BaseException | None = None

    def started(self, copied: Mark) -> None:
        self._copied = copied
        self._begun.set()

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._begun.set()

    def done(self) -> bool:
        return self._begun.is_set() and self._mark().done()

    def wait(self) -> None:
        self._mark().wait()

    def before_compute(self) -> None:
        self._mark().before_compute()

    def _mark(self) -> Mark:
        self._begun.wait()
        if self._error is not None:
            raise self._error
        assert self._copied is not None
        return self._copied


def _paged(size_bytes: int) -> int:
    page_bytes = ALIGNED * _UNITS.itemsize
    return -(-size_bytes // page_bytes) * page_bytes


def _buckets(sizes_bytes: Sequence[int]) -> list[Bucket]:
    """Return one bucket per unit, given the units' sizes in bytes."""
    buckets, first = [], 0
    for index, size in enumerate(sizes_bytes):
        elements = _paged(size) // _UNITS.itemsize
        buckets.append(Bucket(index, first, (Member(f"unit {index}", 0, 0, elements),)))
        first += elements
    return buckets
