"""The tensor-parallel partition of a plan: how each parameter is cut, and the rule that decided it."""

from __future__ import annotations

from collections import Counter
from math import prod

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.layout.tensor import Cut, Partition, Range
from partool.plan.types import Plan
from partool.report.units import amount

_RANKS = 8
"""Maximum number of ranks whose parts are listed one by one; if there are more, the first and the last are shown."""
_SHARES = (0.5, 0.36)
"""Maximum share of the width for names: first without, then with a column for rules. Longer names are broken."""
_ONE = "One tensor rank holds every parameter whole; --set parallel.tensor=2 shows how two would share them."


def tensor_data(plan: Plan) -> dict[str, object]:
    """Return the partition as data: a row per parameter name, and the number of elements on each rank.

    A row describes one parameter, or the parameters of one name in all layers.
    """
    ranks, inner = plan.layout.mesh.tp, plan.layout.tensor.inner
    return {
        "ranks": ranks,
        "shape": [ranks // inner, inner],
        "sequence_norms": plan.layout.tensor.sequence_norms,
        "parameters": [
            {
                **row.model_dump(mode="json", exclude={"cuts"}),
                "local": [
                    {
                        "shape": row.local_shape(rank),
                        "ranges": row.spans(rank),
                        "shared_with": _others(row, rank, ranks),
                    }
                    for rank in range(ranks)
                ],
            }
            for row in plan.partition
        ],
        "elements": [rank_elements(plan.partition, rank) for rank in range(ranks)],
    }


def _others(row: Partition, rank: int, ranks: int) -> list[int]:
    return [other for other in row.holders(rank, ranks) if other != rank]


def rank_elements(rows: tuple[Partition, ...], rank: int) -> int:
    """Return the number of elements of the whole model that a tensor rank holds."""
    return sum(prod(row.local_shape(rank)) * row.count for row in rows)


def render_tensor(plan: Plan, console: Console) -> None:
    """Print each parameter with its style, parts per rank and rule, then the number of elements on each rank."""
    ranks, inner = plan.layout.mesh.tp, plan.layout.tensor.inner
    if ranks == 1:
        console.print(_ONE)
        return
    shape = f", as {ranks // inner} × {inner}" if inner > 1 else ""
    norms = "; norms on shares of the sequence" if plan.layout.tensor.sequence_norms else ""
    console.print(Text(f"Parameters over {ranks} tensor ranks{shape}{norms}", "bold"))
    console.print(_table(plan, console.width))
    console.print()
    _whys(plan.partition, console)
    console.print()
    elements = sum(prod(row.shape) * row.count for row in plan.partition)
    shares = [
        f"{amount(rank_elements(plan.partition, rank))} ({rank_elements(plan.partition, rank) / elements:.1%})"
        for rank in range(ranks)
    ]
    console.print(f"Elements of {amount(elements)} by rank: {', '.join(_few(shares))}", highlight=False)


def _table(plan: Plan, width: int) -> Table:
    """Return a table with a line per parameter; it has a column for rules if the parameters have different rules."""
    rules = {row.rule for row in plan.partition}
    names = ["parameter", "shape", "style", "parts by rank", *(["rule"] if len(rules) > 1 else [])]
    table = Table(box=None, pad_edge=False)
    share = int(_SHARES[len(rules) > 1] * width)
    for name in names:
        table.add_column(name, overflow="fold", no_wrap=name == "parameter", min_width=10 if name == "style" else None)
    for row in plan.partition:
        size = "×".join(map(str, row.shape))
        cells = (_lines(row.name, share), size, _style(row), _parts(row), row.rule)
        table.add_row(*map(Text, cells[: len(names)]))
    return table


def _lines(name: str, width: int) -> str:
    """Return the name in lines of at most ``width`` characters, broken at dots if possible."""
    lines = [""]
    for index, part in enumerate(name.split(".")):
        piece = f".{part}" if index else part
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _style(row: Partition) -> str:
    style = {"column_gathered": "column, gathered"}.get(row.style, row.style)
    style += ", gradients summed" if row.gradients == "summed" else ""
    return f"{style}, gradients of outputs summed" if row.summed_outputs else style


def _parts(row: Partition) -> str:
    """Return a text that says which part of each cut dimension each rank has."""
    if not row.cuts:
        return "all"
    return "; ".join(_dimension(one, len(row.shape)) for one in row.cuts)


def _dimension(one: Cut, dims: int) -> str:
    holders = Counter(one.ranges)
    several = set(holders.values()) - {1} if () not in holders else set()
    # Parts that the same number of ranks share are listed once.
    parts = list(holders) if len(several) == 1 and 1 not in holders.values() else list(one.ranges)
    sizes = [_sizes(ranges) for ranges in parts]
    text = f"{sizes[0]} each" if len(set(sizes)) == 1 else ", ".join(_few(sizes))
    where = "rows" if one.dim == max(dims - 2, 0) else "columns"
    return f"{where} {text}" + (f", on {several.pop()} ranks" if len(parts) < len(one.ranges) else "")


def _sizes(ranges: tuple[Range, ...]) -> str:
    """Return the sizes of a rank's ranges: ``3+1``, or ``8 × 16`` for the same size in each of eight experts."""
    sizes = [stop - start for start, stop in ranges]
    if len(sizes) > _RANKS and len(set(sizes)) == 1:
        return f"{len(sizes)} × {sizes[0]}"
    return "+".join(map(str, sizes)) or "0"


def _few(texts: list[str]) -> list[str]:
    return texts if len(texts) <= _RANKS else [*texts[: _RANKS - 1], "…", texts[-1]]


def _whys(rows: tuple[Partition, ...], console: Console) -> None:
    """Print the reasons, each with the parameters that it applies to."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            groups.setdefault(row.why, []).append(_short(row.name))
    console.print(Text("Why", "bold"))
    if len(rules := {row.rule for row in rows}) == 1:
        console.print(Text(f"all parameters: {rules.pop()}"))
    for why, names in groups.items():
        console.print(Text(f"{', '.join(dict.fromkeys(names))}: {why}"))


def _short(name: str) -> str:
    """Return the last two parts of a parameter's name: ``q.weight``."""
    return ".".join(name.split(".")[-2:])
