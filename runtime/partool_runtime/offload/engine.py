"""Optimizer steps in host memory, bucket by bucket, while gradients still arrive.

A bucket's gradient goes to the host on the lane down; a thread makes the pass over the bucket's masters and moments on
the pool's cores and sends new weights up. With speculation that happens before the norm of all gradients is known
(SuperOffload, arXiv 2509.21271): the pass commits the step before, whose coefficient is known by now, and computes
this step in registers with the coefficient 1, of which only weights are written. A verdict that says otherwise costs
one more pass for the weights; masters and moments were never touched: nothing has to be undone, no infinity gets in.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from partool_kernels.host import Part, Pass, Pool, Rule, Sums, accumulate, sums, update
from partool_runtime.offload.buckets import Bucket, Member
from partool_runtime.offload.lanes import Lanes, Mark
from partool_runtime.offload.store import Store
from partool_runtime.offload.verdicts import Verdicts

Speculation = Literal["none", "deferred"]
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the weights of a parameter's shard are read by compute."""

    weights: torch.Tensor
    """Flat, on the device (or in host memory, where it streams them from there)."""
    group: int
    """Of the rules."""


@dataclass(slots=True)
class _Arriving:
    """A bucket's gradients on their way."""

    bucket: Bucket
    staging: torch.Tensor
    gradients: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """By parameter and start: kept until the copies are done."""
    mark: Mark | None = None


@dataclass(slots=True)
class _Step:
    """What is known of a bucket between its gradient's arrival and its commit."""

    gradients: torch.Tensor | None = None
    """Flat; None: nothing came since the last commit."""
    pending: Sequence[Rule] | None = None
    """Speculated on and verified, but not in masters and moments yet."""
    speculated: bool = False
    """In this step."""


class Engine:
    """Owns a rank's host optimizer: buckets, buffers, and the thread that works on them.

    Between :meth:`begin` and :meth:`sums` gradients arrive, from any thread; then :meth:`settle` ends the step.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        targets: Mapping[str, Target],
        store: Store,
        *,
        lanes: Lanes,
        pool: Pool,
        buffers: Buffers,
        speculation: Speculation = "deferred",
        mode: Literal["auto", "native", "torch"] = "auto",
    ) -> None:
        self._buckets, self._targets, self._store = buckets, targets, store
        self._lanes, self._pool, self._buffers, self._mode = lanes, pool, buffers, mode
        self._speculation = speculation
        self.verdicts = Verdicts()
        self._places: dict[str, list[tuple[Bucket, Member]]] = {}
        for bucket in buckets:
            for member in bucket.members:
                self._places.setdefault(member.name, []).append((bucket, member))
        self._steps = [_Step() for _ in buckets]
        self._open: dict[int, _Arriving] = {}
        self._complete: set[int] = set()
        self._rules: Sequence[Rule] = ()
        self._last = True
        self._speculates = False
        self._sums: dict[tuple[str, int], tuple[Sequence[float], bool]] = {}
        self._up: Mark | None = None
        self._error: BaseException | None = None
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="partool-optimizer", daemon=True)
        self._thread.start()

    # What the training loop calls.

    def begin(self, rules: Sequence[Rule]) -> None:
        """Begin a step that is expected to follow ``rules``, one per group."""
        self._check()
        self._rules = rules
        self._speculates = self._speculation != "none" and self.verdicts.speculates
        self._complete.clear()
        self._sums.clear()
        self._last = True
        self._store.expect([bucket.index for bucket in self._buckets])

    def micro_batch(self, *, last: bool) -> None:
        """Say that gradients from now on are another micro-batch's, and whether it is the step's last."""
        self._send_open()
        self._last = last

    def arrive(self, name: str, gradient: torch.Tensor) -> None:
        """Take a gradient, of the flat shard, which the caller must not change any more."""
        self._check()
        after = self._lanes.now()
        flat = gradient.detach().reshape(-1)
        for bucket, member in self._places[name]:
            arriving = self._open.get(bucket.index)
            if arriving is None:
                if bucket.index in self._complete:
                    raise RuntimeError(f"a gradient of {name} came after its bucket had left")
                arriving = self._open[bucket.index] = _Arriving(bucket, self._buffers.take())
            key = (name, member.start)
            if key in arriving.gradients:
                raise RuntimeError(f"{name} had two gradients in one micro-batch")
            to = arriving.staging[member.offset : member.offset + member.elements]
            arriving.mark = self._lanes.down.copy(to, flat[member.start : member.start + member.elements], after)
            arriving.gradients[key] = gradient
            if len(arriving.gradients) == len(bucket.members):
                self._send(arriving)

    def sums(self, leaving_out: Collection[str] = ()) -> tuple[list[float], bool]:
        """End the passes; return the blocks' sums of squares of all gradients, and whether all are finite.

        Parameters to be left out are those that another rank counts.
        """
        self._last = True
        self._send_open()
        for bucket in self._buckets:
            if bucket.index not in self._complete:
                self._send(_Arriving(bucket, self._buffers.take()))
        self._drain()
        counted = [found for (name, _), found in self._sums.items() if name not in leaving_out]
        return [block for squares, _ in counted for block in squares], all(finite for _, finite in counted)

    def settle(self, rules: Sequence[Rule] | None) -> None:
        """End the step as the verdict says: by these rules, or not at all. Compute's next work sees the weights."""
        good = rules is not None and tuple(rules) == tuple(self._rules)
        self.verdicts.record(good=good, speculated=self._speculates)
        for bucket in self._buckets:
            step = self._steps[bucket.index]
            if step.speculated and good:
                step.pending, step.speculated = self._rules, False
            else:
                self._work.put(partial(self._settle, bucket, rules))
        self._drain()
        if self._up is not None:
            self._up.before_compute()

    def flush(self) -> None:
        """Bring masters and moments up to date: what a checkpoint holds."""
        for bucket in self._buckets:
            self._work.put(partial(self._commit, bucket))
        self._work.put(self._store.flush)
        self._drain()

    def rebuild(self) -> None:
        """Write all weights from the masters, as after a resume."""
        for bucket in self._buckets:
            self._work.put(partial(self._pass, bucket, None, None, keep=False))
        self._drain()
        if self._up is not None:
            self._up.before_compute()

    def close(self) -> None:
        """End the thread, the lanes and the pool."""
        self._work.put(None)
        self._thread.join()
        self._lanes.close()
        self._store.close()
        self._pool.close()

    # What the thread does.

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is None:
                try:
                    work()
                except BaseException as error:  # raised again where the training loop waits
                    self._error = error
            elif isinstance(work, _Drained):
                work()

    def _take_in(self, arriving: _Arriving, last: bool, rules: Sequence[Rule], speculates: bool) -> None:
        """Take a bucket's gradients, complete for this micro-batch, and make the step if it is the last."""
        bucket, staging = arriving.bucket, arriving.staging
        if arriving.mark is not None:
            arriving.mark.wait()
        for member in bucket.members:
            if (member.name, member.start) not in arriving.gradients:
                staging[member.offset : member.offset + member.elements].zero_()
        arriving.gradients.clear()
        step = self._steps[bucket.index]
        if self._buffers.accumulates:
            self._add(bucket, step, staging)
            if not last:
                return
        self._step(bucket, step, staging, rules, speculates)

    def _add(self, bucket: Bucket, step: _Step, staging: torch.Tensor) -> None:
        """Add a micro-batch's gradients to the bucket's; the first one needs the last step's to be done with."""
        self._commit(bucket)
        first = step.gradients is None
        if step.gradients is None:
            step.gradients = self._buffers.total(bucket.index)
        accumulate([step.gradients], [staging[: bucket.elements]], first=first, pool=self._pool, mode=self._mode)
        self._buffers.give_back(staging)

    def _step(
        self, bucket: Bucket, step: _Step, staging: torch.Tensor, rules: Sequence[Rule], speculates: bool
    ) -> None:
        before = step.gradients
        gradients = before if self._buffers.accumulates and before is not None else staging[: bucket.elements]
        commit = None
        if step.pending is not None and before is not None:
            commit = self._gradients(bucket, before, step.pending)
        if speculates:
            found = self._pass(bucket, commit, self._gradients(bucket, gradients, rules), keep=False, wants_sums=True)
        else:
            if commit is not None:
                self._commit(bucket)
                before = None
            found = sums(self._gradients(bucket, gradients, rules).gradients, pool=self._pool, mode=self._mode)
        assert found is not None
        for member, squares, finite in zip(bucket.members, found.squares, found.finite, strict=True):
            self._sums[member.name, member.start] = (squares, finite)
        if before is not None and before is not gradients:
            self._buffers.give_back(before)
        step.gradients, step.pending, step.speculated = gradients, None, speculates

    def _settle(self, bucket: Bucket, rules: Sequence[Rule] | None) -> None:
        """Do what the verdict asks for: step by other rules than were speculated on, step now, or leave it."""
        step = self._steps[bucket.index]
        assert step.gradients is not None
        if rules is None:
            if step.speculated:
                self._pass(bucket, None, None, keep=False)
            self._drop(step)
        else:
            self._pass(bucket, None, self._gradients(bucket, step.gradients, rules), keep=not step.speculated)
            if step.speculated:
                step.pending = rules
            else:
                self._drop(step)
        step.speculated = False

    def _commit(self, bucket: Bucket) -> None:
        step = self._steps[bucket.index]
        if step.pending is None or step.gradients is None:
            return
        commit = self._gradients(bucket, step.gradients, step.pending)
        with self._store.open(bucket.index, write=True) as state:
            update(self._parts(bucket, state), commit=commit, pool=self._pool, mode=self._mode)
        self._drop(step)

    def _drop(self, step: _Step) -> None:
        if step.gradients is not None and not self._buffers.accumulates:
            self._buffers.give_back(step.gradients)
        step.gradients, step.pending = None, None

    def _pass(
        self, bucket: Bucket, commit: Pass | None, step: Pass | None, *, keep: bool, wants_sums: bool = False
    ) -> Sums | None:
        """Pass over a bucket's state and send the weights up."""
        writes = commit is not None or (keep and step is not None)
        ready = self._buffers.weights()
        parts = [ready.tensor[m.offset : m.offset + m.elements] for m in bucket.members]
        with self._store.open(bucket.index, write=writes) as state:
            found = update(
                self._parts(bucket, state),
                commit=commit,
                step=step,
                keep=keep,
                weights=parts,
                wants_sums=wants_sums,
                pool=self._pool,
                mode=self._mode,
            )
        for member, part in zip(bucket.members, parts, strict=True):
            to = self._targets[member.name].weights[member.start : member.start + member.elements]
            self._up = ready.mark = self._lanes.up.copy(to, part)
        return found

    def _parts(self, bucket: Bucket, state: Sequence[torch.Tensor]) -> list[Part]:
        parts = []
        for m in bucket.members:
            master, *moments = (tensor[m.offset : m.offset + m.elements] for tensor in state)
            parts.append(Part(master, tuple(moments), self._targets[m.name].group))
        return parts

    @staticmethod
    def _gradients(bucket: Bucket, flat: torch.Tensor, rules: Sequence[Rule]) -> Pass:
        return Pass([flat[m.offset : m.offset + m.elements] for m in bucket.members], rules)

    # Between the two.

    def _send_open(self) -> None:
        for arriving in list(self._open.values()):
            self._send(arriving)

    def _send(self, arriving: _Arriving) -> None:
        self._open.pop(arriving.bucket.index, None)
        if self._last:
            self._complete.add(arriving.bucket.index)
        self._work.put(partial(self._take_in, arriving, self._last, self._rules, self._speculates))

    def _drain(self) -> None:
        done = _Drained()
        self._work.put(done)
        done.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _Drained:
    """Is reached when the thread has done what it was given before."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def __call__(self) -> None:
        self._reached.set()

    def wait(self) -> None:
        self._reached.wait()


@dataclass(slots=True)
class Ready:
    """A buffer of weights, and what reads it."""

    tensor: torch.Tensor
    mark: Mark | None = None


class Buffers:
    """The engine's host memory besides the state, all of it taken at the start.

    ``spare`` buffers for gradients come on top of one per bucket. Where more are needed at once than there are, as
    when gradients come in an order that buckets do not expect, :meth:`take` makes another one, which is counted.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        gradients: torch.dtype,
        weights: torch.dtype,
        totals: torch.dtype | None,
        pinned: bool,
        spare: int = 2,
    ) -> None:
        self._most = max((bucket.elements for bucket in buckets), default=0)
        self._gradients, self._pinned = gradients, pinned
        self.accumulates = totals is not None
        """Whether a step has several micro-batches, whose gradients are added up here."""
        count = spare if self.accumulates else len(buckets) + spare
        self._lock = threading.Lock()
        self._free = [self._made(gradients) for _ in range(count)]
        self._weights = [Ready(self._made(weights)) for _ in range(2)]
        self._totals = [torch.empty(b.elements, dtype=totals) for b in buckets] if totals is not None else []
        self._turn = 0
        self.late = 0
        """Buffers that had to be made on the way."""

    def take(self) -> torch.Tensor:
        """Return a buffer for a bucket's gradients."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self.late += 1
        return self._made(self._gradients)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer, or the part of it that was used, back."""
        with self._lock:
            self._free.append(
                buffer if len(buffer) == self._most else buffer.new_empty(0).set_(buffer.untyped_storage())
            )

    def total(self, bucket: int) -> torch.Tensor:
        """Return where a bucket's gradients are added up."""
        return self._totals[bucket]

    def weights(self) -> Ready:
        """Return a buffer for a bucket's weights, behind the copy that reads it."""
        self._turn = (self._turn + 1) % len(self._weights)
        ready = self._weights[self._turn]
        if ready.mark is not None:
            ready.mark.wait()
        return ready

    def _made(self, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(self._most, dtype=dtype, pin_memory=self._pinned)
