"""Passes over the state of a bucket whose gradients have arrived.

With ``deferred`` speculation a step's pass commits the previous step, whose gradient scale is known by now. The same
pass computes the current step in registers with the expected scale, and writes only the new weights. If the actual
scale differs, one more pass corrects the weights. Masters and moments were not changed, so they need not be undone and
cannot contain an infinity. With ``undo`` speculation the pass copies the state and then makes the whole step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from partool_kernels.host import Part, Pool, StepRule, Sums, UpdatePass, accumulate, sums, update
from partool_kernels.host.types import Mode
from partool_runtime.offload.buckets import Bucket
from partool_runtime.offload.buffers import Buffers
from partool_runtime.offload.figures import HostFigures
from partool_runtime.offload.lanes import CopyLane, Mark
from partool_runtime.offload.store import StateStore
from partool_runtime.offload.undo import Undo

Speculation = Literal["none", "deferred", "undo"]


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """Memory of one shard's weights, from which compute reads the weights."""

    weights: torch.Tensor
    """The weights as a flat, contiguous tensor, on the device or in host memory."""
    group: int
    """Index of the shard's rule in the step's rules."""
    in_host: bool = False
    """True if compute streams the weights from host memory; passes then write weights directly to host memory."""


@dataclass(slots=True)
class Arriving:
    """A bucket's gradients while they are copied to the host."""

    bucket: Bucket
    staging: torch.Tensor
    members: set[tuple[str, int]] = field(default_factory=set)
    """Members that are being or have been copied, each as parameter name and index of its first element."""
    mark: Mark | None = None
    """Mark after the copies of all members in ``members``."""


@dataclass(slots=True)
class BucketStep:
    """The state of a bucket between the arrival of its gradients and the commit of its step."""

    gradients: torch.Tensor | None = None
    """Flat gradients; None if no gradients have arrived since the last commit."""
    pending: Sequence[StepRule] | None = None
    """Rules of a speculated and accepted step that is not committed to masters and moments yet."""
    ahead: Speculation = "none"
    """Kind of speculation used for this step, until the gradient check's scale or skip decision is known."""


class BucketPasses:
    """Runs the passes; called by one thread at a time."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        targets: Mapping[str, WeightsTarget],
        store: StateStore,
        *,
        up: CopyLane,
        pool: Pool,
        buffers: Buffers,
        undo: Undo | None,
        figures: HostFigures,
        mode: Mode,
    ) -> None:
        self._targets, self._store, self._up = targets, store, up
        self._pool, self._buffers, self._undo, self._figures, self._mode = pool, buffers, undo, figures, mode
        self.steps = [BucketStep() for _ in buckets]
        """State of each bucket's step."""
        self.sums: dict[tuple[str, int], tuple[Sequence[float], bool]] = {}
        """Maps each piece (parameter name, first element) to two values of its gradients in the step: the sums of
        squares per block, and whether all gradients are finite.
        """
        self.sent: Mark | None = None
        """Mark after the latest copy of weights."""

    def take_in(self, arriving: Arriving, *, last: bool, rules: Sequence[StepRule], speculation: Speculation) -> None:
        """Take a bucket's complete gradients of one micro-batch; after the ``last`` micro-batch, make the step."""
        bucket, staging = arriving.bucket, arriving.staging
        if arriving.mark is not None:
            arriving.mark.wait()
        for member in bucket.members:
            if (member.name, member.start) not in arriving.members:
                staging[member.offset : member.offset + member.elements].zero_()
        step = self.steps[bucket.index]
        with self._figures.passing():
            if self._buffers.accumulates:
                self._add(bucket, step, staging)
                if not last:
                    return
            self._step(bucket, step, staging, rules, speculation)

    def _add(self, bucket: Bucket, step: BucketStep, staging: torch.Tensor) -> None:
        """Commit the last step, which needs the old sum of gradients; then add a micro-batch's gradients to the sum."""
        self.commit(bucket)
        first = step.gradients is None
        if step.gradients is None:
            step.gradients = self._buffers.total(bucket.index)
        accumulate([step.gradients], [staging[: bucket.elements]], first=first, pool=self._pool, mode=self._mode)
        self._buffers.give_back(staging)

    def _step(
        self,
        bucket: Bucket,
        step: BucketStep,
        staging: torch.Tensor,
        rules: Sequence[StepRule],
        speculation: Speculation,
    ) -> None:
        before = None if self._buffers.accumulates else step.gradients
        gradients = step.gradients if self._buffers.accumulates else staging[: bucket.elements]
        assert gradients is not None
        taken, gradient_sums, ahead = _pass(bucket, gradients, rules), None, speculation
        if speculation == "deferred":
            pending = step.pending
            commit = _pass(bucket, before, pending) if before is not None and pending is not None else None
            with self._store.open(bucket.index, write=commit is not None) as state:
                gradient_sums = self._over(bucket, state, commit, taken, keep=False, wants_sums=True)
            if before is not None:
                self._buffers.give_back(before)
        else:
            self.commit(bucket)
            if speculation == "undo":
                gradient_sums = self._ahead(bucket, taken)
                ahead = "none" if gradient_sums is None else "undo"
            if gradient_sums is None:
                gradient_sums = sums(taken.gradients, pool=self._pool, mode=self._mode)
        assert gradient_sums is not None
        for member, squares, finite in zip(bucket.members, gradient_sums.squares, gradient_sums.finite, strict=True):
            self.sums[member.name, member.start] = (squares, finite)
        step.gradients, step.pending, step.ahead = gradients, None, ahead

    def _ahead(self, bucket: Bucket, step: UpdatePass) -> Sums | None:
        """Make a whole step that can be undone; return its gradients' sums, or None if the undo copy has no room."""
        assert self._undo is not None
        with self._store.open(bucket.index, write=True) as state:
            if not self._undo.keep(bucket, state):
                self._figures.put_off += 1
                return None
            return self._over(bucket, state, None, step, keep=True, wants_sums=True)

    def accept(self, bucket: Bucket, rules: Sequence[StepRule]) -> bool:
        """Accept a bucket's speculated step after its scale proved right; return False if it was not speculated."""
        step = self.steps[bucket.index]
        if step.ahead == "none":
            return False
        if step.ahead == "undo":
            self._drop(step)
        else:
            step.pending = rules
        step.ahead = "none"
        return True

    def settle(self, bucket: Bucket, rules: Sequence[StepRule] | None) -> None:
        """End a bucket's step: correct a speculated step, make any other step, or drop it if ``rules`` is None."""
        step = self.steps[bucket.index]
        assert step.gradients is not None
        if rules is not None or step.ahead != "none":
            taken = None if rules is None else _pass(bucket, step.gradients, rules)
            keep = taken is not None and step.ahead != "deferred"
            with self._figures.passing(), self._store.open(bucket.index, write=keep or step.ahead == "undo") as state:
                if step.ahead == "undo":
                    assert self._undo is not None
                    self._undo.restore(bucket, state)
                self._over(bucket, state, None, taken, keep=keep)
        if rules is not None and step.ahead == "deferred":
            step.pending = rules
        else:
            self._drop(step)
        step.ahead = "none"

    def commit(self, bucket: Bucket) -> None:
        """Commit a bucket's pending step to its state."""
        step = self.steps[bucket.index]
        if step.pending is None or step.gradients is None:
            return
        commit = _pass(bucket, step.gradients, step.pending)
        with self._store.open(bucket.index, write=True) as state:
            update(self._parts(bucket, state), commit=commit, pool=self._pool, mode=self._mode)
        self._drop(step)

    def rebuild(self, bucket: Bucket) -> None:
        """Write a bucket's weights from its masters."""
        with self._store.open(bucket.index, write=False) as state:
            self._over(bucket, state, None, None, keep=False)

    def _drop(self, step: BucketStep) -> None:
        if step.gradients is not None and not self._buffers.accumulates:
            self._buffers.give_back(step.gradients)
        step.gradients, step.pending = None, None

    def _over(
        self,
        bucket: Bucket,
        state: Sequence[torch.Tensor],
        commit: UpdatePass | None,
        step: UpdatePass | None,
        *,
        keep: bool,
        wants_sums: bool = False,
    ) -> Sums | None:
        """Run one pass, copy the new weights to the device, and return the gradients' sums if ``wants_sums``."""
        ready = self._buffers.weights()
        targets = [self._targets[m.name] for m in bucket.members]
        places = [t.weights[m.start : m.start + m.elements] for m, t in zip(bucket.members, targets, strict=True)]
        parts = [
            place if target.in_host else ready.tensor[m.offset : m.offset + m.elements]
            for m, target, place in zip(bucket.members, targets, places, strict=True)
        ]
        gradient_sums = update(
            self._parts(bucket, state),
            commit=commit,
            step=step,
            keep=keep,
            weights=parts,
            wants_sums=wants_sums,
            pool=self._pool,
            mode=self._mode,
        )
        for target, place, part in zip(targets, places, parts, strict=True):
            if not target.in_host:
                self.sent = ready.mark = self._up.copy(place, part)
                self._figures.bytes_up += part.nbytes
        return gradient_sums

    def _parts(self, bucket: Bucket, state: Sequence[torch.Tensor]) -> list[Part]:
        parts = []
        for m in bucket.members:
            master, *moments = (tensor[m.offset : m.offset + m.elements] for tensor in state)
            parts.append(Part(master, tuple(moments), self._targets[m.name].group))
        return parts


def _pass(bucket: Bucket, flat: torch.Tensor, rules: Sequence[StepRule]) -> UpdatePass:
    return UpdatePass([flat[m.offset : m.offset + m.elements] for m in bucket.members], rules)
