"""Methods of sequence parallelism that specs can name, one record each."""

from __future__ import annotations

from dataclasses import dataclass

_SHARES = "tests/parity/test_sequence_trainer.py::test_training_on_shares_equals_one_process"
_AXES = "tests/parity/test_sequence_dsp.py::test_training_equals_one_process"


@dataclass(frozen=True)
class SequenceRecord:
    """Facts about a method."""

    words: str
    """What it does."""
    source: str
    preference: int
    """Rank of preference among methods that take as long, 0 first: the one that sends less. What a prediction hides
    beside attention may show on a network that others use as well."""
    parity: str = _SHARES
    """The test that compares training under it with one process."""
    any_order: bool = False
    """Keys come to the queries, so that each rank may hold any tokens, with their places."""
    whole_axes: bool = False
    """A layer that attends along an axis of a grid has all of it."""
    on_grids: bool = False
    """It needs layers that attend along the axes of a grid, whose cut is its order."""
    fields: tuple[str, ...] = ()
    """Of ``parallel.sequence``, those that some methods only read, it among them."""


METHODS: dict[str, SequenceRecord] = {
    "ulysses": SequenceRecord(
        "ranks trade tokens for heads, and attend to whole sequences like one device", "arXiv 2309.14509", 1,
        whole_axes=True,
    ),
    "ring": SequenceRecord(
        "keys and values pass from rank to rank beside the attention to those before", "arXiv 2310.01889", 3,
        any_order=True,
    ),
    "usp": SequenceRecord(
        "neighbours trade tokens for heads, and their groups form a ring", "arXiv 2405.07719", 2,
        any_order=True, fields=("ulysses",),
    ),
    "startrail": SequenceRecord(
        "teams share their queries, so that keys pass fewer ranks", "arXiv 2407.00611", 4,
        any_order=True, fields=("teams", "inside"),
    ),
    "all_gather": SequenceRecord(
        "one collective brings the keys and values of all ranks", "arXiv 2407.21783, section 3.3.2", 5, any_order=True
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
ON_GRIDS = tuple(name for name, record in METHODS.items() if record.on_grids)
OWNERS = {
    field: tuple(name for name, record in METHODS.items() if field in record.fields)
    for field in dict.fromkeys(field for record in METHODS.values() for field in record.fields)
}
"""Fields of ``parallel.sequence``, and the methods that read them."""
