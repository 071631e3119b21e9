"""Facts about code bases: how fast each code base computes, what it fuses and what it overlaps.

The planner prices partool's runtime. The other code bases serve to replay published runs, and to compare plans. The
memory of each code base is described in :mod:`partool.cost.memory.stacks`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from partool.spec.training import Fused
from partool.strategies.engines import ENGINES

ExpertKernel = Literal["cutlass", "grouped_mm", "triton", "deepgemm"]
"""Kernels of grouped products of experts: groups of CUTLASS with fused copies (Megatron's GroupedGEMM, Transformer
Engine), torch's ``grouped_mm``, Triton, DeepSeek's DeepGEMM."""


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


FUSED_CASTS = 1.5
""":attr:`Stack.fp8_casts` of casts that are fused with the kernels before them; measured products contain these."""


@dataclass(frozen=True)
class Stack:
    """Facts about a code base."""

    name: str
    family: Literal["torch", "megatron", "deepspeed", "jax"] = "torch"
    """Kind of code base; errors of predictions are counted by family (:mod:`partool.cost.evidence`)."""
    sequence_parallel: bool | None = True
    """True if norms, dropout and residuals are sharded over tensor ranks; None means that each layout decides."""
    product_kernel: Literal["linear", "transformer-engine"] = "linear"
    """Code that calls matrix products: torch's linear layers, or those of Transformer Engine."""
    fp8_kernel: Literal["scaled_mm", "block"] = "scaled_mm"
    """Scales of fp8 products: one per tensor or row (``torch._scaled_mm``, Transformer Engine), or one per block of 128
    (DeepGEMM)."""
    attention: Literal["unfused", "flash1", "flash2", "flash3"] = "flash3"
    """Generation of the attention kernels; flash3 stands for the best generation that a device has."""
    ring_balanced: bool = True
    """True if each rank of a ring has an early and a late part of the sequence (zigzag); partool follows each
    layout."""
    overlap_blocks: float = 0.9
    """Share of one block's attention time that can hide the transfer of the next block in a ring."""
    ring_merge_bytes: float = 10.0
    """Bytes per element of attention's result that a ring moves forward to merge what each received block of keys adds:
    10 where a fused kernel reads the block's result and the float32 sum and writes the sum (Transformer Engine's
    ``flash_attn_fwd_out_correction``); 30 to 34 where a difference, a product and a sum are kernels of their own
    (torch's ``_SDPAMerger``, partool's ``Attending.merge``)."""
    ring_gradient_bytes: float = 6.0
    """Bytes per element that a ring moves backward to add each block's gradient of the queries: 6 in 16-bit sums, 10 in
    float32."""
    elementwise: float = 1.0
    """Memory traffic of norms, residuals and activations relative to fused kernels: 1.6 to 1.8 in eager mode."""
    fused: tuple[Fused, ...] = ()
    """Parts of a block, or the loss, that partool's kernels compute; ``elementwise`` applies to the other parts."""
    activation_passes: float = 1.0
    logit_bytes: float = 16.0
    """Bytes of memory traffic per logit of the loss, over both passes."""
    logits_again: float = 0.0
    """Maximum number of logits that a rank keeps; 0 sets no maximum. Backward passes recompute the logits if their
    number is larger, and always if the loss is computed in tiles."""
    vocab_parallel: bool = True
    """True if the head is sharded over tensor ranks."""
    selective_matmul: float = 0.0
    """Share of the matrix products that selective recomputation runs again."""
    selective_gathers: bool = False
    """True if selective recomputation gathers the inputs of tensor-parallel products again."""
    stops_early: bool = False
    """True if full recomputation of a layer ends before its last product and sum, which no backward pass reads."""
    gradient_bytes: float = 4.0
    """Bytes sent per gradient element."""
    gather_bytes: float = 2.0
    """Bytes sent per parameter element."""
    overlap_gradients: float = 0.8
    """Share of the last micro-batch's backward pass that can hide gradient reduction."""
    overlap_gathers: float = 0.8
    """Share of compute that can hide parameter gathers."""
    pipeline_keeps_whole: bool = False
    """True if, with pipeline stages, parameters are gathered and gradients reduced once per step, whatever the ZeRO
    stage."""
    collectives_per_layer: float = 1.0
    """Number of gathers and reductions per layer; old code sends each parameter separately."""
    overlap_tensor: float = 0.0
    """Share of tensor parallelism's collectives that compute hides, whatever a layout says."""
    overlap_products: float = 0.0
    """Share of a matrix product that can hide a collective of tensor parallelism running at the same time."""
    tensor_copies: float = 0.0
    """Reads and writes of the whole tensor beside each all-gather and reduce-scatter of tensor parallelism, on average.

    DTensor shards along the sequence, which is not the leading dimension: a gathered tensor is split and concatenated
    into its order, and so is a tensor before it is reduced and scattered, one copy each
    (``all_gather_single`` and ``reduce_scatter_single`` in ``torch/distributed/_functional_collectives.py``). Queries,
    keys and values are separate products, as are gate and up projection: backward, each of them writes a gradient of
    the whole input, and the gradients are added before the reduce-scatter. A sum reads two tensors and writes one, so
    three sums are 4.5 copies. In eager mode a layer has 8 + 4.5 copies at its 8 collectives. A compiled backward pass
    adds all gradients of an input and orders the sum in one kernel, 3.5 copies in the place of 6.5."""
    copies_several: bool = False
    """True if ``tensor_copies`` apply only where gathers and reduce-scatters move several sequences: the parts of one
    sequence are in their order as they come."""
    tensor_exchanges: float = 1.0
    """Number of tensor parallelism's collectives relative to one gather and one reduce-scatter per pair of matrices."""
    tensor_operators: float = 0.0
    """Host time that tensor parallelism adds to a layer's forward pass, in operators: DTensor's dispatch of each
    product, norm and collective in eager mode. A backward pass takes twice as many."""
    operators_expert: float = 32.0
    """Operators that experts add to a layer's forward pass: router, top-k, load-balancing loss, counts, permutation,
    sends, grouped products and the weighted sum. A backward pass has twice as many."""
    expert_kernel: ExpertKernel = "grouped_mm"
    """Kernel of the grouped products of experts (:mod:`partool.cost.silicon.experts`)."""
    overlap_expert: float = 0.0
    """Share that compute hides of the time to send tokens to experts and back."""
    sends_once: bool = False
    """True if a token is sent once to a node with several of its experts (DeepEP,
    https://github.com/deepseek-ai/DeepEP)."""
    folded_experts: bool = False
    """True if tensor ranks take part in expert parallelism, each with whole experts (Megatron's parallel folding, arXiv
    2504.14960)."""
    contention: float = 1.08
    """Slowdown of compute while collectives run at the same time."""
    operators_forward: float = 16.0
    """Number of kernels that the host starts in one layer's forward pass."""
    operators_backward: float = 30.0
    host_slowdown: float = 1.0
    """Ratio of host time per operator to the machine's figure."""
    operators_fp8: float = 0.0
    """Operators that eight-bit products add to a layer's forward pass; a backward pass has twice as many. In eager mode
    torchao calls ten per cast, and casts input and weight of seven products."""
    fp8_casts: float = FUSED_CASTS
    """Reads and writes in the compute type, per pass and per element of two hidden widths and one inner width, to find
    scales and to cast. The default stands for casts that are fused with the kernels before them (Transformer Engine);
    :data:`FP8_RECIPES` has the counts of torch's."""
    fp8_product: float = 1.0
    """Time of an eight-bit product relative to the same product with one scale per tensor."""
    fp8_tensor_gathers: bool = False
    """True if all-gathers of tensor parallelism send eight-bit elements under fp8."""
    host_again: float = 1.0
    """Ratio of the host's time to recompute operators to its time for the same operators in the forward pass."""
    operators_head: float = 8.0
    """Number of kernels of the head and the loss, per pass."""
    wait_share: float = 0.0
    """Seconds, per second of passes, that a rank waits at collectives and transfers for ranks on the same cores."""
    overlapped_wait_share: float = 0.0
    """``wait_share`` for data parallelism where collectives are in flight while the next unit computes."""
    tensor_wait_share: float = 0.0
    """``wait_share`` for tensor parallelism, which has several collectives in each layer."""
    host_overlap: float = 8.0
    """Exponent that joins host and device time: 1 adds both times, large values take the longer time."""
    optimizer_bytes: float = 28.0
    """Bytes of memory traffic per parameter of the gradient norm, clipping and the update together."""
    staged_offload: bool = False
    """True if the transfers and passes of an optimizer in host memory are known and priced one by one
    (:func:`partool.cost.training.offload.chain`): over a slow link they cost at least what the device's update costs.
    False if published times are used, which may hide the update completely."""
    host_share: float = 0.5
    """Share of the host's memory bandwidth that the optimizer on the host reaches, counting its waits; for partool this
    is an assumption."""
    overhead_s: float = 1e-3
    """Seconds per step for logging, data and checks."""
    compile_varies: bool = False
    """True if blocks are compiled or not by a setting, and both have this name; False if other names stand for compiled
    blocks, as ``fsdp2-compiled`` does."""
    derate: float = 1.0
    """Slowdown of all device work relative to well-tuned kernels."""
    experts: Stack | None = None
    """Facts about layers with experts, if only the other layers are compiled; None if all layers are alike."""


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
