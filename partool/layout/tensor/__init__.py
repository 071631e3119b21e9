"""Partition of a model over tensor-parallel ranks. Each parameter has a cut and the rule that decided the cut."""

from partool.layout.tensor.cutting import HeadRanges, by_name, collapse, head_ranges
from partool.layout.tensor.decide import Decided, decide
from partool.layout.tensor.own import apply_patterns, own_partition
from partool.layout.tensor.structure import Structure, StructureModule
from partool.layout.tensor.types import Cut, Gradients, Partition, Range, Style, chunks

__all__ = [
    "Cut",
    "Decided",
    "Gradients",
    "HeadRanges",
    "Partition",
    "Range",
    "Structure",
    "StructureModule",
    "Style",
    "apply_patterns",
    "by_name",
    "chunks",
    "collapse",
    "decide",
    "head_ranges",
    "own_partition",
]  # fmt: skip
