"""What one rank did in a step of a dry run: the exchanges with other ranks, and the device memory that it held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from partool.plan.record import Record

COMPUTE = -1
"""Entry of :attr:`RankTrace.order` for operators that exchange nothing: one entry for any number of them in a row."""


class Collective(NamedTuple):
    """One collective or message as a rank issued it."""

    kind: str
    """Name of the operator; ``send`` and ``recv_`` are messages, all others take every rank of the group."""
    group: tuple[int, ...]
    """Global ranks of the group."""
    purpose: str
    """Description of the group: key of the axis or of the wire that the group serves."""
    elements: tuple[int, ...]
    """Numbers of elements of all tensors that the operator takes."""
    dtype: str
    """Type of the first tensor; empty without tensors."""
    peer: int
    """Global rank that a message goes to or comes from; -1 if there is none."""
    sent: tuple[int, ...] = ()
    """Of an all-to-all, the number of elements for each rank of the group, in the order of ``group``."""
    received: tuple[int, ...] = ()
    """Of an all-to-all, the number of elements from each rank of the group."""


class MemoryOwner(NamedTuple):
    """Bytes that the tensors of one operator in modules of one kind hold."""

    term: str
    """Key of :data:`partool.plan.terms.MEMORY_TERMS`, or ``working``."""
    operator: str
    """Name of the operator that created the tensors."""
    size_bytes: int
    tensors: int
    """Number of tensors."""
    module: str = ""
    """Name of the module that ran, with ``*`` for the number of a layer, or of the parameter; empty where none ran."""

    @property
    def name(self) -> str:
        """Operator and module in words."""
        operator = self.operator.partition("::")[2] or self.operator
        return f"{operator} of {self.module}" if self.module else operator


class MemoryTrace(Record):
    """Bytes of device memory that tensors hold during a step."""

    peak_bytes: int
    """Most bytes that tensors held at once."""
    terms_bytes: dict[str, int]
    """Bytes at the peak by term: keys of :data:`partool.plan.terms.MEMORY_TERMS` that tensors can belong to,
    and ``working`` for tensors that live only within a pass."""
    owners: tuple[MemoryOwner, ...]
    """Whose tensors hold most at the peak, largest first."""
    timeline: tuple[tuple[int, int], ...]
    """(operators that ran since the step began, bytes held), at most some hundred points, the peak among them."""
    leaked_bytes: int = 0
    """Bytes held at the end of the step beyond those held at its begin: each further step would add as many."""
    leaked: tuple[MemoryOwner, ...] = ()
    """Whose tensors hold more at the end of the step than at its begin, largest first; empty if there are none."""
    reserved_bytes: int
    """Most bytes that torch's caching allocator would reserve for these tensors, modelled; more than the device has if
    they do not fit, and 0 on CPUs, which have no such allocator."""


class CheckpointBlock(NamedTuple):
    """A block of a parameter's master or moment that a rank holds."""

    key: str
    """Name in checkpoints: ``model.`` or the name of a moment with a dot, then the parameter's name."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    offsets: tuple[int, ...]
    """Offsets of the block in the whole tensor."""
    sizes: tuple[int, ...]
    saved: bool
    """Whether the rank can write the block; of several ranks that can write a block, one does."""
    loaded: bool
    """Whether the rank reads the block when the run continues."""


class CheckpointTrace(Record):
    """A rank's part of a checkpoint."""

    blocks: tuple[CheckpointBlock, ...]
    tensors: int
    """Number of blocks that the rank can write."""
    size_bytes: int
    """Bytes of these blocks; the rank writes fewer if other ranks hold the same blocks."""
    largest_bytes: int
    """Bytes of the largest of these blocks."""


class ExecutedParts(Record):
    """How much of a step a dry run executed; the rest was recorded again from parts that are equal."""

    layers: int
    """Layers of the rank that ran in the passes that were executed."""
    of_layers: int
    micro_batches: int
    of_micro_batches: int
    passes: int = 0
    """Forward passes of these layers for these micro-batches that ran; 0 where all layers had to run."""
    of_passes: int = 0
    unequal: str = ""
    """Why parts that seemed equal were all executed after all; empty if there are none."""


class RankTrace(Record):
    """What a rank did in its second step; the first step creates state that lasts."""

    rank: int
    vocabulary: tuple[Collective, ...]
    """The collectives and messages that differ."""
    order: tuple[int, ...]
    """Indices into ``vocabulary`` in the order in which the rank issued them, with :data:`COMPUTE` between them where
    operators ran."""
    operators: int
    """Number of operators that ran."""
    seconds: float
    """Processor time of everything, in seconds."""
    memory: MemoryTrace | None = None
    evaluation_order: tuple[int, ...] = ()
    """As ``order``, for the evaluation of one micro-batch after the step; empty for a plan that holds no data out."""

    checkpoint: CheckpointTrace | None = None
    executed: ExecutedParts | None = None

    @property
    def collectives(self) -> Iterator[Collective]:
        """The collectives and messages in the order in which the rank issued them."""
        return (self.vocabulary[index] for index in self.order if index != COMPUTE)

    @property
    def evaluation(self) -> Iterator[Collective]:
        """The collectives and messages of the evaluation in the order in which the rank issued them."""
        return (self.vocabulary[index] for index in self.evaluation_order if index != COMPUTE)
