"""Where shards of parameters are kept between gathers: in host memory, or in a file on a disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch

from partool.plan.layout import OffloadLayout
from partool_runtime.offload.buckets import ALIGNED, Bucket, Member
from partool_runtime.offload.disk import DiskStore
from partool_runtime.offload.lanes import Lanes, Mark
from partool_runtime.offload.memory import HostMemory

_UNITS = torch.int16
"""What a file of shards is made of: of two bytes, so that :data:`ALIGNED` of them are whole pages."""


class ShardStore(Protocol):
    """Keeps the shards of units, each unit's one after the other."""

    homes: Sequence[torch.Tensor]
    """Each unit's bytes, uint8, to be written to while nothing is fetched."""
    notes: tuple[str, ...]
    """Notes for the run's log."""

    def begin(self) -> None:
        """Say that the passes of a step begin: units are expected in the order of the last step."""

    def fetch(self, unit: int, into: torch.Tensor, after: Mark | None) -> Mark:
        """Start to copy a unit's shards to the device, behind ``after``."""

    def settle(self) -> None:
        """Say that the passes of a step have ended."""

    def written(self) -> None:
        """Take in what was written to :attr:`homes`."""

    def close(self) -> None:
        """Give back what is kept."""


class MemoryShardStore:
    """Shards are in host memory."""

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
    """Shards are in a file, which is read ahead in the order of the step before and compared with its checksums.

    New weights are written to the file's mapping while passes end, and go to the disk behind the step. What reads the
    file does not look at the mapping, so units are read ahead only as far as the passes of the step go: a unit that is
    read while it is written would have neither its old nor its new checksum.
    """

    def __init__(self, sizes_bytes: Sequence[int], work: OffloadLayout, lanes: Lanes, *, owner: str) -> None:
        self._lanes = lanes
        self._store = DiskStore(
            _buckets(sizes_bytes), (_UNITS,), work.dir or "", buffers=work.buffers, what="parameters", owner=owner
        )
        self.notes = self._store.notes
        (flat,) = self._store.flat()
        starts = accumulate((_paged(size) for size in sizes_bytes), initial=0)
        whole = flat.view(torch.uint8)
        self.homes: Sequence[torch.Tensor] = [
            whole[first : first + size] for first, size in zip(starts, sizes_bytes, strict=False)
        ]
        self._last: list[int] = []
        """Units in the order of the last step."""
        self._order: list[int] = []
        """Units of this step so far."""
        self._in_step = False
        """Fetches between steps, as by an evaluation, do not predict the next step."""
        self._follows = False
        """This step's is that of the last one so far."""
        self._work: queue.SimpleQueue[tuple[int, torch.Tensor, Mark | None, _Fetched] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="partool-parameters", daemon=True)
        self._thread.start()

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
        """See :class:`ShardStore`; raises ConfigurationError PT670 or PT671 where the disk does not take it."""
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
                    mark.wait()  # until then it is read
            except BaseException as error:  # raised where it is waited for
                fetched.failed(error)
            work = into = after = None  # type: ignore[assignment]  # nothing is kept until the next one


class _Fetched:
    """A mark behind a copy that begins once something was read."""

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
    """Return one bucket per unit."""
    buckets, first = [], 0
    for index, size in enumerate(sizes_bytes):
        elements = _paged(size) // _UNITS.itemsize
        buckets.append(Bucket(index, first, (Member(f"unit {index}", 0, 0, elements),)))
        first += elements
    return buckets
