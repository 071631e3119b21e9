"""What a dry run of a plan's code found, stored with the plan that it verified."""

from __future__ import annotations

from partool.plan.rank_trace import ExecutedParts, MemoryOwner
from partool.plan.record import Record

NOT_EXECUTED = (
    "kernels, transfers between ranks, the timing of streams and the workspaces of libraries; tensors have shapes, "
    "types and devices, but no values"
)
"""Parts of every plan that a dry run does not execute."""
UNFUSED = "compiled blocks run operator by operator, so that temporaries count which fused kernels would avoid"
"""What a dry run does otherwise with a plan that compiles."""


WARNINGS = frozenset({"PT697"})
"""Codes of findings that are no faults by themselves: a plan whose ranks hold more than was planned may run."""
RANK_LIMIT_S = 1800.0
"""Seconds that the dry run of one rank may take by default; a rank of a model of 70e9 parameters takes about 40."""


class VerifiedRank(Record):
    """What one rank of a dry run held and did in a step."""

    rank: int
    pipeline_rank: int
    peak_bytes: int
    """Most bytes that the rank's tensors held at once."""
    terms_bytes: dict[str, int]
    """Bytes at the peak, see :attr:`partool.plan.rank_trace.MemoryTrace.terms_bytes`."""
    reserved_bytes: int
    """See :attr:`partool.plan.rank_trace.MemoryTrace.reserved_bytes`."""
    exchanges: int
    """Number of collectives and messages."""
    operators: int
    seconds: float
    """Processor time of the rank's dry run, in seconds."""
    executed: ExecutedParts | None = None


class VerifiedFinding(Record):
    """A fault that the dry run found, or a warning (:data:`WARNINGS`)."""

    code: str
    message: str
    places: tuple[str, ...] = ()
    """Keys of the spec that decide on the exchange, such as ``parallel.tensor``."""
    ranks: tuple[int, ...] = ()


class MemoryBefore(Record):
    """The memory that the planner predicted, before the dry run corrected it."""

    rank: int
    """Global rank of the fullest rank."""
    total_bytes: int
    fit_probability: float
    verdict: str


class Verification(Record):
    """A dry run of all ranks of a plan that differ."""

    not_executed: str = NOT_EXECUTED
    """Parts of the plan that the dry run does not execute."""
    ranks: tuple[VerifiedRank, ...]
    """The executed ranks, in order."""
    findings: tuple[VerifiedFinding, ...]
    """Faults of exchanges, of checkpoints and of memory."""
    partool_version: str
    """Version of partool that made the dry run."""
    plan_hash: str
    """:attr:`partool.plan.types.Plan.hash` of the plan that was verified."""
    predicted_bytes: dict[str, int]
    """Memory terms that the planner predicted for the pipeline rank of the fullest executed rank; of communication,
    without the memory of communicators, which are no tensors."""
    before: MemoryBefore
    fullest: int
    """Global rank of the executed rank that holds most."""
    owners: tuple[MemoryOwner, ...]
    """Whose tensors hold most at the peak of the fullest rank, largest first."""
    timeline: tuple[tuple[int, int], ...]
    """(operators that ran, bytes held) of the fullest rank's step."""
