"""Matrices that follow each other must be cut alike: what one leaves on a rank is what the next one reads there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partool.diagnostics.record import Diagnostic
from partool.layout.tensor.choice import Choice, Group, leaf
from partool.layout.tensor.cutting import collapsed_name
from partool.layout.tensor.types import Partition

_HELP = "cut what leads away from the hidden size by column, and what leads back by row, in the same parts"


def check_pairs(
    by_parent: Mapping[str, Group], chosen: Mapping[str, Choice], rows: Sequence[Partition]
) -> Iterator[Diagnostic]:
    """Yield a finding for each group whose cuts do not fit together."""
    laid = {row.name.rpartition(".")[0]: row for row in rows if row.name.endswith(".weight")}
    laid.update({row.name: row for row in rows})
    for group in by_parent.values():
        names = [name for name in group.linears if name in chosen]
        columns = [name for name in names if chosen[name].style == "column"]
        if not columns:
            continue
        gathered = [name for name in names if chosen[name].style == "column_gathered"]
        back = [name for name in names if chosen[name].style == "row"] or _row_beside(group, by_parent, chosen)
        if not back:
            text = f"its results stay cut, and no matrix of {collapsed_name(group.name)} is cut by row to sum them"
            yield _finding(columns[0], chosen, text)
        elif gathered and group.attention:
            text = f"{leaf(columns[0])} stays cut and {leaf(gathered[0])} beside it is gathered"
            yield _finding(columns[0], chosen, text)
        for column in columns:
            for row in back:
                if not _fit(group, chosen[column], chosen[row], laid[column], laid[row]):
                    yield _finding(column, chosen, f"{leaf(row)} after it is cut into other parts")


def _row_beside(group: Group, by_parent: Mapping[str, Group], chosen: Mapping[str, Choice]) -> list[str]:
    """Return row-cut matrices of a group beside this one that has none that is cut by column, as BERT's output."""
    parent = group.name.rpartition(".")[0]
    for other in by_parent.values():
        styles = {name: chosen[name].style for name in other.linears if name in chosen}
        if other.name.rpartition(".")[0] == parent and "row" in styles.values() and "column" not in styles.values():
            return [name for name, style in styles.items() if style == "row"]
    return []


def _fit(group: Group, column: Choice, row: Choice, out: Partition, into: Partition) -> bool:
    """Return True if every rank holds, of each part of ``out``, the same share that it holds of the input of ``into``.

    Attention changes widths between the two, so there both must be cut by whole heads.
    """
    if group.attention:
        return bool(column.heads) and row.heads == "query"
    starts = [sum(column.parts[:index]) for index in range(len(column.parts))] or [0]
    for held, read in zip(out.cuts[0].ranges, into.cuts[0].ranges, strict=True):
        if list(held) != [(start + at, stop + at) for at in starts for start, stop in read]:
            return False
    return True


def _finding(name: str, chosen: Mapping[str, Choice], text: str) -> Diagnostic:
    message = f"{collapsed_name(name)} is cut by column ({chosen[name].rule}), but {text}"
    return Diagnostic("PT441", message, path=("parallel", "tensor"), help=_HELP)
