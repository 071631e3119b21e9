"""Seconds that a layer, or the head, takes for one micro-batch on one rank, forward, backward and recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from partool.catalog.silicon.experts import Sizes
from partool.cost import collective, tensor_shares
from partool.cost.case import ATTENTION, FULL, KEEP_ATTENTION, ONE_AT_THE_END, SELECTIVE, Column, Layouts, Mask, among
from partool.cost.kinds import Kind
from partool.cost.sequence import shares as sequence_shares
from partool.cost.sequence.price import exchange
from partool.cost.sequence.types import ExchangeTime
from partool.cost.silicon import experts
from partool.cost.silicon.products import TRANSPOSED, quantises, scale_s
from partool.cost.time import attention, eager
from partool.cost.time import tensor as tensor_time
from partool.cost.time.gemm import elements_s, in_tiles, matmul_s, products_s
from partool.spec.model import ModelConfig
from partool.spec.training import Fused
from partool.work.base import Workload
from partool.work.stacks import FUSED_CASTS, Stack

_STREAM_SHARE = {"cpu": 1.0, "cuda": 0.80, "rocm": 0.75}
"""Share of the memory bandwidth that element-wise kernels reach; for a CPU, the stated bandwidth is already the rate
that these kernels reach."""
_KERNEL_GAP_S = 5e-6
"""Minimum seconds of a small kernel plus the gap after it."""
_FUSED_PASSES = 1.1
"""Memory traffic of a fused kernel or a compiled block, relative to reading each input and writing each result once."""
_GROUPED_SHARE = 0.85
"""Rate of a CPU's products of experts relative to one dense product of the same size: an assumption. Devices have
measured curves (:mod:`partool.cost.silicon.experts`)."""

_ROUTED: tuple[Fused, Fused] = ("norm", "glu")
"""Parts of a block that stand for the copies of rows and for the activations of experts."""
_PERTURBATION_BYTES = 350.0
"""Bytes that are read and written per number of a perturbation: 20 operators on 8-byte integers draw it, and about as
many on float32 move it and add it (``partool_runtime/model/perturbation.py``)."""


@dataclass
class LayerPass:
    """Seconds of one pass of one layer (or of the head) over one micro-batch, by kind of work."""

    matmul_s: Column = 0.0
    attention_s: Column = 0.0
    elementwise_s: Column = 0.0
    tensor_s: Column = 0.0
    sequence_s: Column = 0.0
    expert_s: Column = 0.0
    shared: ExchangeTime = field(default_factory=ExchangeTime)
    """Parts of ``sequence_s``."""
    host_s: Column = 0.0
    """Seconds that the host needs to start the pass's operators."""
    exposed: dict[str, Column] = field(default_factory=dict)
    """Exposed seconds of tensor, sequence and expert communication, by time term."""

    def plus(self, other: LayerPass, share: float) -> LayerPass:
        """Return the pass with another one beside it in a share of the steps."""
        names = ("matmul_s", "attention_s", "elementwise_s", "tensor_s", "sequence_s", "expert_s", "host_s")
        sums = {name: getattr(self, name) + share * getattr(other, name) for name in names}
        exposed = {name: value + share * other.exposed[name] for name, value in self.exposed.items()}
        return replace(self, **sums, exposed=exposed)

    @property
    def compute_s(self) -> Column:
        """Seconds of computation on the device."""
        return self.matmul_s + self.attention_s + self.elementwise_s

    @property
    def device_s(self) -> Column:
        """Seconds of compute plus the communication that compute does not hide."""
        return self.compute_s + sum(self.exposed.values())

    def total_s(self, job: Workload) -> Column:
        """Return the seconds of a pass on the device and its host together."""
        return blended_s(job, self.device_s, self.host_s)


def blended_s(job: Workload, device_s: Column, host_s: Column) -> Column:
    """Return the longer of device and host time plus a part of the shorter; on a CPU both use the same cores.

    A host that runs far ahead hides all its work. Where the host has to wait for the device within a layer, as when
    random states are saved for recomputation, part of the shorter time is exposed too; a p-norm gives a value between
    maximum and sum.
    """
    if job.devices.backend == "cpu":
        return device_s + host_s
    power = job.stack.host_overlap
    larger = np.maximum(np.maximum(device_s, host_s), 1e-12)
    smaller = np.minimum(device_s, host_s)
    return larger * (1.0 + (smaller / larger) ** power) ** (1.0 / power)


@dataclass
class Layer:
    """Passes of a layer; ``recompute`` is the work that the backward pass recomputes under the recompute policy."""

    forward: LayerPass
    backward: LayerPass
    recompute: LayerPass


def layer(job: Workload, layouts: Layouts, kind: Kind, perturbed: float = 0.0) -> Layer:
    """Return the passes of one layer of ``kind``.

    In a share ``perturbed`` of the steps, passes without gradients of weights run once more before.
    """
    if kind.moe and job.stack.experts is not None:
        job = replace(job, stack=job.stack.experts)
    sent = tensor_time.layer_seconds(job, layouts, kind)
    forward, backward = (_pass(job, layouts, kind, sent, backward=which) for which in (False, True))
    tiled = in_tiles(job, layouts)
    # The weighted sum of experts, and tiles, read the results of their last products.
    kept = np.where(tiled, 0.0, _last_product_share(job.model)) if job.stack.stops_early and not kind.moe else 0.0
    recompute = _recompute(job, layouts, forward, sent.recompute_s, kept)
    if not kind.moe and np.any(tiled):
        # Policies that recompute everything include tiled networks; under other policies tiles add their recomputation.
        rest = 1.0 - np.where(np.asarray(layouts.recompute) >= KEEP_ATTENTION, layouts.recompute_share, 0.0)
        recompute.matmul_s = recompute.matmul_s + np.where(
            tiled, rest * job.stack.derate * products_s(job, layouts), 0.0
        )
    if perturbed:
        sent = tensor_time.layer_seconds(job, layouts, kind, weights=False)
        inputs = _pass(job, layouts, kind, sent, backward=True, weights=False)
        more = ((forward, forward), (backward, inputs), (recompute, recompute))
        return Layer(*(one.plus(other, perturbed) for one, other in more))
    return Layer(forward, backward, recompute)


def tokens(job: Workload, layouts: Layouts) -> Column:
    """Return the number of tokens of a micro-batch on one rank."""
    return layouts.micro_batch * sequence_shares.tokens(job, layouts)


def _pass(
    job: Workload,
    layouts: Layouts,
    kind: Kind,
    sent: tensor_time.TensorSeconds,
    *,
    backward: bool,
    weights: bool = True,
) -> LayerPass:
    """Return one pass of a layer; without ``weights``, a backward pass that computes no gradients of weights."""
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
        inputs, others, first = (slower * each for each in _matmul_backward_s(job, layouts, kind))
        others, first = (others, first) if weights else (0.0 * others, 0.0 * first)
        matmul, first = inputs + others, np.where(np.asarray(layouts.tensor_inner) > 1, others, first)
        tensor, exposed = sent.backward, tensor_time.exposed_backward_s(job, layouts, sent.backward, first, inputs)
    else:
        matmul, second = (slower * each for each in _matmul_s(job, layouts, kind))
        # With two dimensions, the results of all products are summed over ranks.
        second = np.where(np.asarray(layouts.tensor_inner) > 1, matmul, second)
        tensor, exposed = sent.forward, tensor_time.exposed_forward_s(job, layouts, sent.forward, second, matmul)
    shared = exchange(job, layouts, kind, backward=backward)
    operators = operators + shared.operators
    layer_pass = LayerPass(
        matmul_s=matmul,
        attention_s=derate * attention.attention_s(job, layouts, kind, backward=backward),
        elementwise_s=derate * (_elementwise_s(job, layouts, kind, backward=backward) + shared.merges)
        + operators * _gap_s(job),
        tensor_s=tensor.total,
        sequence_s=shared.total,
        shared=shared,
        expert_s=_expert_s(job, layouts) if kind.moe else 0.0,
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
    merges_s = job.stack.derate * shared.merges + shared.core_operators * _gap_s(job)
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


def _last_product_share(model: ModelConfig) -> float:
    """Return the share of a dense layer's forward products that its last product takes, by weights."""
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    return model.ffn_hidden / (heads + (2 + model.gated) * model.ffn_hidden)


class Product(NamedTuple):
    """A dense product of a layer over all tokens, on the tensor rank with the largest part of it."""

    n: Column
    """Output width."""
    k: Column
    """Input width."""
    place: Literal["first", "second", "whole", "down"]
    """``first`` or ``second`` matrix of a pair, sharded by columns or rows; ``whole``: every rank computes all of
    it; ``down``: every rank has the matrix, and multiplies the tokens that its norms work on."""
    parts: int = 1
    """Number of products of one input that it stands for."""


def products(model: ModelConfig, layouts: Layouts, moe: bool) -> list[Product]:
    """Return a layer's dense products over all tokens."""
    ranks = tensor_shares.outer(layouts)
    hidden = tensor_shares.width(model.hidden, layouts.tensor_inner)
    queries, keys = tensor_shares.heads(model, ranks)
    mla = model.mla
    if mla:
        query = queries * (mla.nope_head_dim + mla.rope_head_dim)
        layer_products: list[Product] = []
        if mla.q_rank is None:
            layer_products.append(Product(query, hidden, "first"))
        else:
            layer_products += [Product(mla.q_rank, hidden, "down"), Product(query, mla.q_rank, "first")]
        layer_products.append(Product(mla.kv_rank + mla.rope_head_dim, hidden, "down"))
        layer_products.append(Product(queries * (mla.nope_head_dim + mla.v_head_dim), mla.kv_rank, "first"))
        layer_products.append(Product(hidden, queries * mla.v_head_dim, "second"))
    else:
        query, key = queries * model.head_dim, keys * model.head_dim
        layer_products = [Product(query + 2 * key, hidden, "first", 3), Product(hidden, query, "second")]
    width = model.ffn_hidden
    if moe and model.moe:
        layer_products.append(Product(model.moe.experts, hidden, "whole"))
        width = model.moe.shared_experts * model.moe.ffn_hidden
    if width:
        inner = tensor_shares.width(width, ranks)
        gates = 1 + model.gated
        layer_products += [Product(gates * inner, hidden, "first", gates), Product(hidden, inner, "second")]
    return layer_products


def expert_sizes(job: Workload, layouts: Layouts, rows: Column) -> Sizes | None:
    """Return the experts on a rank and the rows of each; None for a model without experts."""
    model, moe = job.model, job.model.moe
    if moe is None:
        return None
    local = np.maximum(moe.experts / layouts.ep, 1.0)
    # Ranks that hold parts of the same experts all get these experts' tokens.
    each = job.load * rows * moe.top_k * layouts.etp / local
    # Experts are sharded by tensor parallelism only where no ranks are dedicated to sharing them.
    width = tensor_shares.width(moe.ffn_hidden, np.where(layouts.ep > 1, layouts.etp, tensor_shares.outer(layouts)))
    each = np.where(layouts.ep > 1, each / layouts.tp, each)
    return Sizes(each, local, model.hidden, width, model.gated)


def _experts_s(job: Workload, layouts: Layouts, rows: Column) -> tuple[Column, Column, Column]:
    """Return the seconds of a layer's experts: forward, gradients of their inputs, gradients of their weights.

    Of devices they contain the activation and the copies of rows, of a CPU the products only.
    """
    sizes = expert_sizes(job, layouts, rows)
    if sizes is None:
        return 0.0, 0.0, 0.0
    if job.devices.backend != "cpu":
        forward = experts.layer_s(job, sizes)
        return forward, 0.5 * experts.BACKWARD * forward, 0.5 * experts.BACKWARD * forward
    inputs: Column = 0.0
    weights: Column = 0.0
    forward = 0.0
    pairs = (((1 + sizes.gated) * sizes.inner, sizes.hidden), (sizes.hidden, sizes.inner))
    for n, k in pairs:
        forward = forward + matmul_s(job, sizes.each, n, k, batch=sizes.experts) / _GROUPED_SHARE
        inputs = inputs + matmul_s(job, sizes.each, k, n, batch=sizes.experts) / _GROUPED_SHARE
        weights = weights + matmul_s(job, n, k, sizes.each, batch=sizes.experts) / _GROUPED_SHARE
    return forward, inputs, weights


def _matmul_s(job: Workload, layouts: Layouts, kind: Kind) -> tuple[Column, Column]:
    """Return the seconds of all products in a layer's forward pass, and of only the second products of pairs."""
    rows, pieces = tokens(job, layouts), tensor_time.pieces_sent(layouts)
    total: Column = 0.0
    second: Column = 0.0
    for n, k, place, parts in products(job.model, layouts, kind.moe):
        if place == "second":
            each = pieces * matmul_s(job, rows / pieces, n, k)
            total, second = total + each, second + each
        else:
            local_rows = rows / _sharers(layouts, place)
            total = total + matmul_s(job, local_rows, n, k) + _read_again_s(job, layouts, parts, local_rows * k)
    if kind.moe:
        total = total + _experts_s(job, layouts, rows)[0]
    return total, second


def _read_again_s(job: Workload, layouts: Layouts, parts: int, elements: Column) -> Column:
    """Return the additional seconds of a CPU for ``parts`` products of one input, which each reads by itself.

    Backward, each writes a gradient of the input. With tensor ranks they are one product.
    """
    if parts == 1 or job.devices.product_element_s is None:
        return 0.0
    return elements_s(job, np.where(np.asarray(layouts.tp) > 1, 0, parts - 1) * elements)


def _sharers(layouts: Layouts, place: str) -> Column:
    """Return the number of tensor ranks among which the tokens of a product are divided."""
    return np.where(np.asarray(layouts.sequence_norms) == 1, layouts.tp, 1) if place == "down" else 1


def _matmul_backward_s(job: Workload, layouts: Layouts, kind: Kind) -> tuple[Column, Column, Column]:
    """Return the seconds of inputs' gradients [m, k] = [m, n] × [n, k] and weights' gradients [n, k] = [n, m] × [m, k].

    The third value is the seconds of the weight gradients of the first matrices of pairs.
    """
    rows = tokens(job, layouts)
    inputs: Column = 0.0
    weights: Column = 0.0
    first: Column = 0.0
    for n, k, place, parts in products(job.model, layouts, kind.moe):
        local_rows = rows / _sharers(layouts, place)
        read_s = _read_again_s(job, layouts, parts, local_rows * k)
        weight = TRANSPOSED * matmul_s(job, n, k, local_rows) + read_s
        inputs, weights = inputs + matmul_s(job, local_rows, k, n) + read_s, weights + weight
        first = first + (weight if place == "first" else 0.0)
    if kind.moe:
        _, of_inputs, of_weights = _experts_s(job, layouts, rows)
        inputs, weights = inputs + of_inputs, weights + of_weights
    return inputs, weights, first


def _traffic(job: Workload, part: Fused, *, backward: bool) -> float:
    """Return the memory traffic of a block's ``part``, relative to one read and write; on a CPU nothing is fused."""
    if job.devices.backend == "cpu":
        return eager.traffic(job.model, part, backward=backward)
    passes = job.stack.elementwise
    return min(passes, _FUSED_PASSES) if part in job.stack.fused else passes


def _elementwise_s(job: Workload, layouts: Layouts, kind: Kind, *, backward: bool) -> Column:
    """Return the seconds of norms, residuals, rotary positions and activations.

    Fused kernels read their inputs and write their result once: two norms and two residual sums move 10 hidden widths
    per token forward, the rotation moves queries and keys twice, the activation its inputs and result. The backward
    pass moves about 1.7 times as many bytes. Eager kernels move more (``Stack.elementwise``); on a CPU
    :func:`partool.cost.time.eager.traffic` counts both passes. Tensor ranks shard everything except the residual
    stream, which is sharded only with sequence parallelism.
    """
    model, stack, ranks = job.model, job.stack, tensor_shares.outer(layouts)
    stream = 10.0 * model.hidden / tensor_shares.stream(job, layouts)
    queries, keys = tensor_shares.heads(model, layouts.tp)
    rotated = 2.0 * (queries + keys) * model.head_dim if model.position == "rope" else 0.0
    gates = (3.0 if model.gated else 2.0) * stack.activation_passes
    inner: Column = tensor_shares.width(model.ffn_hidden, ranks)
    chosen: Column = 0.0
    if kind.moe and model.moe:
        width = tensor_shares.width(model.moe.ffn_hidden, ranks)
        inner, chosen = model.moe.shared_experts * width, model.moe.top_k * width
    parts: tuple[tuple[Column, Fused], ...] = ((stream, "norm"), (rotated, "rope"), (gates * inner, "glu"))
    moves = sum(width * _traffic(job, part, backward=backward) for width, part in parts)
    moves = moves + (_routed(job, layouts, gates * chosen, backward=backward) if kind.moe else 0.0)
    elements = moves * (1.7 if backward and job.devices.backend != "cpu" else 1.0)
    scaling: Column = 0.0
    if quantises(job):
        rows = tokens(job, layouts)
        of_inner = np.where(np.asarray(inner) > 0, scale_s(job, rows, inner), 0.0)
        scaling = 2.0 * scale_s(job, rows, model.hidden) + of_inner
    if job.precision == "fp8":
        # Inputs of products are read, scaled and written in fp8, in both orientations for the backward pass.
        casts = max(stack.fp8_casts - FUSED_CASTS, 0.0) if quantises(job) else stack.fp8_casts
        elements = elements + casts * (2.0 * model.hidden + inner)
    moved = elements * tokens(job, layouts) * job.compute_bytes
    # Gate, up projection, activation and their product are new tensors; backward, so are their gradients.
    inside = (inner + chosen) * tokens(job, layouts) * job.compute_bytes
    one = np.where(in_tiles(job, layouts) | kind.moe, 0.0, inside)
    return moved / _stream(job) + scaling + eager.mapped_s(job, one, (4.0 if model.gated else 2.0) * inside)


def _routed(job: Workload, layouts: Layouts, inner: Column, *, backward: bool) -> Column:
    """Return the elements per token that copies to and from experts, and their activations, read and write.

    Tokens are copied into the experts' order and back, weighted and summed, and on the way to other ranks once more. A
    device's experts are priced with one pass over rows and ``inner`` elements; eager code makes more.
    """
    if job.model.moe is None:
        return 0.0
    rows = job.model.moe.top_k * layouts.etp * job.model.hidden / layouts.tp
    copies, activations = (_traffic(job, part, backward=backward) for part in _ROUTED)
    if job.devices.backend == "cpu":
        return 7.0 * rows * copies + inner * activations
    sends = np.where(np.asarray(layouts.ep) > 1, 3.0 * copies, 0.0)
    return rows * (4.0 * max(copies - 1.0, 0.0) + sends) + inner * max(activations - 1.0, 0.0)


def _stream(job: Workload) -> float:
    """Return the memory rate of element-wise kernels, in bytes per second."""
    return _STREAM_SHARE[job.devices.backend] * job.devices.memory_bytes_per_s


def _gap_s(job: Workload) -> float:
    """Return the device's idle seconds between two kernels; on a CPU they are part of the host's time per operator."""
    return 0.0 if job.devices.backend == "cpu" else _KERNEL_GAP_S


def _expert_s(job: Workload, layouts: Layouts) -> Column:
    """Return the seconds to send tokens to experts and back; each token goes to all parts of ``top_k`` experts."""
    if job.model.moe is None:
        return 0.0
    rows = tokens(job, layouts) / layouts.tp
    ranks = collective.axis_group(job, layouts, "ep")
    visits = job.model.moe.top_k * layouts.etp
    token_bytes = job.load * rows * job.model.hidden * job.compute_bytes
    if job.stack.sends_once:
        return collective.token_exchange_s(job, token_bytes, ranks, visits)
    return 2.0 * collective.all_to_all_s(job, visits * token_bytes, ranks)


def head_s(job: Workload, layouts: Layouts, *, backward: bool, weights: bool = True) -> Column:
    """Return the seconds of the head and the loss for one micro-batch on the last stage.

    Without ``weights``, a backward pass computes no gradients of weights.
    """
    model, stack = job.model, job.stack
    rows = tokens(job, layouts)
    vocab = tensor_shares.width(job.padded_vocab or model.vocab, layouts.tp if stack.vocab_parallel else 1)
    product = matmul_s(job, rows, vocab, model.hidden, wide=True)
    if backward:
        recompute_s = _logits_again(stack, layouts, rows, vocab) * product
        product = recompute_s + matmul_s(job, rows, model.hidden, vocab, wide=True)
        product = product + (TRANSPOSED * matmul_s(job, vocab, model.hidden, rows, wide=True) if weights else 0.0)
    moved = rows * vocab * stack.logit_bytes / _stream(job)
    device = stack.derate * (product + 0.5 * moved + _mapped_logits_s(job, layouts, rows, vocab, backward=backward))
    device = device + stack.operators_head * _gap_s(job)
    host = stack.operators_head * job.devices.operator_s * stack.host_slowdown
    return blended_s(job, device, host)


def _mapped_logits_s(job: Workload, layouts: Layouts, rows: Column, vocab: Column, *, backward: bool) -> Column:
    """Return the additional seconds of a CPU for logits that are so many that each tensor of them is mapped anew.

    The forward pass makes float32 logits and their logarithms of probabilities, the backward pass the gradients of
    both; where logits are computed again, these are one tensor more.
    """
    tile = np.asarray(layouts.loss_tile_tokens)
    each = 4.0 * np.where(tile > 0, np.minimum(tile, rows), rows) * vocab
    made = 2.0 + (_logits_again(job.stack, layouts, rows, vocab) if backward else 0.0)
    return eager.mapped_s(job, each, 4.0 * made * rows * vocab)


def _logits_again(stack: Stack, layouts: Layouts, rows: Column, vocab: Column) -> Column:
    """Return 1 where the backward pass computes logits a second time.

    Logits are computed again if there are too many to keep, and no fused loss computes their gradients in the forward
    pass. Some pipelines rule out a fused loss, as its gradients would have to wait for other micro-batches.
    """
    if not stack.logits_again:
        return 0.0
    tile = np.asarray(layouts.loss_tile_tokens)
    recomputed = np.where(tile > 0, tile < rows, rows * vocab > stack.logits_again)
    return np.where(computes_late(layouts) | ("loss" not in stack.fused), recomputed, 0.0)


def computes_late(layouts: Layouts) -> Mask:
    """Return True where the last stage's gradients wait for other micro-batches, which rules out a fused loss."""
    waits: Mask = (np.asarray(layouts.pp) > 1) & np.logical_not(among(layouts.schedule, ONE_AT_THE_END))
    return waits


def perturbation_s(job: Workload, layouts: Layouts) -> Column:
    """Return the seconds in which a micro-batch's perturbation is drawn, moved and added to the embeddings."""
    elements = tokens(job, layouts) * job.model.hidden / tensor_shares.stream(job, layouts)
    return _PERTURBATION_BYTES * elements / _stream(job)


def embedding_s(job: Workload, layouts: Layouts, *, backward: bool) -> Column:
    """Return the first stage's seconds of looking up embeddings, or of summing gradients, for one micro-batch."""
    moved = (4.0 if backward else 2.0) * tokens(job, layouts) * job.model.hidden * job.compute_bytes
    return moved / layouts.tensor_inner / _stream(job)
