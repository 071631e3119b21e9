"""Makes optimizer steps in host memory, bucket by bucket, while gradients are still arriving.

A bucket's gradient is copied to the host on the lane ``down``; a thread updates the bucket's masters and moments on the
pool's cores and sends new weights on the lane ``up``. With speculation the update comes before the norm of all
gradients is known, and a rollback restores the exact bits: see :mod:`partool_runtime.offload.passes`. SuperOffload
(arXiv 2509.21271, section 4.2) inverts Adam's arithmetic instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch

from partool_kernels.host import Pool, StepRule
from partool_runtime.offload.buckets import Bucket, Member
from partool_runtime.offload.buffers import Buffers
from partool_runtime.offload.figures import HostFigures
from partool_runtime.offload.lanes import Lanes
from partool_runtime.offload.leaving import Leaving
from partool_runtime.offload.passes import Arriving, BucketPasses, Speculation, WeightsTarget
from partool_runtime.offload.resident import Resident
from partool_runtime.offload.store import StateStore
from partool_runtime.offload.undo import Undo
from partool_runtime.offload.verdicts import Verdicts
from partool_runtime.offload.worker import PassWorker, SerialWorker

__all__ = ["Buffers", "HostEngine", "WeightsTarget"]


class HostEngine:
    """Owns a rank's host optimizer: buckets, buffers, and the thread that works on them.

    Between :meth:`begin` and :meth:`sums` gradients arrive; then :meth:`settle` ends the step. If a step begins before
    the last step was settled, as after an interrupted pass, the last step is dropped.

    ``resident`` holds the shards whose states stay on the device. If ``speculation`` is ``undo``, copies of states take
    up to ``undo_bytes`` of host memory. An error on the thread is raised by the next call; after an error only
    :meth:`close` may be called.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        targets: Mapping[str, WeightsTarget],
        store: StateStore,
        *,
        lanes: Lanes,
        pool: Pool,
        buffers: Buffers,
        speculation: Speculation = "deferred",
        undo_bytes: int = 0,
        resident: Resident | None = None,
        mode: Literal["auto", "native", "torch"] = "auto",
        worker: Callable[[str], PassWorker] = SerialWorker,
    ) -> None:
        self._buckets, self._store, self._resident = buckets, store, resident
        self._lanes, self._pool, self._buffers = lanes, pool, buffers
        self._speculation: Speculation = speculation
        self.verdicts = Verdicts()
        self.figures = HostFigures()
        undoes = speculation == "undo"
        self._undo = Undo(buckets, undo_bytes, store.dtypes, pool=pool, mode=mode) if undoes else None
        self._passes = BucketPasses(
            buckets,
            targets,
            store,
            up=lanes.up,
            pool=pool,
            buffers=buffers,
            undo=self._undo,
            figures=self.figures,
            mode=mode,
        )
        self._places: dict[str, list[tuple[Bucket, Member]]] = {}
        for bucket in buckets:
            for member in bucket.members:
                self._places.setdefault(member.name, []).append((bucket, member))
        self._arriving = threading.Lock()
        self._leaving = Leaving(2 * buffers.gradient_bytes)
        self._open: dict[int, Arriving] = {}
        self._handed_over: list[int] = []
        """Indices of buckets of which the worker got all gradients of this step, in the order of handing over."""
        self._order = [bucket.index for bucket in buckets]
        """Indices of buckets in the last step's order of handing over; the next step should have the same order."""
        self._rules: Sequence[StepRule] = ()
        self._last, self._in_step, self._closed = True, False, False
        self._now: Speculation = "none"
        self._worker = worker("partool-optimizer")

    @property
    def in_step(self) -> bool:
        """True if a step is not settled; :meth:`begin` and :meth:`flush` drop this step and may write weights."""
        return self._in_step

    def begin(self, rules: Sequence[StepRule]) -> None:
        """Begin a step; ``rules`` are the update rules that the step is expected to use, one per parameter group."""
        self._worker.check()
        if self._in_step:
            self._abandon()
        self._rules = rules
        self._now = self._speculation if self.verdicts.speculates else "none"
        self._handed_over.clear()
        self._passes.sums.clear()
        self._last, self._in_step = True, True
        if self._resident is not None:
            self._resident.begin()
        pending = [index for index in self._order if self._passes.steps[index].pending is not None]
        # With several micro-batches, the first micro-batch commits the last step; the last micro-batch makes this step.
        first = pending if self._buffers.accumulates or self._now == "none" else self._order
        self._expect(first)

    def micro_batch(self, *, last: bool) -> None:
        """Mark the start of another micro-batch's gradients; ``last`` is True for the step's last micro-batch."""
        with self._arriving:
            self._send_open()
            self._last = last
        if last and self._buffers.accumulates and self._now != "none":
            self._expect(self._order)

    def arrive(self, name: str, gradient: torch.Tensor) -> None:
        """Take a shard's gradient, which the caller must not change any more; may be called from any thread.

        Waits while no buffer is free, and while earlier gradients hold too much device memory. On a GPU it has to be
        called in the context of the stream that computed the gradient.
        """
        self._worker.check()
        flat = gradient.detach().reshape(-1)
        with self._arriving:
            if self._resident is not None and name in self._resident:
                self._resident.arrive(name, flat)
                return
            after = self._lanes.now()
            for bucket, member in self._places[name]:
                arriving = self._open.get(bucket.index)
                if arriving is None:
                    if bucket.index in self._handed_over:
                        raise RuntimeError(f"a gradient of {name} came after its bucket had left")
                    arriving = self._open[bucket.index] = Arriving(bucket, self._buffer())
                key = (name, member.start)
                if key in arriving.members:
                    raise RuntimeError(f"{name} had two gradients in one micro-batch")
                to = arriving.staging[member.offset : member.offset + member.elements]
                arriving.mark = self._lanes.down.copy(to, flat[member.start : member.start + member.elements], after)
                arriving.members.add(key)
                self._leaving.add(flat, arriving.mark)
                self.figures.bytes_down += to.nbytes
                if len(arriving.members) == len(bucket.members):
                    self._send(arriving)
        with self.figures.waiting():
            self._leaving.settle()

    def sums(self, leaving_out: Collection[str] = ()) -> tuple[list[float], bool]:
        """End the passes; return the sum of squares of each block of gradients, and whether all gradients are finite.

        ``leaving_out`` names parameters whose gradients are left out, because another rank counts them.
        """
        with self._arriving:
            self._last = True
            self._send_open()
            for bucket in self._buckets:
                if bucket.index not in self._handed_over:
                    self._send(Arriving(bucket, self._buffer()))
        self._drain()
        self._leaving.settle()
        self._order = list(self._handed_over)
        counted = [part_sums for (name, _), part_sums in self._passes.sums.items() if name not in leaving_out]
        blocks, finite = [b for squares, _ in counted for b in squares], all(good for _, good in counted)
        if self._resident is None:
            return blocks, finite
        more, good = self._resident.sums(leaving_out)
        return blocks + more, finite and good

    def settle(self, rules: Sequence[StepRule] | None) -> None:
        """End the step: update by ``rules``, or skip the step if ``rules`` is None.

        Compute that is queued afterwards uses the new weights. All ranks must pass equal ``rules``, or all None.
        """
        good = rules is not None and tuple(rules) == tuple(self._rules)
        self.verdicts.record(good=good, speculated=self._now != "none")
        self.figures.speculated, self.figures.rejected = self.verdicts.speculated, self.verdicts.rejected
        self._settle(rules, good=good)

    def _settle(self, rules: Sequence[StepRule] | None, *, good: bool) -> None:
        self._worker.check()
        todo = [i for i in self._order if not (good and self._passes.accept(self._buckets[i], self._rules))]
        if rules is not None or self._now != "none":
            self._expect(todo)
        for index in todo:
            self._worker.put(partial(self._passes.settle, self._buckets[index], rules))
        if self._undo is not None:
            self._worker.put(self._undo.clear)
        if self._resident is not None:
            self._resident.settle(rules)
        self._drain()
        self._in_step = False
        self._before_compute()

    def flush(self) -> None:
        """Commit pending steps to masters and moments, for a checkpoint."""
        self._worker.check()
        if self._in_step:
            self._abandon()
        pending = [bucket for bucket in self._buckets if self._passes.steps[bucket.index].pending is not None]
        self._expect([bucket.index for bucket in pending])
        for bucket in pending:
            self._worker.put(partial(self._passes.commit, bucket))
        self._worker.put(self._store.flush)
        self._drain()

    def rebuild(self) -> None:
        """Write all weights from the masters, for example after a resume."""
        behind = self._lanes.now()
        self._worker.put(behind.wait)
        self._expect([bucket.index for bucket in self._buckets])
        for bucket in self._buckets:
            self._worker.put(partial(self._passes.rebuild, bucket))
        if self._resident is not None:
            self._resident.rebuild()
        self._drain()
        self._before_compute()

    def close(self) -> None:
        """End the thread, the lanes, the store and the pool. An error of the thread is not raised again."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as ends:
            # Callbacks run from the last to the first, even if one of them fails.
            ends.callback(self._pool.close)
            ends.callback(self._store.close)
            ends.callback(self._lanes.close)
            ends.callback(self._worker.close)

    def _abandon(self) -> None:
        """Drop a step that was not settled. The record of rejected steps omits it, as all ranks need equal records."""
        self.sums()
        self._settle(None, good=False)

    def _buffer(self) -> torch.Tensor:
        """Return a buffer for a bucket's gradients; wait for a free buffer, or free a buffer by an early commit."""
        buffer = self._buffers.take()
        if buffer is None:
            with self.figures.waiting():
                self._worker.wait_for(lambda: self._buffers.spare)
                buffer = self._buffers.take()
                # The worker is idle, so no buffer will become free by itself.
                if buffer is None and (index := self._furthest()) is not None:
                    self.figures.early_commits += 1
                    self._worker.put(partial(self._passes.commit, self._buckets[index]))
                    self._worker.drain()
                    buffer = self._buffers.take()
        if buffer is None:
            self.figures.late_buffers += 1
            buffer = self._buffers.make()
        return buffer

    def _furthest(self) -> int | None:
        """Return the index of the last bucket, in the expected order, whose early commit frees a buffer.

        None means that no bucket holds a buffer for the last step's commit.
        """
        if self._buffers.accumulates:
            return None  # gradients are summed in memory outside of the buffers
        pending = (i for i in reversed(self._order) if self._passes.steps[i].pending is not None)
        return next(pending, None)

    def _send_open(self) -> None:
        for arriving in list(self._open.values()):
            self._send(arriving)

    def _send(self, arriving: Arriving) -> None:
        self._open.pop(arriving.bucket.index, None)
        if self._last:
            self._handed_over.append(arriving.bucket.index)
        self._worker.put(
            partial(self._passes.take_in, arriving, last=self._last, rules=self._rules, speculation=self._now)
        )

    def _expect(self, order: Sequence[int]) -> None:
        if order:
            self._worker.put(partial(self._store.expect, list(order)))

    def _drain(self) -> None:
        with self.figures.waiting():
            self._worker.drain()

    def _before_compute(self) -> None:
        if self._passes.sent is not None:
            self._passes.sent.before_compute()
