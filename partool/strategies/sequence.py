"""Methods of sequence parallelism that specs can name, one record each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SHARES = "tests/parity/test_sequence_trainer.py::test_training_on_shares_equals_one_process"
_GRAPHS = "tests/parity/test_sequence_compiled.py::test_models_on_shares_equal_one_process"
_AXES = "tests/parity/test_sequence_dsp.py::test_training_equals_one_process"


@dataclass(frozen=True)
class SequenceRecord:
    """Facts about a method of sequence parallelism."""

    words: str
    """One-line description."""
    source: str
    preference: int
    """Rank in the preference among methods with equal predicted times; 0 is preferred most. Methods with less traffic
    come first, as communication that should overlap with attention may take longer on a shared network."""
    common: bool = False
    """True: published runs of long sequences use the method."""
    tier: int = 1
    """Tier of evidence (:mod:`partool.strategies.tiers`)."""
    parity: str = _SHARES
    """Test that compares training with the method to training in one process."""
    heads: Literal["own", "all", "groups"] = "own"
    """Ranks that exchange tokens for heads. own: none, as each rank has all heads of its tokens; all: all ranks that
    share a sequence; groups: the ranks of each group of size ``ulysses``."""
    keys: Literal["own", "ring", "gathered", "teams"] = "own"
    """Way in which a rank gets the keys of other ranks' tokens. own: only by exchanging heads; ring: round a ring of
    ranks; gathered: by one collective; teams: through teams of ``teams`` ranks each."""
    whole_axes: bool = False
    """True: if a layer attends along an axis of a grid, one rank must hold the whole axis."""
    on_grids: bool = False
    """True: the method needs layers that attend along a grid's axes; the axis that is cut sets the order of tokens."""
    by_graph: bool = False
    """True: the method rewrites the graph of a model of transformers, or of the user, and needs no seam in its code."""
    fields: tuple[str, ...] = ()
    """Fields of ``parallel.sequence`` that only this method reads."""

    @property
    def any_order(self) -> bool:
        """True if a rank may hold any tokens, with their positions, because keys are sent to the queries' ranks."""
        return self.keys != "own"

    @property
    def whole_sequences(self) -> bool:
        """True if a rank computes attention over whole sequences, as a single device would, but only for some heads."""
        return self.heads != "own" and self.keys == "own"


METHODS: dict[str, SequenceRecord] = {
    "ulysses": SequenceRecord(
        "ranks trade tokens for heads, and attend to whole sequences like one device", "arXiv 2309.14509", 1,
        common=True, heads="all", whole_axes=True,
    ),
    "ring": SequenceRecord(
        "keys and values pass from rank to rank while attention to earlier ones is computed", "arXiv 2310.01889", 3,
        common=True, keys="ring",
    ),
    "usp": SequenceRecord(
        "neighbours trade tokens for heads, and their groups form a ring", "arXiv 2405.07719", 2,
        heads="groups", keys="ring", fields=("ulysses",),
    ),
    "startrail": SequenceRecord(
        "teams share their queries, so that keys pass through fewer ranks", "arXiv 2407.00611", 4,
        keys="teams", fields=("teams", "inside"),
    ),
    "all_gather": SequenceRecord(
        "one collective brings the keys and values of all ranks", "arXiv 2407.21783, section 3.3.2", 5, common=True,
        keys="gathered",
    ),
    "dsp": SequenceRecord(
        "the hidden state changes the axis that is cut, and attention itself sends nothing", "arXiv 2403.10266", 0,
        parity=_AXES, whole_axes=True, on_grids=True,
    ),
    "compiled": SequenceRecord(
        "like ulysses, by rewriting the graph of a model whose code partool does not know", "arXiv 2604.27089", 6,
        heads="all", by_graph=True, parity=_GRAPHS,
    ),
}  # fmt: skip
"""Name of a method of sequence parallelism in specs → facts about the method."""

PREFERENCE = tuple(sorted(METHODS, key=lambda name: METHODS[name].preference))
ANY_ORDER = tuple(name for name, record in METHODS.items() if record.any_order)
WHOLE_AXES = tuple(name for name, record in METHODS.items() if record.whole_axes)
WHOLE_SEQUENCES = tuple(name for name, record in METHODS.items() if record.whole_sequences)
IN_GROUPS = tuple(name for name, record in METHODS.items() if record.heads == "groups")
IN_TEAMS = tuple(name for name, record in METHODS.items() if record.keys == "teams")
BY_GRAPH = tuple(name for name, record in METHODS.items() if record.by_graph)
ON_GRIDS = tuple(name for name, record in METHODS.items() if record.on_grids)
OWNERS = {
    field: tuple(name for name, record in METHODS.items() if field in record.fields)
    for field in dict.fromkeys(field for record in METHODS.values() for field in record.fields)
}
"""Field of ``parallel.sequence`` → names of the methods that read this field."""
