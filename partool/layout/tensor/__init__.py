"""Partition of a model over tensor-parallel ranks: which parameter is cut where, by which rule."""

from partool.layout.tensor.types import Cut, Gradients, Partition, Range, Style, chunks

__all__ = ["Cut", "Gradients", "Partition", "Range", "Style", "chunks"]
