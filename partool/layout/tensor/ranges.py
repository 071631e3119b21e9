"""Apply a choice to a number of ranks: compute each rank's ranges of a matrix and its bias."""

from __future__ import annotations

from partool.layout.tensor.choice import LINEAR, CutChoice, head_kind
from partool.layout.tensor.cutting import HeadRanges, fused, head_ranges
from partool.layout.tensor.structure import Structure, StructureModule
from partool.layout.tensor.types import Cut, Partition, Range, chunks


class CannotPartitionError(ValueError):
    """A choice does not fit the matrix or the number of ranks; the message says why."""


def partitions_of(
    structure: Structure, module: StructureModule, names: list[str], choice: CutChoice, ranks: int
) -> list[Partition]:
    """Return the partitions of the parameters ``names``; raises CannotPartitionError if the choice does not fit."""
    return [_row(structure, module, name, choice, ranks) for name in names]


def _row(structure: Structure, module: StructureModule, name: str, choice: CutChoice, ranks: int) -> Partition:
    shape = module.parameters[name]
    dim = _dimension(structure, module, name, choice)
    row = Partition(
        name=f"{module.name}.{name}",
        shape=shape,
        style=choice.style,
        gradients="summed" if choice.summed else "whole",
        summed_outputs=choice.summed_outputs,
        rule=choice.rule,
        why=choice.why,
    )
    if dim is None:
        beside = choice.style == "row"
        return row.model_copy(update={"style": "replicated", "why": "added to the sum"}) if beside else row
    dealt, shared = _cut(structure, choice, dim, shape[dim], ranks)
    if shared:
        why = f"{choice.why}, shared by the ranks of their query heads"
        row = row.model_copy(update={"gradients": "summed", "why": why})
    return row.model_copy(update={"cuts": (dealt,)})


def _dimension(structure: Structure, module: StructureModule, name: str, choice: CutChoice) -> int | None:
    """Return the dimension of a parameter that a choice cuts; None if the parameter is not cut."""
    dims = len(module.parameters[name])
    if choice.style == "replicated":
        return None
    if module.kind == "experts":
        return _expert_dimension(structure, module, name, choice)
    if module.kind in LINEAR and dims == 2:
        into = 0 if module.kind == "conv1d" else 1
        return into if choice.style == "row" else 1 - into
    # Dimension 0 means outputs of the matrix in a bias, heads in a norm per head, rows in an embedding.
    return None if choice.style == "row" else 0


def _expert_dimension(structure: Structure, module: StructureModule, name: str, choice: CutChoice) -> int:
    shape = module.parameters[name]
    if len(shape) != 3:
        raise CannotPartitionError(f"{name} of the experts has {len(shape)} dimensions, not three")
    inner = [dim for dim in (1, 2) if shape[dim] != structure.hidden]
    if len(inner) == 1:
        return inner[0]
    return 2 if choice.style == "row" else 1


def _cut(structure: Structure, choice: CutChoice, dim: int, size: int, ranks: int) -> tuple[Cut, bool]:
    """Return (the cut that a choice implies, True if several ranks hold the same heads)."""
    widths = choice.parts or (size,)
    if sum(widths) != size:
        raise CannotPartitionError(f"its parts {list(widths)} sum to {sum(widths)}, not to its width of {size}")
    if choice.heads is None:
        return fused(dim, [_units(width, choice.unit, ranks) for width in widths], widths), False
    heads = head_ranges(structure.heads, structure.kv_heads, ranks)
    dealt = [_by_heads(structure, choice, heads, width, alone=not choice.parts) for width in widths]
    shares = heads.shared and any(keys for _, keys in dealt)
    if shares and choice.parts:
        text = f"{structure.kv_heads} heads of keys and values on {ranks} ranks: ranks would share parts of it"
        raise CannotPartitionError(text)
    return fused(dim, [ranges for ranges, _ in dealt], widths), shares


def _units(width: int, unit: int, ranks: int) -> list[Range]:
    if width % unit:
        raise CannotPartitionError(f"a width of {width} is no multiple of the unit {unit}")
    return [(start * unit, stop * unit) for start, stop in chunks(width // unit, ranks)]


def _by_heads(
    structure: Structure, choice: CutChoice, heads: HeadRanges, width: int, *, alone: bool
) -> tuple[list[Range], bool]:
    """Return (each rank's range of one part, cut by whole heads; True if ranks hold the same key/value head)."""
    kind = choice.heads if alone else head_kind(structure, width)
    number = structure.heads if kind == "query" else structure.kv_heads
    if kind is None or width % number:
        raise CannotPartitionError(f"a width of {width} is not that of {structure.heads} or {structure.kv_heads} heads")
    unit = width // number
    ranges = heads.queries if kind == "query" else heads.keys
    return [(start * unit, stop * unit) for start, stop in ranges], kind == "key"
