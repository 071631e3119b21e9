"""Check that, on each rank, the output shard of a matrix is the input shard of the next matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from partool.diagnostics.record import Diagnostic
from partool.layout.tensor.choice import CutChoice, ModuleGroup, leaf
from partool.layout.tensor.cutting import collapsed_name
from partool.layout.tensor.infer import is_router, latents
from partool.layout.tensor.structure import StructureModule
from partool.layout.tensor.types import Partition, Range

_HELP = "cut what leads away from the hidden size by column, what leads back by row, in the same parts; or none of it"
_STAYS = {"column": "cut", "column_gathered": "gathered", "row": "cut by row", "replicated": "whole"}
"""Style → the words with which a finding describes a matrix that does not fit a neighbour whose outputs stay cut."""


def check_pairs(
    by_parent: Mapping[str, ModuleGroup], chosen: Mapping[str, CutChoice], rows: Sequence[Partition]
) -> Iterator[Diagnostic]:
    """Yield a finding for each group whose cuts do not fit together."""
    laid = {row.name.rpartition(".")[0]: row for row in rows if row.name.endswith(".weight")}
    laid.update({row.name: row for row in rows})
    for group in by_parent.values():
        names = [name for name in group.linears if name in chosen]
        columns = [name for name in names if chosen[name].style == "column"]
        if not columns:
            continue
        rows_of_group = [name for name in names if chosen[name].style == "row"]
        back = rows_of_group or _row_beside(group, by_parent, chosen)
        if back:
            yield from _beside(group, chosen, columns, rows_of_group)
        else:
            text = f"its results stay cut, and no matrix of {collapsed_name(group.name)} is cut by row to sum them"
            yield _finding(columns[0], chosen, text)
        for column in columns:
            for row in back:
                if not _fit(group, chosen[column], chosen[row], laid[column], laid[row]):
                    yield _finding(column, chosen, f"{leaf(row)} after it is cut into other parts")


def check_experts(
    modules: Iterable[StructureModule], chosen: Mapping[str, CutChoice], rows: Sequence[Partition]
) -> Iterator[Diagnostic]:
    """Yield a finding for each module of stacked experts in which only some matrices are cut, or cuts do not match.

    The check does not prescribe styles: whether a column cut or a row cut divides the inner width depends on whether
    the matrices are transposed.
    """
    laid = {row.name: row for row in rows}
    for module in modules:
        parameter_names = [f"{module.name}.{name}" for name in module.parameters] if module.kind == "experts" else []
        names = [name for name in parameter_names if name in chosen]
        styles = {chosen[name].style for name in names}
        if styles <= {"replicated"}:
            continue
        if styles != {"column", "row"}:
            text = "is cut in part"
        elif len({_share(chosen[name], laid[name]) for name in names}) > 1:
            text = "is cut into parts that do not fit"
        else:
            continue
        message = f"{collapsed_name(module.name)} {text}: {_styles(names, chosen)}"
        yield Diagnostic("PT441", message, path=("parallel", "tensor"), help=_HELP)


def _share(choice: CutChoice, row: Partition) -> tuple[tuple[Range, ...], ...]:
    """Return each rank's ranges within every part of a fused matrix.

    If these ranges differ between parts, returns each rank's ranges in the whole matrix.
    """
    starts = [sum(choice.parts[:index]) for index in range(len(choice.parts))] or [0]
    ranges = tuple(tuple(rank_ranges) for rank_ranges in row.cuts[0].ranges)
    first = (
        tuple(tuple((a, b) for a, b in rank_ranges if b <= choice.parts[0]) for rank_ranges in ranges)
        if choice.parts
        else ranges
    )
    repeated = tuple(tuple((at + a, at + b) for at in starts for a, b in rank_ranges) for rank_ranges in first)
    return first if repeated == ranges else ranges


def _styles(names: Sequence[str], chosen: Mapping[str, CutChoice]) -> str:
    return ", ".join(f"{leaf(name)} {chosen[name].style}" for name in names if name in chosen)


def _beside(
    group: ModuleGroup, chosen: Mapping[str, CutChoice], columns: Sequence[str], back: Sequence[str]
) -> Iterator[Diagnostic]:
    """Yield a finding for each matrix whose style does not fit the matrices ``columns``, whose outputs stay cut.

    Low-rank matrices, whose outputs every head reads, must not stay cut; routers may have any style.
    """
    shared = latents(group)
    cut = [name for name in columns if name not in shared]
    for name in group.linears:
        if name not in chosen or is_router(group, name):
            continue
        style = chosen[name].style
        if name in shared:
            if style in ("column", "row") or (style == "column_gathered" and shared[name].summed_outputs):
                yield _finding(name, chosen, "every head reads all of it; it can be replicated")
        elif cut and style != "column" and name not in back[:1]:
            yield _finding(cut[0], chosen, f"{leaf(cut[0])} stays cut and {leaf(name)} beside it is {_STAYS[style]}")


def _row_beside(group: ModuleGroup, by_parent: Mapping[str, ModuleGroup], chosen: Mapping[str, CutChoice]) -> list[str]:
    """Return the names of a sibling group's row-cut matrices, for the first sibling without column-cut matrices.

    BERT's output module is such a sibling. The result is empty if there is none.
    """
    parent = group.name.rpartition(".")[0]
    for other in by_parent.values():
        styles = {name: chosen[name].style for name in other.linears if name in chosen}
        if other.name.rpartition(".")[0] == parent and "row" in styles.values() and "column" not in styles.values():
            return [name for name, style in styles.items() if style == "row"]
    return []


def _fit(group: ModuleGroup, column: CutChoice, row: CutChoice, out: Partition, into: Partition) -> bool:
    """Return True if each rank's share of every part of ``out`` equals the rank's share of the input of ``into``.

    For an attention, whose two matrices may have different widths, returns True if both are cut by whole heads.
    """
    if group.attention:
        return bool(column.heads) and row.heads == "query"
    starts = [sum(column.parts[:index]) for index in range(len(column.parts))] or [0]
    for written, read in zip(out.cuts[0].ranges, into.cuts[0].ranges, strict=True):
        if list(written) != [(start + at, stop + at) for at in starts for start, stop in read]:
            return False
    return True


def _finding(name: str, chosen: Mapping[str, CutChoice], text: str) -> Diagnostic:
    style = "row" if chosen[name].style == "row" else "column"
    message = f"{collapsed_name(name)} is cut by {style} ({chosen[name].rule}), but {text}"
    return Diagnostic("PT441", message, path=("parallel", "tensor"), help=_HELP)
