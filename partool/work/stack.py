"""The record of facts about one code base: how fast it computes, what it fuses and what it overlaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from partool.spec.training import Fused

ExpertKernel = Literal["cutlass", "grouped_mm", "triton", "deepgemm"]
"""Kernels of grouped products of experts: groups of CUTLASS with fused copies (Megatron's GroupedGEMM, Transformer
Engine), torch's ``grouped_mm``, Triton, DeepSeek's DeepGEMM."""
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
    """Number of a layer's collectives of tensor parallelism relative to one gather and one reduce-scatter per pair of
    matrices; the embedding and the head have one each."""
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
    ``partool.work.stacks.FP8_RECIPES`` has the counts of torch's."""
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
