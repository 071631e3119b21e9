"""Code bases: one record (:class:`partool.work.stack.Stack`) for each, and the changes that recipes make to them.

The planner prices partool's runtime. The other code bases serve to replay published runs, and to compare plans. The
memory of each code base is described in :mod:`partool.cost.memory.stacks`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from partool.spec.training import Fused
from partool.strategies.engines import ENGINES
from partool.work.stack import Stack


@dataclass(frozen=True)
class Fp8Recipe:
    """How eight-bit training finds scales and casts (torchao's ``float8`` and ``mx_formats``, Transformer Engine)."""

    casts: float
    """:attr:`Stack.fp8_casts` of compiled blocks."""
    product: float
    """:attr:`Stack.fp8_product`."""
    tensor_gathers: bool
    """:attr:`Stack.fp8_tensor_gathers`."""
    kernel: Literal["scaled_mm", "block"] = "scaled_mm"
    """:attr:`Stack.fp8_kernel`."""


FP8_RECIPES: dict[str, Fp8Recipe] = {
    "tensorwise": Fp8Recipe(3.75, 1.0, tensor_gathers=True),
    "rowwise": Fp8Recipe(7.5, 1.25, tensor_gathers=False),
    "mx": Fp8Recipe(4.8, 1.0, tensor_gathers=False),
    "blockwise": Fp8Recipe(4.8, 1.0, tensor_gathers=False, kernel="block"),
}
"""Recipes of eight-bit training, by the shape of what shares a scale.

Counts are of a Llama layer, whose inner width is 3.5 hidden widths: inputs of its products are 6.5 hidden widths,
gradients of their results 10, and the unit (two hidden widths and one inner) 5.5. A cast with one scale per tensor
reads a tensor for its largest value, reads it again and writes half as many bytes, 2.5 reads and writes, once for each
tensor. Scales per row need a second cast, of the transposed tensor, for products that sum over the other dimension;
blocks of 32 elements (MX) or of 128 (``blockwise``: DeepSeek-V3, arXiv 2412.19437, section 3.3, and
``Float8BlockScaling`` of Transformer Engine) are cast twice, too, but in a single read. ``float8`` gathers inputs of
tensor ranks in eight bits with one scale per tensor only
(https://github.com/pytorch/torchtitan/blob/main/docs/float8.md). The product with a scale per row takes 1.25 times as
long on an H100: fitted to four runs of torchtitan with eight tensor ranks
(benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md), which gain nothing from it over bf16."""
_EAGER_CASTS = 7.0
"""Reads and writes of a cast in eager mode relative to a compiled one: absolute value, maximum, conversion to float32,
product with the scale, clamp and conversion are kernels of their own, and move 17.5 elements instead of 2.5."""

PARTOOL = Stack(
    "partool", sequence_parallel=None, elementwise=1.1, derate=1.1, logit_bytes=20.0, logits_again=2.0**26,
    overlap_products=0.8, stops_early=True, folded_experts=True, staged_offload=True, compile_varies=True,
    ring_merge_bytes=30.0, ring_gradient_bytes=10.0, tensor_copies=1.0, copies_several=True, expert_kernel="triton",
)  # fmt: skip
"""partool's runtime with compiled blocks. On single GPUs, steps of dense models were predicted from 29 % too long to
6 % too short (docs/results/gpu.md); no run had several GPUs. Apart from attention, its figures are those of the nearest
code base that was measured at scale, FSDP2 with compiled blocks (``fsdp2-compiled``)."""
PARTOOL_EAGER = replace(
    PARTOOL, elementwise=1.7, operators_forward=45.0, operators_backward=95.0, derate=1.15,
    host_slowdown=3.5, host_again=4.5, operators_fp8=50.0,
)  # fmt: skip
"""partool's runtime without compilation.

Host times are fitted to steps that the host limits, on two machines whose hosts take 10 to 20 µs per operator (experts,
recomputation and fp8 in docs/results/gpu.md): kernels called from Python, hooks of FSDP2, and checkpoints that look at
each operator."""
PARTOOL_CPU = replace(
    PARTOOL_EAGER,
    derate=1.0,
    host_slowdown=1.0,
    host_again=1.0,
    overlap_gradients=0.0,
    overlap_gathers=0.0,
    overlap_products=0.0,
    overlap_blocks=0.0,
    ring_merge_bytes=0.0,
    ring_gradient_bytes=0.0,
    tensor_copies=0.0,
    contention=1.0,
    wait_share=0.12,
    overlapped_wait_share=0.03,
    tensor_wait_share=0.08,
    overhead_s=4e-3,
)
"""partool's runtime on CPU ranks, not compiled.

Wait shares were measured with the merges of a ring's blocks and the copies of tensor parallelism in them.

Gloo runs on the cores that compute (checked on two cores of a 2.3 GHz Xeon).

The wait shares of data and tensor ranks cover time beyond transfers, measured in one report each (``partool launch``,
two cores of an AMD EPYC) for the spec of ``tests/bench/data_parallel.py``: exchanges took 87 ms with ZeRO-1 and 331 ms
with two tensor ranks, in addition to passes of 1.5 s. Transfers in flight during compute take time from the same cores,
so they are priced as exposed.
"""


_SPARED: dict[Fused, int] = {"norm": 5, "rope": 2, "glu": -4}
"""Operators that fused kernels save the host in a layer's forward pass; its backward pass saves twice as many. RMSNorm
is 8 operators of the eager decoder, the rotation 7 each for queries and keys, sums and gates 1. A fused call takes
the host as long as six operators: four were measured on a CPU (docs/results/kernels.md), and two are added because
Triton starts kernels more slowly than torch."""
_FUSED_LOGIT_BYTES = 12.0
"""Bytes of traffic per 2-byte logit: written by the product, read twice, overwritten with its gradient, read twice."""


def own_stack(backend: str, compile: str, fused: tuple[Fused, ...] = ()) -> Stack:
    """Return the facts about partool's runtime on ``backend`` if it compiles as ``compile`` says and fuses ``fused``.

    On the CPU, torch operators compute the parts that are fused elsewhere.
    """
    if backend == "cpu":
        return replace(PARTOOL_CPU, fused=fused)
    spared = sum(_SPARED.get(part, 0) for part in fused)
    logit_bytes = _FUSED_LOGIT_BYTES if "loss" in fused else PARTOOL.logit_bytes
    eager = replace(
        PARTOOL_EAGER,
        fused=fused,
        operators_forward=PARTOOL_EAGER.operators_forward - spared,
        operators_backward=PARTOOL_EAGER.operators_backward - 2 * spared,
        logit_bytes=logit_bytes,
    )
    compiled = replace(PARTOOL, fused=fused, logit_bytes=logit_bytes, experts=eager)
    return compiled if compile == "block" else eager


def gathering_alone(stack: Stack) -> Stack:
    """Return the facts of a torch code base in which each projection gathers its input itself.

    Without a common ``PrepareModuleInput`` (torchtitan has one), queries, keys and values gather their input three
    times and reduce its gradient three times, gate and up projection twice. A gated layer has 14 collectives instead of
    8; without sharded norms it has 7 all-reduces instead of 4. Gradients are summed once they are scattered, so that
    one copy is left for each collective.
    """
    return replace(stack, tensor_exchanges=1.75, tensor_copies=1.0)


def scaled_by(stack: Stack, recipe: str) -> Stack:
    """Return the facts of a code base that scales eight-bit products by a recipe of :data:`FP8_RECIPES`."""
    record, usual = FP8_RECIPES[recipe], FP8_RECIPES["tensorwise"]
    casts = stack.fp8_casts * record.casts / usual.casts
    return replace(
        stack,
        fp8_casts=casts,
        fp8_product=record.product,
        fp8_tensor_gathers=record.tensor_gathers,
        fp8_kernel=record.kernel,
    )


def sending_once(stack: Stack) -> Stack:
    """Return the facts of a code base that sends a token once to each node, in all of its layers."""
    experts = None if stack.experts is None else replace(stack.experts, sends_once=True)
    return replace(stack, sends_once=True, experts=experts)


STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        PARTOOL,
        Stack(
            "megatron", family="megatron", product_kernel="transformer-engine", expert_kernel="cutlass",
            overlap_tensor=0.65, folded_experts=True, pipeline_keeps_whole=True, logit_bytes=50.0, overhead_s=10e-3,
        ),
        Stack(
            "megatron-2021", family="megatron",
            sequence_parallel=False, attention="unfused", overlap_gradients=0.0, gradient_bytes=2.0,
            operators_forward=28.0, operators_backward=50.0, operators_head=40.0, host_slowdown=4.3, host_overlap=4.0,
            elementwise=1.35,
        ),
        Stack(
            "deepspeed", family="deepspeed",
            elementwise=1.6, operators_forward=45.0, operators_backward=80.0, derate=1.15,
            gradient_bytes=2.0, attention="flash2", host_share=0.12,
        ),
        Stack(
            "deepspeed-pipeline", family="deepspeed",
            elementwise=1.6, operators_forward=45.0, operators_backward=80.0, derate=1.15,
            attention="flash2", overlap_gradients=0.0, pipeline_keeps_whole=True, overhead_s=10e-3,
        ),
        Stack(
            "deepspeed-2021", family="deepspeed",
            sequence_parallel=False, elementwise=1.6, operators_forward=45.0, operators_backward=80.0,
            derate=1.15, gradient_bytes=2.0, attention="unfused", host_share=0.6, collectives_per_layer=12.0,
            overlap_gradients=0.0, overlap_gathers=0.0,
        ),
        Stack(
            "fsdp1", elementwise=1.6, operators_forward=35.0, operators_backward=60.0, derate=1.14,
            attention="flash1", gradient_bytes=2.0, logit_bytes=30.0,
        ),
        Stack(
            "fsdp2", ring_merge_bytes=34.0, ring_gradient_bytes=10.0,
            elementwise=1.7, operators_forward=40.0, operators_backward=70.0, derate=1.15,
            selective_matmul=0.5, attention="flash2", ring_balanced=False, pipeline_keeps_whole=True, logit_bytes=30.0,
            tensor_copies=1.6, tensor_operators=80.0, operators_expert=48.0, selective_gathers=True,
            fp8_casts=_EAGER_CASTS * FP8_RECIPES["tensorwise"].casts, fp8_tensor_gathers=True, operators_fp8=140.0,
        ),
        Stack(
            "fsdp2-compiled", ring_merge_bytes=34.0, ring_gradient_bytes=10.0,
            elementwise=1.1, derate=1.08, selective_matmul=0.5, attention="flash2",
            ring_balanced=False, pipeline_keeps_whole=True, logit_bytes=20.0, tensor_copies=1.2,
            selective_gathers=True, stops_early=True, fp8_casts=FP8_RECIPES["tensorwise"].casts,
            fp8_tensor_gathers=True,
        ),
        Stack(
            "jax", family="jax",
            elementwise=1.1, derate=1.08, ring_balanced=False, logit_bytes=20.0, operators_forward=8.0,
            operators_backward=15.0,
        ),
        Stack("torchtune", elementwise=1.2, derate=1.1, attention="flash2"),
        Stack(
            "nanotron", elementwise=1.4, overlap_gradients=0.0, operators_forward=35.0, operators_backward=60.0,
            attention="flash2",
        ),
    )
}  # fmt: skip
"""Code bases by name."""


def stack_of(engine: str, backend: str, compile: str, fused: tuple[Fused, ...] = ()) -> Stack:
    """Return the constants of an engine (:data:`partool.strategies.engines.ENGINES`); the others are of partool's only.

    In other engines each layout says whether norms are shared among tensor ranks.
    """
    record = ENGINES[engine]
    name = record.compiled if record.compiled is not None and compile == "block" else record.stack
    return own_stack(backend, compile, fused) if name is None else replace(STACKS[name], sequence_parallel=None)
