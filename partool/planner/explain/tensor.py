"""Reasons for a form of tensor parallelism: its shape, norms, and overlap."""

from __future__ import annotations

from collections.abc import Iterator

from partool.cost.codec import encode
from partool.cost.traffic.tensor import halves_passes
from partool.layout.tensor import head_ranges
from partool.plan.layout import Layout
from partool.planner.cost_job import cost_job
from partool.planner.forms.tensor_forms import divides, sent_s, shape_problem
from partool.planner.problem import Problem, divisors
from partool.planner.search.price import Priced
from partool.spec.numbers import GIB

_CLOSE = 5e-4
"""Share of the step time below which a difference is not reported."""


def tensor_reasons(problem: Problem, best: Priced) -> Iterator[str]:
    """Yield one sentence per decision about a layout's tensor ranks."""
    layout = best.layout
    if layout.mesh.tp == 1:
        return
    fused = layout.tensor.overlap == "symmetric"  # fused collectives support one shape and one kind of norms only
    if not fused:
        yield from _shape(problem, best)
    yield from _heads(problem, layout)
    if layout.tensor.inner == 1 and not fused:
        yield _norms(problem, best)
    yield from _overlap(problem, layout)


def _shape(problem: Problem, best: Priced) -> Iterator[str]:
    """Yield a sentence that compares the layout's shape with another shape by the time of a layer's collectives.

    The other shape is t × 1 (t tensor ranks); if the layout itself has t × 1, the fastest other shape is taken.
    """
    layout = best.layout
    ranks, inner, rows = layout.mesh.tp, layout.tensor.inner, layout.micro_batch
    plain = sent_s(problem, ranks, 1, rows)
    if inner > 1:
        here = sent_s(problem, ranks, inner, rows)
        change = f"{abs(1.0 - here / plain):.0%} {'less' if here <= plain else 'more'}"
        yield (
            f"Tensor {ranks // inner} × {inner}: collectives of a layer take {_milliseconds(here)}, {change} than in "
            f"{ranks} × 1 ({_tiers(problem, ranks, inner)})."
        )
        return
    able = [n for n in divisors(ranks) if n > 1 and shape_problem(problem, ranks, n) is None]
    if not able:
        return
    times = {n: sent_s(problem, ranks, n, rows) for n in able}
    other = min(able, key=lambda n: times[n])
    if times[other] < plain:
        text = f"would take {1.0 - times[other] / plain:.0%} less in {ranks // other} × {other}"
        yield f"Tensor {ranks} × 1: collectives of a layer {text}, {_but(problem, best, other)}."
    else:
        yield (
            f"Tensor {ranks} × 1: collectives of a layer take {_milliseconds(plain)}; the best other shape, "
            f"{ranks // other} × {other}, would take {_milliseconds(times[other])}."
        )


def _but(problem: Problem, best: Priced, inner: int) -> str:
    """Return text on why ``best`` does not have the shape with the fastest collectives."""
    if problem.spec.parallel.tensor.shape != "auto":
        return "but the spec asks for this shape"
    shape = (best.layout.tensor.degree // inner, inner)
    other = Priced(problem, best.layout.changed({"tensor.shape": shape, "tensor.sequence_norms": False}))
    bytes_ = other.memory.total_bytes - best.memory.total_bytes
    ratio = other.step_time_s / best.step_time_s - 1.0
    memory = f"{abs(bytes_) / GIB:.2f} GiB {'more' if bytes_ > 0 else 'less'} per rank"
    return f"but the step would need {memory} and {abs(ratio):.1%} {'more' if ratio > 0 else 'less'} time"


def _tiers(problem: Problem, ranks: int, inner: int) -> str:
    """Return text on whether each axis (d1, d2) of a shape communicates inside a node or across nodes."""
    domain = problem.domain
    names = {True: "inside a node", False: "across nodes"}
    return f"d1 {names[ranks <= domain]}, d2 {names[inner <= domain]}"


def _heads(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield a sentence if several ranks hold the same key/value head, or if query heads are divided unevenly."""
    model, ranks = problem.model, layout.mesh.tp
    ranges = head_ranges(model.heads, model.heads if model.mla else model.kv_heads, ranks)
    if ranges.shared:
        yield (
            f"Keys and values: {model.kv_heads} heads on {ranks} tensor ranks; each is held by the ranks of its query "
            "heads, which sum its gradients once a step."
        )
    elif not divides(model, ranks):
        sizes = ", ".join(str(stop - start) for start, stop in ranges.queries)
        yield f"Query heads per tensor rank: {sizes}; time and memory are those of the rank that has most."


def _norms(problem: Problem, best: Priced) -> str:
    """Return a sentence on what norms on shares of the sequence cost, and how much memory they save."""
    layout = best.layout
    on_shares = layout.tensor.sequence_norms
    where = "on shares of the sequence" if on_shares else "on whole sequences"
    if problem.described is not None:
        return f"Norms {where}: transformers' layers have no other."
    other = Priced(problem, layout.changed({"tensor.sequence_norms": not on_shares}))
    bytes_ = other.memory.total_bytes - best.memory.total_bytes
    ratio = other.step_time_s / best.step_time_s - 1.0
    asked = ", as the spec asks" if problem.spec.parallel.tensor.sequence_norms != "auto" else ""
    memory = f"{abs(bytes_) / GIB:.2f} GiB {'less' if bytes_ > 0 else 'more'} per rank"
    # Relative to the other form's time, so that "less" never exceeds 100 %.
    share = 1.0 / (1.0 + ratio) - 1.0
    time = "and as fast" if abs(ratio) < _CLOSE else f"and {abs(share):.1%} {'less' if ratio > 0 else 'more'} time"
    return f"Norms {where}{asked}: {memory} {time} than the other way."


def _overlap(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield sentences on the overlap of collectives with computation."""
    texts = {
        "none": "collectives and products take turns",
        "backward": "gradients of inputs travel while those of weights are computed",
        "symmetric": "collectives are fused with products",
    }
    tensor = problem.spec.parallel.tensor
    why = "the spec asks for it" if tensor.overlap != "auto" else texts[layout.tensor.overlap]
    if layout.tensor.overlap != "none" and halves_passes(cost_job(problem, layout.compile), encode(layout)):
        why += ", but this schedule puts gradients of weights off, so backward passes have none to compute meanwhile"
    if layout.tensor.overlap == "none" and tensor.overlap == "auto":
        on_cores = problem.devices.backend == "cpu"
        why += "; both would work on the same cores" if on_cores else ", as the compiler, or halved passes, order them"
    yield f"Tensor overlap {layout.tensor.overlap}: {why}."
    if layout.tensor.chunks > 1:
        asked = "the spec asks for it" if tensor.chunks != "auto" else "one's sum travels while the next is multiplied"
        yield f"Tensor chunks {layout.tensor.chunks}: {asked}."


def _milliseconds(value_s: float) -> str:
    return f"{value_s * 1e3:.3g} ms"
