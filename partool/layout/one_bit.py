"""Exchanges of one bit per element: when they happen, how tensors are cut into messages, and the bytes of messages.

The schedule is that of 0/1 Adam (Lu et al., arXiv 2202.06009, section 4 and algorithm 1). 1-bit Adam (Tang et al.,
arXiv 2102.02888) is the case without local steps whose variance is updated in every step before it is frozen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from partool.spec.training import CheckpointSpec, OptimizerSpec, TrainingSpec

CHUNK = 2048
"""Elements that share a scale. Each tensor begins with a chunk of its own, so that what is sent for it depends on no
other tensor: ranks that hold copies of a tensor send the same bits, whatever else they hold."""
BUCKET_CHUNKS = 2048
"""Chunks in a message, as far as whole tensors allow."""
ROW_BYTES = CHUNK // 8
"""Bytes of the signs of a chunk."""
_FROZEN_SHARE = 0.15
"""Default of ``freeze_step`` as a share of the steps, a choice of partool's: both papers give steps of single runs."""
_DOUBLING_SHARE = 0.1
"""Default of ``local_doubling`` as a share of the steps, a choice of partool's, too."""

ExchangeKind = Literal["full", "one_bit", "local"]
"""full: gradients are averaged in full precision and update both moments; one_bit: moves are averaged with one bit per
element; local: each rank moves by its own gradients, without a collective among data-parallel ranks."""
LOCAL: ExchangeKind = "local"
"""Kind of steps without a collective."""


@dataclass(frozen=True)
class ExchangeSchedule:
    """Kind of the exchange of every step, a function of the step alone."""

    variance_doubling: int
    freeze_step: int
    local_doubling: int
    local_most: int
    steps: int
    """Number of steps of the run."""
    periods: tuple[int, ...] = ()
    """Ranks need the same weights each time this number of steps is done, for checkpoints and validations."""

    def kind(self, step: int) -> ExchangeKind:
        """Return the kind of step ``step``, counted from 0."""
        if step < self.freeze_step:
            return "full" if self._updates_variance(step) else "one_bit"
        steps_run = step + 1
        together = steps_run >= self.steps or any(steps_run % period == 0 for period in self.periods)
        return "one_bit" if together or self._exchanges(step - self.freeze_step) else LOCAL

    @cached_property
    def counts(self) -> dict[ExchangeKind, int]:
        """Number of steps of each kind in the run."""
        by_kind = Counter(self.kind(step) for step in range(self.steps))
        return {"full": by_kind["full"], "one_bit": by_kind["one_bit"], "local": by_kind["local"]}

    def _updates_variance(self, step: int) -> bool:
        if self.variance_doubling == 0:
            return True
        # Block i has ``variance_doubling`` updates, 2 ** i steps apart.
        block = (step // self.variance_doubling + 1).bit_length() - 1
        return (step - self.variance_doubling * ((1 << block) - 1)) % (1 << block) == 0

    def _exchanges(self, after: int) -> bool:
        """Return whether the step ``after`` steps after the freeze ends an interval; blocks end with an exchange."""
        last = (self.local_most - 1).bit_length()
        block = min(after // self.local_doubling, last)
        steps_run = after - block * self.local_doubling + 1
        return steps_run % min(1 << block, self.local_most) == 0 or (block < last and steps_run == self.local_doubling)


def exchange_schedule(
    optimizer: OptimizerSpec, training: TrainingSpec, checkpoint: CheckpointSpec, validates: bool
) -> ExchangeSchedule:
    """Return the schedule of a run; ``validates`` says whether some data are held out."""
    spec, steps = optimizer.one_bit, training.steps
    every = checkpoint.every if isinstance(checkpoint.every, int) else 0
    periods = tuple(filter(None, (every, training.validation.every if validates else 0)))
    freeze = spec.freeze_step
    if freeze is None:
        freeze = max(optimizer.schedule.warmup_steps, math.ceil(_FROZEN_SHARE * steps), 1)
    doubling = spec.local_doubling or max(1, math.ceil(_DOUBLING_SHARE * steps))
    return ExchangeSchedule(spec.variance_doubling, freeze, doubling, spec.local_most, steps, periods)


@dataclass(frozen=True, slots=True)
class MessageBucket:
    """Tensors that are exchanged in one message."""

    sizes: tuple[int, ...]
    """Elements of each tensor."""

    @property
    def chunks(self) -> int:
        """Number of chunks of the tensors."""
        return sum(-(-size // CHUNK) for size in self.sizes)

    def share(self, ranks: int) -> int:
        """Return the number of chunks that each rank averages; the last ranks may have chunks that hold nothing."""
        return -(-self.chunks // ranks)

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) of each tensor, where chunks lie one after the other."""
        chunk = 0
        for size in self.sizes:
            yield chunk * CHUNK, size
            chunk += -(-size // CHUNK)

    def sent_bytes(self, ranks: int, scale_bytes: int) -> int:
        """Return the bytes that a rank sends: each other rank gets a share, and later a share of the result."""
        return 2 * (ranks - 1) * self.share(ranks) * (ROW_BYTES + scale_bytes)


def buckets(sizes: Sequence[int]) -> list[MessageBucket]:
    """Return the buckets of tensors with these numbers of elements, in the same order."""
    full_buckets: list[MessageBucket] = []
    taken: list[int] = []
    for size in sizes:
        if taken and MessageBucket((*taken, size)).chunks > BUCKET_CHUNKS:
            full_buckets.append(MessageBucket(tuple(taken)))
            taken = []
        taken.append(size)
    return [*full_buckets, MessageBucket(tuple(taken))] if taken else full_buckets


def one_bit_bytes(sizes: Sequence[int], ranks: int, scale_bytes: int) -> int:
    """Return the bytes that a rank sends in one exchange of tensors with these numbers of elements."""
    return sum(bucket.sent_bytes(ranks, scale_bytes) for bucket in buckets(sizes)) if ranks > 1 else 0
