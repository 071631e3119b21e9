"""Methods of sequence parallelism that specs can name, one record each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SHARES = "tests/parity/test_sequence_trainer.py::test_training_on_shares_equals_one_process"
_AXES = "tests/parity/test_sequence_dsp.py::test_training_equals_one_process"


@dataclass(frozen=True)
class SequenceRecord:
    """Facts about a method."""

    words: str
    """One sentence on the method."""
    source: str
    preference: int
    """Rank of preference among methods that take as long, 0 first: the one that sends less. What a prediction hides
    beside attention may show on a network that others use as well."""
    parity: str = _SHARES
    """The test that compares training under it with one process."""
    heads: Literal["own", "all", "groups"] = "own"
    """Ranks that trade tokens for heads: none, so that each has all heads of its own tokens; all that share a
    sequence; or groups of the field ``ulysses``."""
    keys: Literal["own", "ring", "gathered", "teams"] = "own"
    """The way in which keys of other tokens reach a rank: not at all, beyond the heads that it trades; round a ring of
    ranks; by one collective; or by teams of the field ``teams``."""
    whole_axes: bool = False
    """A layer that attends along an axis of a grid has all of it."""
    on_grids: bool = False
    """It needs layers that attend along the axes of a grid, whose cut is its order."""
    fields: tuple[str, ...] = ()
    """Fields of ``parallel.sequence`` that this method reads and others do not."""

    @property
    def any_order(self) -> bool:
        """Whether keys come to the queries, so that each rank may hold any tokens, with their places."""
        return self.keys != "own"

    @property
    def whole_sequences(self) -> bool:
        """Whether a rank attends to whole sequences, like one device, with some of the heads."""
        return self.heads != "own" and self.keys == "own"


METHODS: dict[str, SequenceRecord] = {
    "ulysses": SequenceRecord(
        "ranks trade tokens for heads, and attend to whole sequences like one device", "arXiv 2309.14509", 1,
        heads="all", whole_axes=True,
    ),
    "ring": SequenceRecord(
        "keys and values pass from rank to rank beside the attention to those before", "arXiv 2310.01889", 3,
        keys="ring",
    ),
    "usp": SequenceRecord(
        "neighbours trade tokens for heads, and their groups form a ring", "arXiv 2405.07719", 2,
        heads="groups", keys="ring", fields=("ulysses",),
    ),
    "startrail": SequenceRecord(
        "teams share their queries, so that keys pass fewer ranks", "arXiv 2407.00611", 4,
        keys="teams", fields=("teams", "inside"),
    ),
    "all_gather": SequenceRecord(
        "one collective brings the keys and values of all ranks", "arXiv 2407.21783, section 3.3.2", 5, keys="gathered"
    ),
    "dsp": SequenceRecord(
        "the hidden state changes the axis that is cut, and attention itself sends nothing", "arXiv 2403.10266", 0,
        _AXES, whole_axes=True, on_grids=True,
    ),
}  # fmt: skip
"""By the name that specs use."""

PREFERENCE = tuple(sorted(METHODS, key=lambda name: METHODS[name].preference))
ANY_ORDER = tuple(name for name, record in METHODS.items() if record.any_order)
WHOLE_AXES = tuple(name for name, record in METHODS.items() if record.whole_axes)
WHOLE_SEQUENCES = tuple(name for name, record in METHODS.items() if record.whole_sequences)
IN_GROUPS = tuple(name for name, record in METHODS.items() if record.heads == "groups")
IN_TEAMS = tuple(name for name, record in METHODS.items() if record.keys == "teams")
ON_GRIDS = tuple(name for name, record in METHODS.items() if record.on_grids)
OWNERS = {
    field: tuple(name for name, record in METHODS.items() if field in record.fields)
    for field in dict.fromkeys(field for record in METHODS.values() for field in record.fields)
}
"""Fields of ``parallel.sequence``, and the methods that read them."""
