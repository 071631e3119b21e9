"""Store of masters and moments on disks; memory holds only a few buckets: in use, being written, or read ahead."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from partool_runtime import threads
from partool_runtime.offload.buckets import Bucket
from partool_runtime.offload.disk import problems
from partool_runtime.offload.disk.claims import Claim
from partool_runtime.offload.disk.file import IO_BYTES, Calls, FileBlock, StateFile
from partool_runtime.offload.disk.memory import DiskTraffic, Slot, SlotBlock, lay_out, make_slots

THREADS = 8
"""Number of threads that transfer blocks; they mostly wait for the disk, and use cores only for checksums."""
Transfer = Callable[[FileBlock, memoryview], None]


class DiskStore:
    """See :class:`partool_runtime.offload.store.StateStore`. Several buckets may be open at once, from any thread.

    The file has one region for masters and one for each moment; each region holds all buckets in order. After a disk
    error, every call raises this error.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dtypes: Sequence[torch.dtype],
        folder: str | Path,
        *,
        buffers: int = 4,
        what: str = "optimizer state",
        owner: str = "a rank",
        calls: Calls | None = None,
    ) -> None:
        """Reserve disk space, and memory for ``buffers`` (at least 3) buckets as large as the largest bucket.

        ``what`` and ``owner`` are for messages. Raises ConfigurationError PT667 to PT669 (folder) or PT674 (memory).
        """
        if buffers < 3:
            raise ValueError(f"{buffers} buffers cannot hold a bucket in use, one that is written and one that is read")
        folder = Path(folder)
        self._elements = buckets[-1].first + buckets[-1].elements if buckets else 0
        self._dtypes = tuple(dtypes)
        self._stretches, size_bytes = lay_out(buckets, self._dtypes)
        self._spans = [bucket.elements for bucket in buckets]
        self._file = StateFile(folder, size_bytes, sum(map(len, self._stretches)), what=what, calls=calls)
        try:
            self._slots = make_slots(min(buffers, max(3, len(buckets))), max(self._spans, default=0), self._dtypes)
            self._claim = Claim(folder, owner, size_bytes)
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError):
                raise problems.cannot_begin(error, folder, what, size_bytes, None) from error
            raise
        self.notes = problems.notes(folder, what, self._file.direct, self._claim.dead)
        """Notes for the run's log."""
        self.traffic = DiskTraffic()
        self._resident: dict[int, Slot] = {}
        self._expected: list[int] = []
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._turn = 0
        self._flat: tuple[torch.Tensor, ...] | None = None
        self._mapping: mmap.mmap | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threads.start(self._run, f"partool-disk-{i}") for i in range(THREADS)]

    # Public interface.

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """See ``StateStore``."""
        return self._dtypes

    def expect(self, order: Sequence[int]) -> None:
        """See ``StateStore``. Buckets that fit into free memory are read now, other buckets when memory is freed."""
        with self._changed:
            self._expected = list(order)
            self._read_ahead()

    @contextmanager
    def open(self, bucket: int, *, write: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        """See ``StateStore``; raises ConfigurationError PT670 to PT673 for disk errors."""
        slot = self._taken(bucket, write)
        good = False
        try:
            yield tuple(tensor[: self._spans[bucket]] for tensor in slot.tensors)
            good = True
        finally:
            with self._changed:
                slot.users -= 1
                if write and good:
                    self._start(slot, self._file.write, reading=False)
                elif write:  # the bucket's content is undefined
                    del self._resident[bucket]
                    slot.bucket = -1
                self._read_ahead()
                self._changed.notify_all()

    def flat(self) -> tuple[torch.Tensor, ...]:
        """See ``StateStore``. The tensors are the mapped file; the system may remove the file's pages from memory."""
        if self._flat is None:
            self._flat = self._mapped()
        return self._flat

    def rest(self) -> None:
        """Cancel reading ahead, and wait until no transfer is in flight; afterwards :meth:`flat` may be written to."""
        self.expect(())
        self._wait_for_transfers()

    def written(self) -> None:
        """See ``StateStore``."""
        self._wait_for_transfers()
        with self._changed:
            for slot in self._slots:
                slot.bucket = -1
            self._resident.clear()
        self._file.settle()
        self._over_all(self._file.adopt)
        self._forget()

    def flush(self) -> None:
        """See ``StateStore``. Also read back what was written through :meth:`flat`, and compare its checksums."""
        self._wait_for_transfers()
        if not self._file.direct:
            self._file.settle()
        if self._flat is not None:
            self._forget()
            self._over_all(self._file.check)

    def close(self) -> None:
        """End the threads and close the file; unwritten changes are lost.

        The system frees the file's disk space once no mapping of the file exists any more.
        """
        self._error = self._error or RuntimeError("the store is closed")
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._flat = self._mapping = None
        self._file.close()
        self._claim.drop()

    # Memory.

    def _taken(self, bucket: int, write: bool) -> Slot:
        """Return the slot that holds a bucket, marked as in use."""
        with self._changed:
            self._turn += 1
            if bucket in self._expected:
                self._expected.remove(bucket)
            slot = self._resident.get(bucket)
            if slot is None:
                slot = self._free_slot()
                self._fill(slot, bucket)
            slot.users += 1
            slot.used_at = self._turn
            self._read_ahead()
            self.traffic.waited += slot.reading
            # A block must not change while it is written: the checksum would not match the written content.
            while slot.reading or (write and slot.moving):
                self._check()
                self._changed.wait()
            self._check()
            return slot

    def _free_slot(self) -> Slot:
        while True:
            self._check()
            slot = self._spare(self._expected)
            if slot is not None:
                return slot
            if all(slot.users for slot in self._slots):
                raise RuntimeError(f"all {len(self._slots)} buckets in memory are in use")
            self._changed.wait()

    def _spare(self, wanted: Sequence[int]) -> Slot | None:
        """Return an idle slot, or None if no slot is idle.

        Empty slots come first, then slots whose bucket is not in ``wanted`` (the longest unused first), then the slot
        whose bucket is last in ``wanted``.
        """
        idle = [slot for slot in self._slots if slot.idle]
        places = {bucket: place for place, bucket in enumerate(wanted)}
        return min(
            idle,
            key=lambda slot: (slot.bucket >= 0, slot.bucket in places, -places.get(slot.bucket, 0), slot.used_at),
            default=None,
        )

    def _read_ahead(self) -> None:
        """Load the next expected buckets into idle slots, without replacing other buckets that are expected next."""
        near = self._expected[: len(self._slots) - 1]
        for bucket in near:
            if self._error is not None:
                return
            if bucket in self._resident:
                continue
            slot = self._spare(near)
            if slot is None or slot.bucket in near:
                return
            self._fill(slot, bucket)

    def _fill(self, slot: Slot, bucket: int) -> None:
        if slot.bucket >= 0:
            del self._resident[slot.bucket]
        slot.bucket = bucket
        self._resident[bucket] = slot
        self._start(slot, self._file.read, reading=True)

    # Transfers.

    def _start(self, slot: Slot, transfer: Transfer, *, reading: bool) -> None:
        slot.reading = reading
        stretches = self._stretches[slot.bucket]
        slot.moving += len(stretches)
        for stretch in stretches:
            self._work.put(partial(self._transfer, slot, transfer, stretch, reading))

    def _transfer(self, slot: Slot, transfer: Transfer, stretch: SlotBlock, reading: bool) -> None:
        error: BaseException | None = None
        length = stretch.block.length
        try:
            if self._error is None:
                transfer(stretch.block, slot.memory[stretch.offset : stretch.offset + length])
        except BaseException as wrong:  # raised again where the store is used
            error = wrong
        with self._changed:
            self._error = self._error or error
            slot.moving -= 1
            if reading:
                self.traffic.read_bytes += length
            else:
                self.traffic.written_bytes += length
            if slot.moving == 0:
                slot.reading = False
                self._read_ahead()
                self._changed.notify_all()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _over_all(self, transfer: Transfer) -> None:
        """Call ``transfer`` with every block, on all threads, and wait for all calls."""
        blocks = iter([stretch.block for stretches in self._stretches for stretch in stretches])
        finished = threading.Semaphore(0)

        def some() -> None:
            try:
                scratch = memoryview(bytearray(IO_BYTES))
                while (block := self._next(blocks)) is not None:
                    transfer(block, scratch)
            except BaseException as error:  # raised below
                with self._changed:
                    self._error = self._error or error
            finally:
                finished.release()

        for _ in self._threads:
            self._work.put(some)
        for _ in self._threads:
            finished.acquire()
        self._check()

    def _next(self, blocks: Iterator[FileBlock]) -> FileBlock | None:
        with self._changed:
            return next(blocks, None) if self._error is None else None

    def _wait_for_transfers(self) -> None:
        with self._changed:
            while any(slot.moving for slot in self._slots):
                self._changed.wait()
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _forget(self) -> None:
        """Drop the file's pages from the page cache, after the mapping has released them; mapped pages would stay."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)
        self._file.forget()

    def _mapped(self) -> tuple[torch.Tensor, ...]:
        if self._elements == 0:
            return tuple(torch.empty(0, dtype=dtype) for dtype in self._dtypes)
        self._mapping = self._file.mapped()
        tensors, place = [], 0
        for dtype in self._dtypes:
            tensors.append(torch.frombuffer(self._mapping, dtype=dtype, count=self._elements, offset=place))
            place += self._elements * dtype.itemsize
        return tuple(tensors)
