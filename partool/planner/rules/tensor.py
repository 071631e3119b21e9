"""Rules about tensor parallelism (uneven cuts, shapes, conflicting settings) that need the model or the machines."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from partool.diagnostics.record import Diagnostic
from partool.layout.tensor import head_ranges
from partool.planner.forms.tensor_forms import busy, divides, inner_widths, shape_problem
from partool.planner.problem import Problem, divisors, nearest
from partool.strategies.schedules import SCHEDULES

_PATH = ("parallel", "tensor")
_UNEVEN = 0.05
"""Share of the mean width; a finding is given if the widest part exceeds the mean width by more than this share."""


def uneven(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the degree gives some ranks more heads or wider parts, so that the other ranks wait."""
    tensor, model = problem.tensor_degree, problem.model
    if tensor == "auto" or divides(model, tensor) or not busy(model, tensor):
        return
    even = [n for n in divisors(model.heads) if divides(model, n) and n > 1]
    help = (
        f"{nearest(tensor, even)} would be even"
        if even
        else "no other degree divides heads and widths alike; uneven ones are planned all the same"
    )
    ranges = head_ranges(model.heads, model.heads if model.mla else model.kv_heads, tensor).queries
    most = max(stop - start for start, stop in ranges)
    if most * tensor > model.heads * (1.0 + _UNEVEN):
        source = f" (from preset {problem.spec.model.preset})" if problem.spec.model.preset else ""
        keys = f" with {model.kv_heads} of keys and values" if model.heads % tensor == 0 else ""
        message = f"{model.heads} attention heads{keys} are not even over tensor: {tensor}; the largest rank has {most}"
        label = f"the largest rank has {most} of the {model.heads} heads{source}; the others wait for it"
        yield Diagnostic("PT203", message, severity="warning", path=_PATH, label=label, help=help)
    for what, width in inner_widths(model):
        widest = -(-width // tensor)
        if widest * tensor > width * (1.0 + _UNEVEN):
            message = f"{what} of {width} is not even over tensor: {tensor}; the largest part is {widest}"
            yield Diagnostic("PT272", message, severity="warning", path=_PATH, help=help)


def shape(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the shape's product is not the degree, or its factors do not divide the model's sizes."""
    tensor, path = problem.spec.parallel.tensor, (*_PATH, "shape")
    if tensor.shape == "auto":
        return
    outer, inner = tensor.shape
    if tensor.degree != "auto" and tensor.degree != outer * inner:
        message = f"shape: [{outer}, {inner}] has {outer * inner} ranks, tensor.degree is {tensor.degree}"
        pairs = " or ".join(f"[{tensor.degree // n}, {n}]" for n in divisors(tensor.degree)[:3])
        yield Diagnostic("PT455", message, path=path, help=f"use {pairs}, or drop the degree")
        return
    why = shape_problem(problem, outer * inner, inner) if inner > 1 and problem.described is None else None
    if why is not None:
        message = f"tensor parallelism of shape: [{outer}, {inner}] cannot cut this model: {why}"
        ranks = prod(tensor.shape)
        other = [n for n in divisors(ranks) if n > 1 and shape_problem(problem, ranks, n) is None]
        pairs = ", or ".join(f"[{ranks // n}, {n}]" for n in [*other, 1][:3])
        yield Diagnostic("PT456", message, path=path, help=f"use {pairs}")


def norms(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the spec has ``sequence_norms: true`` and a shape that cuts the hidden size over ranks."""
    tensor = problem.spec.parallel.tensor
    if tensor.sequence_norms is True and tensor.shape != "auto" and tensor.shape[1] > 1:
        message = "sequence_norms: true, but two-dimensional tensor parallelism cuts the hidden size itself"
        help = f"drop it, or use shape: [{prod(tensor.shape)}, 1]"
        yield Diagnostic("PT457", message, path=(*_PATH, "sequence_norms"), help=help)


def overlap(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if ``overlap: symmetric`` is set, but devices or sequence shares do not allow this setting.

    The setting needs CUDA devices with symmetric memory, and even shares of the sequence on all tensor ranks.

    Also yield a warning if ``overlap`` or ``chunks`` has no effect because the spec compiles blocks.

    For a model that transformers builds, ``overlap: symmetric`` is reported elsewhere (PT454).
    """
    parallel, backend, path = problem.spec.parallel, problem.devices.backend, (*_PATH, "overlap")
    tensor, length, ranks = parallel.tensor, problem.spec.training.sequence_length, problem.tensor_degree
    backward = "use overlap: backward"
    symmetric = tensor.overlap == "symmetric" and problem.described is None
    if symmetric and backend != "cuda":
        message = f"overlap: symmetric needs the symmetric memory of CUDA devices; the plan is for {backend}"
        yield Diagnostic("PT458", message, path=path, help=backward)
    elif symmetric and (tensor.sequence_norms is False or (tensor.shape != "auto" and tensor.shape[1] > 1)):
        message = "overlap: symmetric exchanges shares of the sequence, which the spec rules out"
        yield Diagnostic(
            "PT458", message, path=path, help=f"use sequence_norms: true without a shape, or {backward[4:]}"
        )
    elif symmetric and ranks != "auto" and length % ranks:
        message = f"overlap: symmetric cannot share {length} tokens evenly over {ranks} tensor ranks"
        yield Diagnostic("PT458", message, path=path, help=f"use a sequence_length that divides, or {backward[4:]}")
    pieces = tensor.chunks != "auto" and tensor.chunks > 1
    if parallel.compile == "block" and (pieces or tensor.overlap in ("backward", "symmetric")):
        message = "compile: block leaves the order of collectives to the compiler: overlap and chunks have no effect"
        yield Diagnostic("PT458", message, severity="warning", path=path, help="use compile: none, or drop them")


def schedules(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if tensor parallelism is combined with a schedule that sends weights between ranks."""
    schedule, tensor = problem.spec.parallel.pipeline.schedule, problem.tensor_degree
    record = SCHEDULES.get(schedule) if isinstance(schedule, str) else None
    if record is not None and record.moves == "weights" and tensor not in ("auto", 1):
        message = f"tensor: {tensor} with schedule: {schedule}, whose ranks send each other whole weights"
        help = "use tensor: 1, or a schedule whose activations travel, such as 1f1b"
        yield Diagnostic("PT459", message, path=_PATH, help=help)


def alone(problem: Problem) -> Iterator[Diagnostic]:
    """If the spec sets one tensor rank, yield a warning for each setting that needs several tensor ranks."""
    if problem.tensor_degree == 1:
        yield from unused_settings(problem, "there is one")


def unused_settings(problem: Problem, why: str) -> Iterator[Diagnostic]:
    """Yield a warning for each setting that needs several tensor ranks; ``why`` says how many there are."""
    tensor = problem.spec.parallel.tensor
    asked = (
        ("sequence_norms", tensor.sequence_norms is True),
        ("overlap", tensor.overlap not in ("auto", "none")),
        ("chunks", tensor.chunks not in ("auto", 1)),
    )
    for name, pinned in asked:
        if pinned:
            value = str(getattr(tensor, name)).lower()
            message = f"{name}: {value} needs several tensor ranks, and {why}"
            yield Diagnostic("PT446", message, "warning", (*_PATH, name), help="drop it, or use tensor: 2 or more")


RULES = (uneven, shape, norms, overlap, schedules, alone)
