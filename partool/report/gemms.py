"""The matrix products of one rank under a plan, as text and as data, with their prices and where these come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.catalog.silicon.collectives import Operation
from partool.cost.case import Layouts
from partool.cost.codec import encode
from partool.cost.collective import axis_group
from partool.cost.silicon import collectives, experts
from partool.cost.silicon.origin import PriceOrigin
from partool.cost.silicon.products import origin
from partool.cost.time import attention
from partool.cost.time.experts import expert_sizes
from partool.cost.time.gemm import equations_s, matmul_s
from partool.cost.traffic.messages import tokens
from partool.layout.gemms import Gemm, gemms
from partool.plan.types import Plan
from partool.planner.kernels.choose import workload_of
from partool.planner.kernels.requests import is_narrow
from partool.report.units import seconds
from partool.work.base import Workload


def plan_gemms(plan: Plan) -> list[Gemm]:
    """Return the matrix products of a rank under a plan."""
    layout, tensor = plan.layout, plan.layout.tensor
    sizes = {
        "tensor": layout.mesh.tp, "inner": tensor.inner, "expert": layout.expert, "expert_tensor": layout.expert_tensor,
        "tokens": plan.tokens,
    }  # fmt: skip
    return gemms(plan.model, **sizes, shares=tensor.sequence_norms)


def gemm_rows(plan: Plan) -> list[dict[str, object]]:
    """Return the matrix products of a rank as data."""
    work = workload_of(plan)
    return [
        asdict(gemm) | {"forward_s": _forward_s(plan, work, gemm), "price": _origin(plan, work, gemm)._asdict()}
        for gemm in plan_gemms(plan)
    ]


def render_gemms(plan: Plan, console: Console) -> None:
    """Print the sizes of each matrix product of one rank, its seconds in a forward pass, and whose these are."""
    work, table = workload_of(plan), Table(box=None, pad_edge=False)
    for index, name in enumerate(("product", "M", "N", "K", "groups", "alike", "layers", "one takes", "price")):
        table.add_column(name, justify="left" if index in (0, 8) else "right", no_wrap=0 < index < 8, overflow="fold")
    sources: dict[str, str] = {}
    scaled: dict[str, list[str]] = {}
    for gemm in plan_gemms(plan):
        rows, price = gemm.rows, _origin(plan, work, gemm)
        m = str(rows.most) if rows.least == rows.most else f"{rows.least} to {rows.most}"
        sizes = (m, str(gemm.n), str(gemm.k), str(gemm.groups), str(gemm.alike), str(gemm.layers))
        source, _, ratios = price.text.partition("; ")
        mark = sources.setdefault(source, chr(ord("a") + len(sources)))
        if ratios:
            scaled.setdefault(ratios, []).append(gemm.name)
        table.add_row(gemm.name, *sizes, seconds(_forward_s(plan, work, gemm)), f"{price.kind} ({mark})")
    console.print(Text("Matrix products of a rank, forward, per micro-batch", "bold"))
    console.print(table)
    console.print("Backward: M × K × N for inputs and N × K × M for weights.")
    for source, mark in sources.items():
        console.print(f"({mark}) {source}", markup=False, highlight=False)
    for ratios, names in scaled.items():
        console.print(f"{'; '.join(names)}: {ratios}", markup=False, highlight=False)


def price_lines(plan: Plan) -> list[str]:
    """Return a line for each source of the prices of a rank's kernels and collectives: which, and how it was priced."""
    work = workload_of(plan)
    names: dict[tuple[str, str], list[str]] = {}
    for gemm in plan_gemms(plan):
        if gemm.groups == 1:
            price = _origin(plan, work, gemm)
            names.setdefault((price.kind, price.text.split(";")[0]), []).append(gemm.name)
    for name, price in _other_prices(work, encode(plan.layout)):
        names.setdefault((price.kind, price.text), []).append(name)
    return [f"{', '.join(priced)}: {kind}, {who}" for (kind, who), priced in names.items()]


_AXIS_COLLECTIVES: tuple[tuple[str, tuple[Operation, ...]], ...] = (
    ("tp", ("all_gather", "reduce_scatter")),
    ("shards", ("all_gather", "reduce_scatter")),
    ("replicas", ("all_reduce",)),
    ("ep", ("all_to_all",)),
)


def _other_prices(work: Workload, layouts: Layouts) -> Iterator[tuple[str, PriceOrigin]]:
    """Yield what prices attention, a layer of experts, and the collectives inside of a node."""
    yield "attention", attention.origin(work, layouts, backward=False)
    for shape, model in enumerate(work.model.expert_shapes):
        sizes = expert_sizes(work.of_shape(shape), layouts, tokens(work, layouts))
        if sizes is not None and model.moe is not None:
            name = "experts" if model is work.model else f"layers of {model.moe.experts} experts"
            yield name, experts.origin(work, sizes)
    for axis, operations in _AXIS_COLLECTIVES:
        ranks = axis_group(work, layouts, axis)
        for operation in operations if ranks.inside > 1 else ():
            price = collectives.origin(work.devices, operation, int(ranks.slots))
            yield f"{operation} of {int(ranks.inside)} ({axis})", price


def _forward_s(plan: Plan, work: Workload, gemm: Gemm) -> float:
    """Return the seconds of one product, or of the products of one group, for the mean number of rows."""
    wide = not is_narrow(plan, gemm)
    product_s = matmul_s(work, gemm.rows.mean, float(gemm.n), float(gemm.k), wide=wide, batch=gemm.groups)
    return work.time_scalar * work.stack.derate * float(product_s)


def _origin(plan: Plan, work: Workload, gemm: Gemm) -> PriceOrigin:
    wide = not is_narrow(plan, gemm)
    price = origin(work, gemm.rows.mean, gemm.n, gemm.k, wide=wide, batch=gemm.groups, equation=equations_s)
    if gemm.groups == 1 or work.devices.backend == "cpu":
        return price
    return price._replace(text=f"{price.text}; a step has the seconds of a whole layer of experts instead")
