"""Forms of tensor parallelism: the shape of the ranks, and whether norms work on shares of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from partool.cost.case import OVERLAPS, Column, Layouts
from partool.cost.kinds import kinds
from partool.cost.repeats import codes, distinct
from partool.cost.time.layer import layer
from partool.cost.time.tensor import layer_seconds
from partool.cost.traffic.tensor import halves_passes
from partool.layout.mesh import all_have_rows
from partool.layout.tensor import head_ranges
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem, divisors
from partool.spec.model import ModelConfig

PIECES = (1, 2, 4)
"""Numbers of pieces of a micro-batch to try."""
_GAIN = 1e-3
"""Minimum share of a layer's forward time that a larger number of pieces has to save."""


class TensorForm(NamedTuple):
    """A form of tensor parallelism."""

    inner: int = 1
    """The factor d2 of d1 × d2 tensor ranks."""
    sequence_norms: int = 0
    """1 if norms and residuals work on a rank's share of the sequence, else 0."""


def forms(problem: Problem, ranks: int, sequence: int) -> tuple[TensorForm, ...]:
    """Return the forms to try for ``ranks`` tensor ranks and ``sequence`` sequence ranks.

    There are no forms if the product of the spec's shape differs from ``ranks``.

    If the spec leaves the shape ``auto``, all shapes that the model can use are tried.
    """
    tensor = problem.spec.parallel.tensor
    if ranks == 1:
        return (TensorForm(),) if tensor.shape in ("auto", [1, 1]) else ()
    if tensor.shape != "auto":
        outer, inner = tensor.shape
        if outer * inner != ranks:
            return ()
        if inner > 1:
            return (TensorForm(inner),)
    norms = (0, 1) if tensor.sequence_norms == "auto" else (int(tensor.sequence_norms),)
    if problem.mlp_tile:
        # Tiles need tokens with their whole hidden state on the rank.
        return tuple(TensorForm(1, one) for one in norms if not one and tensor.overlap != "symmetric")
    if tensor.overlap == "symmetric":
        # Fused kernels exchange even shares of the sequence only.
        even = problem.spec.training.sequence_length % (ranks * sequence) == 0
        return tuple(TensorForm(1, 1) for one in norms if one and even)
    every_form = [TensorForm(1, one) for one in norms]
    if tensor.shape == "auto" and tensor.sequence_norms is not True and sequence == 1:
        every_form += [TensorForm(inner) for inner in inner_sizes(problem, ranks)]
    return tuple(every_form)


def inner_sizes(problem: Problem, ranks: int) -> tuple[int, ...]:
    """Return the values of d2 above 1 that the model can use; they do not depend on rates of links."""
    training = problem.spec.training
    if problem.spec.parallel.tensor.patterns or training.adversarial.epsilon or training.sees_positions:
        return ()
    return tuple(inner for inner in divisors(ranks) if inner > 1 and shape_problem(problem, ranks, inner) is None)


def sent_s(problem: Problem, ranks: int, inner: int, micro_batch: int) -> float:
    """Return the seconds of a layer's forward and backward collectives in the shape (ranks / inner) × inner."""
    return float(_sent_s(problem, ranks, inner, micro_batch))


def _sent_s(problem: Problem, ranks: int, inner: Column, micro_batch: Column) -> Column:
    layouts = Layouts(tp=ranks, tensor_inner=inner, micro_batch=micro_batch)
    seconds = layer_seconds(cost_job(problem), layouts, kinds(problem.model)[0])
    return seconds.forward.total + seconds.backward.total


def shape_problem(problem: Problem, ranks: int, inner: int) -> str | None:
    """Return why the model cannot use two-dimensional tensor parallelism over (ranks / inner) × inner, else None."""
    model = problem.model
    if problem.described is not None or model.moe is not None or model.mla is not None:
        what = "experts" if model.moe is not None else "latent attention" if model.mla is not None else "transformers"
        return f"it knows partool's own dense decoder only, not {what}"
    outer = ranks // inner
    rules = (
        (f"{model.heads} heads do", model.heads, ranks, "d1 · d2"),
        (f"{model.kv_heads} heads for keys and values do", model.kv_heads, ranks, "d1 · d2"),
        (f"an inner width of {model.ffn_hidden} does", model.ffn_hidden, outer, "d1"),
        (f"a hidden size of {model.hidden} does", model.hidden, inner, "d2"),
    )
    return next((f"{what} not divide by {name} = {by}" for what, size, by, name in rules if size % by), None)


def divides(model: ModelConfig, ranks: int) -> bool:
    """Return True if the heads and all inner widths divide evenly over tensor ranks; the vocabulary is not checked."""
    widths = [width for _, width in inner_widths(model)]
    heads = model.heads % ranks == 0
    shared = model.mla is not None or model.kv_heads % ranks == 0 or ranks % model.kv_heads == 0
    return heads and shared and all(width % ranks == 0 for width in widths)


def busy(model: ModelConfig, ranks: int) -> bool:
    """Return True if every tensor rank has at least one head and a part of every inner width."""
    heads = head_ranges(model.heads, model.heads if model.mla else model.kv_heads, ranks)
    sizes = [*(width for _, width in inner_widths(model)), model.vocab]
    return heads.idle == 0 and all(all_have_rows(size, ranks) for size in sizes)


def inner_widths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield the inner widths of the feed-forward networks that tensor parallelism cuts."""
    if any(not model.is_moe_layer(layer) for layer in range(model.layers)):
        yield "an inner width", model.ffn_hidden
    for width in model.expert_widths:
        yield "an inner width of experts", width


def overlap_of(problem: Problem, groups: Layouts) -> Any:
    """Return, for each group, how collectives overlap with computation, as an index of :data:`OVERLAPS`.

    The spec sets the overlap. For ``auto``, it is ``backward`` if the device gains from overlap and backward passes are
    neither compiled nor split; products with an adapter's sum are not overlapped. Fused kernels over symmetric memory
    are used only if the spec asks for them, because their gain depends on links that the hardware tables do not
    describe.
    """
    pinned = problem.spec.parallel.tensor.overlap
    many = np.asarray(groups.tp) > 1
    if pinned != "auto":
        return np.where(many, OVERLAPS.index(pinned), 0)
    gains = cost_job(problem).stack.overlap_products > 0 and problem.model.adapter is None
    able = many & (np.asarray(groups.compiled) == 0) & (halves_passes(cost_job(problem), groups) == 0)
    return np.where(able & gains, OVERLAPS.index("backward"), 0)


def pieces_of(problem: Problem, groups: Layouts) -> Any:
    """Return each group's number of pieces per micro-batch: the spec's, or the number with the fastest forward pass."""
    pinned = problem.spec.parallel.tensor.chunks
    many = np.asarray(groups.tp) > 1
    many &= (np.asarray(groups.compiled) == 0) | (pinned != "auto")
    fused = problem.spec.parallel.tensor.overlap == "symmetric"
    alone = fused or problem.model.adapter is not None
    if pinned != "auto" or alone or cost_job(problem).stack.overlap_products == 0 or not np.any(many):
        return np.where(many, 1 if pinned == "auto" else pinned, 1)
    columns = [groups.tp, groups.tensor_inner, groups.sequence_norms, groups.micro_batch, groups.cp]
    first, where = distinct(codes(len(many), columns))
    tp, inner, norms, micro_batch, cp = (np.tile(np.asarray(one)[first], len(PIECES)) for one in columns)
    pieces = np.repeat(PIECES, len(first))
    rows = Layouts(
        tp=tp, tensor_inner=inner, sequence_norms=norms, micro_batch=micro_batch, cp=cp, tensor_chunks=pieces,
        compiled=0,
    )  # fmt: skip
    forward = layer(cost_job(problem, "none"), rows, kinds(problem.model)[0]).forward
    times = np.reshape(forward.device_s * np.ones(len(pieces)), (len(PIECES), -1))
    best = np.argmin(times * (1.0 + _GAIN * np.arange(len(PIECES)))[:, None], axis=0)
    return np.where(many, np.array(PIECES)[best][where], 1)
