"""Seconds that a layer takes for one micro-batch on one rank, forward, backward and recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from partool.cost.case import ATTENTION, FULL, KEEP_ATTENTION, SELECTIVE, Column, Layouts, Mask, at_rows
from partool.cost.kinds import Kind
from partool.cost.repeats import codes, distinct
from partool.cost.sequence.price import exchange
from partool.cost.silicon.products import quantises
from partool.cost.time import adapter, attention, experts, layer_products, quantised
from partool.cost.time import tensor as tensor_time
from partool.cost.time.elementwise import elementwise_s, gap_s
from partool.cost.time.gemm import in_tiles, products_s
from partool.cost.time.layer_pass import LayerPass
from partool.work.base import Workload


@dataclass
class Layer:
    """Passes of a layer; ``recompute`` is the work that the backward pass recomputes under the recompute policy."""

    forward: LayerPass
    backward: LayerPass
    recompute: LayerPass


class BarePasses(NamedTuple):
    """What a layer's passes take whatever they recompute."""

    forward: LayerPass
    backward: LayerPass
    inputs: LayerPass | None
    """A backward pass that computes no gradients of weights; None where no steps are perturbed."""
    sent_s: Column
    """Seconds of collectives that full recomputation repeats."""

    def of_rows(self, rows: Any) -> BarePasses:
        """Return the passes at the indices ``rows`` of their columns."""
        inputs = None if self.inputs is None else self.inputs.of_rows(rows)
        return BarePasses(self.forward.of_rows(rows), self.backward.of_rows(rows), inputs, at_rows(self.sent_s, rows))


class BareCases(NamedTuple):
    """Cases of layouts that may differ in what they recompute."""

    columns: Sequence[Column | Mask]
    """Columns that the passes depend on, without those that only decide what is recomputed."""
    priced: dict[Any, BarePasses]
    """Passes of single layouts of the same job that were priced before, by kind of layer and case."""


def layer(
    job: Workload,
    layouts: Layouts,
    kind: Kind,
    perturbed: float = 0.0,
    trained: float = 1.0,
    *,
    more_forward: int = 0,
    bare: BareCases | None = None,
) -> Layer:
    """Return the passes of one layer of ``kind``.

    In a share ``perturbed`` of the steps, passes without gradients of weights run once more before. The forward pass
    includes ``more_forward`` others. ``trained`` is the
    share of the matrices whose gradients backward passes compute. With ``bare``, layouts that differ only in what they
    recompute share the prices of their passes.
    """
    job = job.of_shape(kind.shape)
    if kind.moe and job.stack.experts is not None:
        job = replace(job, stack=job.stack.experts)
    forward, backward, inputs, sent_s = _bare_passes(job, layouts, kind, _Gradients(perturbed > 0.0, trained), bare)
    tiled = in_tiles(job, layouts)
    # The weighted sum of experts, and tiles, read the results of their last products.
    kept = (
        np.where(tiled, 0.0, layer_products.last_product_share(job.model))
        if job.stack.stops_early and not kind.moe
        else 0.0
    )
    recompute = _recompute(job, layouts, forward, sent_s, kept)
    if not kind.moe and np.any(tiled):
        # Policies that recompute everything include tiled networks; under other policies tiles add their recomputation.
        rest = 1.0 - np.where(np.asarray(layouts.recompute) >= KEEP_ATTENTION, layouts.recompute_share, 0.0)
        recompute.matmul_s = recompute.matmul_s + np.where(
            tiled, rest * job.stack.derate * products_s(job, layouts), 0.0
        )
    if inputs is not None:
        more = ((forward, forward), (backward, inputs), (recompute, recompute))
        return Layer(*(one.plus(other, perturbed) for one, other in more))
    return Layer(forward.plus(forward, more_forward) if more_forward else forward, backward, recompute)


class _Gradients(NamedTuple):
    """Which gradients of matrices backward passes compute."""

    perturbed: bool
    """Whether some passes compute none."""
    trained: float
    """Share of the matrices whose gradients the other passes compute."""


def _bare_passes(
    job: Workload, layouts: Layouts, kind: Kind, gradients: _Gradients, bare: BareCases | None
) -> BarePasses:
    """Return the passes without what they recompute, each case priced once."""
    if bare is not None and not layouts.shape:
        case = kind, *(float(column) for column in bare.columns)
        if case not in bare.priced:
            bare.priced[case] = _priced(job, layouts, kind, gradients)
        return bare.priced[case]
    if bare is None or layouts.shape[0] < _FEW:
        return _priced(job, layouts, kind, gradients)
    first, where = distinct(codes(layouts.shape[0], bare.columns))
    return _priced(job, layouts.take(first), kind, gradients).of_rows(where)


_FEW = 256
"""Number of layouts from which a search for equal cases saves time."""


def _priced(job: Workload, layouts: Layouts, kind: Kind, gradients: _Gradients) -> BarePasses:
    sent, trained = tensor_time.layer_seconds(job, layouts, kind), gradients.trained
    forward, backward = (_pass(job, layouts, kind, sent, backward=which, trained=trained) for which in (False, True))
    inputs = None
    if gradients.perturbed:
        fewer = tensor_time.layer_seconds(job, layouts, kind, weights=False)
        inputs = _pass(job, layouts, kind, fewer, backward=True, trained=0.0)
    return BarePasses(forward, backward, inputs, sent.recompute_s)


def _pass(
    job: Workload,
    layouts: Layouts,
    kind: Kind,
    sent: tensor_time.TensorSeconds,
    *,
    backward: bool,
    trained: float = 1.0,
) -> LayerPass:
    """Return one pass of a layer; a backward pass computes gradients of the share ``trained`` of the matrices."""
    stack = job.stack
    operators: Column = stack.operators_backward if backward else stack.operators_forward
    passes = 2.0 if backward else 1.0
    if kind.moe:
        operators = operators + passes * stack.operators_expert
    if job.precision == "fp8":
        operators = operators + passes * stack.operators_fp8
    operators = operators + np.where(np.asarray(layouts.tp) > 1, passes * stack.tensor_operators, 0.0)
    derate = stack.derate
    # Measured eight-bit products have a scale per row.
    slower = derate * (stack.fp8_product if job.precision == "fp8" and not quantises(job) else 1.0)
    if backward:
        inputs, others, first = (slower * each for each in layer_products.backward_s(job, layouts, kind))
        others, first = trained * others, trained * first
        matmul, first = inputs + others, np.where(np.asarray(layouts.tensor_inner) > 1, others, first)
        tensor, exposed = sent.backward, tensor_time.exposed_backward_s(job, layouts, sent.backward, first, inputs)
    else:
        matmul, second = (slower * each for each in layer_products.forward_s(job, layouts, kind))
        # With two dimensions, the results of all products are summed over ranks.
        second = np.where(np.asarray(layouts.tensor_inner) > 1, matmul, second)
        tensor, exposed = sent.forward, tensor_time.exposed_forward_s(job, layouts, sent.forward, second, matmul)
    adapted = adapter.added(job, layouts, kind.moe, backward=backward)
    operators = operators + adapted.operators
    conversion = quantised.converted(job, layouts, kind.moe)
    operators = operators + conversion.operators
    shared = exchange(job, layouts, kind, backward=backward)
    operators = operators + shared.operators
    layer_pass = LayerPass(
        matmul_s=matmul + derate * adapted.matmul_s,
        attention_s=derate * attention.attention_s(job, layouts, kind, backward=backward),
        elementwise_s=derate
        * (
            elementwise_s(job, layouts, kind, backward=backward)
            + shared.merges
            + adapted.elementwise_s
            + conversion.seconds
        )
        + operators * gap_s(job),
        tensor_s=tensor.total,
        sequence_s=shared.total,
        shared=shared,
        expert_s=experts.exchange_s(job, layouts) if kind.moe else 0.0,
        host_s=operators * job.devices.operator_s * stack.host_slowdown * attention.extra_operators(job, layouts),
    )
    computed = layer_pass.matmul_s + layer_pass.attention_s + layer_pass.elementwise_s
    waits = np.where(np.asarray(layouts.tp) > 1, stack.tensor_wait_share * computed, 0.0)
    layer_pass.exposed = {
        "tensor_parallel": (1.0 - stack.overlap_tensor) * exposed + waits,
        "sequence_parallel": shared.exposed(job, layer_pass.attention_s),
        "expert_parallel": (1.0 - stack.overlap_expert) * layer_pass.expert_s,
    }
    return layer_pass


def _recompute(job: Workload, layouts: Layouts, forward: LayerPass, sent_s: Column, kept: Column) -> LayerPass:
    """Return the part of the forward pass that each layout's recompute policy repeats.

    ``sent_s`` are the seconds of collectives that full recomputation repeats; ``kept`` is the share of the products
    that no policy repeats.
    """
    policy, share = layouts.recompute, layouts.recompute_share
    core = np.where((policy == ATTENTION) | (policy == FULL), share, 0.0)
    light = np.where(policy >= SELECTIVE, share, 0.0)
    layer_share = np.where(policy >= KEEP_ATTENTION, share, 0.0)
    flash = job.stack.attention != "unfused"
    # Selective recomputation keeps the result of fused attention; without fusion it recomputes the scores.
    attends = np.where(policy == SELECTIVE, 0.0 if flash else share, core)
    matmuls = np.where(policy == SELECTIVE, job.stack.selective_matmul * share, layer_share * (1.0 - kept))
    shown: dict[str, Column] = {name: layer_share * value for name, value in forward.exposed.items()}
    # Recomputing attention sends keys again; only recomputing whole layers exchanges heads and sharded axes again.
    shared, everything = forward.shared, np.where(policy == FULL, share, 0.0)
    # Merges of received blocks are small kernels, but they belong to the core.
    merges_s = job.stack.derate * shared.merges + shared.core_operators * gap_s(job)
    traded = everything * (shared.outside - shared.hidden)
    shown["sequence_parallel"] = core * shared.exposed_core(job, forward.attention_s) + traded
    # Repeated communication is exposed in the same proportion as in the forward pass.
    shown["tensor_parallel"] = shown["tensor_parallel"] * sent_s / np.maximum(forward.tensor_s, 1e-30)
    if job.stack.selective_gathers:
        # Gathers are half of a forward pass's collectives: each pair of products gathers, then reduce-scatters.
        gathered = np.where(policy == SELECTIVE, 0.5 * share, 0.0)
        shown["tensor_parallel"] = shown["tensor_parallel"] + gathered * forward.exposed["tensor_parallel"]
    return LayerPass(
        matmul_s=matmuls * forward.matmul_s,
        attention_s=attends * forward.attention_s,
        elementwise_s=light * (forward.elementwise_s - merges_s) + core * merges_s,
        tensor_s=layer_share * sent_s,
        sequence_s=core * shared.rings + everything * shared.outside,
        expert_s=layer_share * forward.expert_s,
        host_s=job.stack.host_again
        * (0.15 * np.where(policy == 0, 0.0, share) + 0.35 * light + 0.5 * layer_share)
        * forward.host_s,
        exposed=shown,
    )
