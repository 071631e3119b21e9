"""Pictures of a plan's HTML page: the nodes with their ranks, the candidate layouts, memory during a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from partool.layout.mesh import AXES, coordinates, ranks_on_a_node
from partool.plan.types import CandidateRow, Plan
from partool.plan.verification import Verification
from partool.report.html_svg import Picture, log_ticks, tag, text, tick_label, ticks
from partool.report.units import gib, seconds

_GIB = 2**30
_NODES, _PER_NODE = 16, 16
"""Maximum number of nodes, and of ranks of a node, that are drawn one by one."""
_WIDTH, _HEIGHT = 760.0, 430.0
_STEP_WIDTH, _STEP_HEIGHT = 1000.0, 160.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 20.0, 26.0, 56.0
_LOG_FROM = 4.0
"""An axis is logarithmic if the ratio of its largest to its smallest value is at least this number."""

AXIS_WORDS = {
    "pp": "pipeline: each rank runs some of the layers",
    "dp_replicate": "data parallel: full copies, which see different sequences",
    "dp_shard": "data parallel: ranks that share one copy of the sharded state",
    "cp": "sequence parallel: ranks that share one sequence",
    "tp": "tensor parallel: ranks that share every layer",
}


@dataclass(frozen=True)
class AxisRow:
    """Size of a mesh axis, and the texts that describe the axis."""

    name: str
    size: int
    words: str
    link: str
    example: str


def sizes(plan: Plan) -> tuple[int, ...]:
    """Return the sizes of the mesh axes, outermost first."""
    return tuple(getattr(plan.layout.mesh, axis) for axis in AXES)


def axis_rows(plan: Plan) -> list[AxisRow]:
    """Return the axes of the mesh, outermost first, with the links that their groups use."""
    dims, rows = sizes(plan), []
    per_node = plan.devices.joined
    for index, (axis, size) in enumerate(zip(AXES, dims, strict=True)):
        stride = math.prod(dims[index + 1 :])
        inside = ranks_on_a_node(axis, dims, per_node)
        link = "–" if size == 1 else "within the fast link" if inside >= size else f"between nodes, {inside} on each"
        group = [str(rank * stride) for rank in range(min(size, 4))]
        example = ", ".join(group) + (f", … {(size - 1) * stride}" if size > 4 else "") if size > 1 else "–"
        rows.append(AxisRow(axis, size, AXIS_WORDS[axis], link, example))
    return rows


def node_pictures(plan: Plan) -> tuple[list[str], int]:
    """Return one picture per drawn node, and the number of nodes in the middle that are not drawn."""
    devices = plan.devices
    world = plan.layout.mesh.world_size
    nodes = min(devices.nodes, math.ceil(world / devices.per_node))
    shown: list[int] = list(range(nodes))
    if nodes > _NODES:
        shown = [*range(_NODES // 2), *range(nodes - _NODES // 2, nodes)]
    return [_node(plan, node, world) for node in shown], nodes - len(shown)


def _node(plan: Plan, node: int, world: int) -> str:
    dims, per_node = sizes(plan), plan.devices.per_node
    first, stop = node * per_node, min((node + 1) * per_node, world)
    drawn = min(stop - first, _PER_NODE)
    more = stop - first - drawn
    columns = 4
    height = 24 + 30 * math.ceil(drawn / columns) + (18 if more else 0)
    words = f"ranks {first} to {stop - 1}"
    picture = Picture(176, height, f"node {node}", words, class_="node", width=176, height=height)
    picture.add("rect", class_="box", x=0.5, y=0.5, width=175, height=height - 1, rx=5)
    picture.add("text", f"node {node}", class_="label", x=8, y=16)
    for index in range(drawn):
        rank = first + index
        position = coordinates(rank, dims)
        x, y = 6 + 41.5 * (index % columns), 22 + 30 * (index // columns)
        where = ", ".join(f"{axis} {at}" for axis, at, size in zip(AXES, position, dims, strict=True) if size > 1)
        picture.add(
            "g",
            tag("title", text(f"rank {rank}" + (f": {where}" if where else ""))),
            tag("rect", class_=f"r{position[0] % 8}", x=x, y=y, width=39, height=27, rx=3),
            tag("text", str(rank), x=x + 19.5, y=y + 18),
            class_="cell",
        )
    if more:
        picture.add("text", f"and {more} more", class_="label", x=8, y=height - 7)
    return picture.markup(f"node-{node}")


def pareto(plan: Plan) -> str:
    """Return a picture of the candidates by step time and memory; the Pareto front and the plan's layout are marked."""
    rows = plan.candidates
    if not rows:
        return ""
    limit = plan.devices.memory_bytes / _GIB
    x, x_ticks = _axis([row.step_time_s for row in rows], (_LEFT, _WIDTH - _RIGHT))
    y, y_ticks = _axis([*(row.memory_bytes / _GIB for row in rows), limit], (_HEIGHT - _BOTTOM, _TOP))
    words = f"{len(rows)} layouts by step time and memory per rank, against {gib(plan.devices.memory_bytes)} GiB"
    picture = Picture(_WIDTH, _HEIGHT, "Candidates: step time and memory", words, class_="pareto")
    _grid(picture, x, x_ticks, y, y_ticks)
    picture.add("line", class_="limit", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(limit), y2=y(limit))
    label = f"device memory {gib(plan.devices.memory_bytes)} GiB"
    above = y(limit) > _TOP + 16
    picture.add(
        "text", label, class_="label", x=_WIDTH - _RIGHT - 4, y=y(limit) + (-6 if above else 15), text_anchor="end"
    )
    for row in sorted(rows, key=_importance):
        _point(picture, row, x(row.step_time_s), y(row.memory_bytes / _GIB))
    return picture.markup("pareto")


def _importance(row: CandidateRow) -> int:
    """Return the drawing order of a candidate: higher values are drawn later, on top."""
    return 2 if not row.why_not else int(row.pareto)


def _point(picture: Picture, row: CandidateRow, x: float, y: float) -> None:
    is_plan = not row.why_not
    run = "" if row.runnable else ", cannot run yet"
    words = (
        f"{'the plan: ' if is_plan else ''}{row.summary}: {seconds(row.step_time_s)}, {gib(row.memory_bytes)} GiB, "
        f"{row.devices} devices, {row.verdict}{run}"
    )
    if is_plan:
        angles = [math.pi * (index / 5 - 0.5) for index in range(10)]
        points = [(x + r * math.cos(a), y + r * math.sin(a)) for a, r in zip(angles, (12, 5) * 5, strict=True)]
        shape = tag("polygon", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in points), class_="own")
    elif row.verdict == "red":
        shape = tag("path", d=f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="red")
    elif row.pareto:
        shape = tag("path", d=f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z", class_=f"front {row.verdict}")
    else:
        shape = tag("circle", cx=x, cy=y, r=4.5, class_=row.verdict)
    picture.add("g", tag("title", text(words)), shape, class_="point")


def _axis(values: Iterable[float], pixels: tuple[float, float]) -> tuple[Callable[[float], float], list[float]]:
    """Return a function that maps a value to a pixel, and the values of the ticks; wide ranges are logarithmic."""
    positive = [value for value in values if value > 0.0]
    low, high = min(positive, default=1.0), max(positive, default=1.0)
    start, end = pixels
    if high / low > _LOG_FROM:
        low, high = low / (high / low) ** 0.05, high * (high / low) ** 0.05
        a, b = math.log(low), math.log(high)
        return (lambda value: start + (math.log(max(value, low)) - a) / (b - a) * (end - start)), log_ticks(low, high)
    room = 0.08 * (high - low) or 0.1 * high
    low, high = max(low - room, 0.0), high + room
    return (lambda value: start + (value - low) / (high - low) * (end - start)), ticks(low, high)


def _grid(
    picture: Picture, x: Callable[[float], float], xs: list[float], y: Callable[[float], float], ys: list[float]
) -> None:
    bottom = _HEIGHT - _BOTTOM
    for value in xs:
        picture.add("line", class_="grid", x1=x(value), x2=x(value), y1=_TOP, y2=bottom)
        picture.add("text", tick_label(value), class_="label", x=x(value), y=bottom + 18, text_anchor="middle")
    for value in ys:
        picture.add("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y(value), y2=y(value))
        picture.add("text", tick_label(value), class_="label", x=_LEFT - 8, y=y(value) + 4, text_anchor="end")
    picture.add("rect", class_="frame", x=_LEFT, y=_TOP, width=_WIDTH - _LEFT - _RIGHT, height=bottom - _TOP)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    picture.add("text", "time per step, s", class_="label", x=middle, y=_HEIGHT - 14, text_anchor="middle")
    picture.add("text", "memory of the fullest rank, GiB", class_="label", x=8, y=14)


def memory_over_time(verification: Verification) -> str:
    """Return the SVG of the bytes that the fullest rank's tensors hold during a step, by operators that ran."""
    peak = max((size_bytes for _, size_bytes in verification.timeline), default=0)
    last = max((at for at, _ in verification.timeline), default=0)
    if not peak or not last:
        return ""
    described = f"{gib(peak)} GiB at the peak; from left to right, the {last:,} operators of a step"
    picture = Picture(_STEP_WIDTH, _STEP_HEIGHT, "Memory of tensors during a step", described, class_="chart")
    points = [
        (_STEP_WIDTH * at / last, _STEP_HEIGHT * (1 - size_bytes / peak)) for at, size_bytes in verification.timeline
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    picture.add("polygon", class_="c4", points=f"{points[0][0]:.1f},{_STEP_HEIGHT} {line} {_STEP_WIDTH},{_STEP_HEIGHT}")
    return picture.markup("verification-memory")
