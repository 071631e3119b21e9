"""Facts about how code bases keep training state and activations; names are as in :mod:`partool.work.stacks`.

Bytes per parameter follow each project's documentation: Megatron-LM's ``theoretical_memory_usage.py`` (18 bytes, or
6 + 12/N with the distributed optimizer), DeepSpeed's ZeRO estimators, and FSDP2's sharded fp32 parameters
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). Tensors that autograd saves are counted from a
layer's operators, as Korthikanti et al. do (arXiv 2205.05198, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class MemoryStack:
    """Facts about a code base's memory."""

    name: str
    wide_weights: bool = True
    """True if the parameters that the optimizer updates are kept in fp32 (in fp64 if the precision is fp64); False if
    parameters, moments and gradients are kept in the compute type."""
    resident_copy: bool = False
    """True if a copy of the weights in the compute type stays on the device (Megatron, DeepSpeed); else all-gathers
    create it."""
    narrow_frozen: bool = False
    """True if frozen parameters are stored in the compute type, sharded with ZeRO-3 only, and whole on each rank below
    it; False if they are stored as trained ones are."""
    copies_alone: bool = False
    """True if weights are copied into the compute type even where no other rank shares them."""
    masters_in_place: bool = False
    """True if, below ZeRO-3, a rank computes with the masters themselves where it shares them with no other rank and
    they have the type of the computation; False if they are copied there, too."""
    gradient_bytes: int | None = None
    """Bytes of an accumulated gradient element; None means the bytes of a master element."""
    narrow_gradient_bytes: int = 0
    """Bytes per element of unsharded gradients in the compute type; when a backward pass has ended, these gradients are
    added to the accumulated gradients."""
    step_gradient_bytes: int = 0
    """Bytes per element of a second gradient in fp32 that exists in the optimizer step, sharded like the optimizer
    state."""
    lasting_gradients: bool = False
    """True if gradients are in buffers allocated once; False if each step's first backward pass allocates them."""
    bucket_elements: float = 0.0
    """Elements of a reduction bucket (two buckets are in flight); 0 means one bucket for the largest group of
    parameters."""
    live_elements: float = 0.0
    """With ZeRO-3, number of gathered elements above which the code base releases parameters; 0 means that two groups
    stay gathered."""
    pipeline_keeps_whole: bool = False
    """True if, with pipeline stages, parameters stay gathered and gradients accumulate unsharded until the step ends,
    whatever the ZeRO stage: gathering for each micro-batch would cost too much (torchtitan's default)."""
    host_accumulates: bool = False
    """If the optimizer is in host memory: True if gradients are sent to the host after every micro-batch, False if they
    accumulate on the device and are sent during the last backward pass."""
    narrow_beside_host: bool = False
    """If the optimizer is in host memory: True if the device stores parameters in the compute type only, so that all
    masters count as optimizer state, also those that stay on the device."""
    buckets_to_host: bool = False
    """If the optimizer is in host memory: True if gradients leave the device in buckets, in the type of their transfer,
    while the backward pass runs (:func:`partool.cost.training.host_state.waits_on_device` has the exceptions)."""
    counted_host_memory: bool = False
    """True if host memory is counted buffer by buffer (:mod:`partool.cost.training.host_state`); False if it is the
    state times a factor."""
    copies_shards_ahead: bool = False
    """If parameters are in host memory: True if shards of two groups are copied to the device before they are
    gathered."""
    wide_bf16_gradients: Literal["never", "pipeline", "always"] = "never"
    """Cases in which bf16 training accumulates unsharded gradients in fp32; the fields about gradient bytes are then
    ignored. This is always the case in Megatron-LM, and with pipeline stages in DeepSpeed (``BF16_Optimizer``)."""
    traced: bool = False
    """True if the saved tensors of dense layers are traced from the code."""
    norm_passes: float = 1.0
    """Number of fp32 tensors of the model's width that a norm keeps in addition to its input and result."""
    gate_products: int = 2
    """Number of tensors of the inner width that a gated activation keeps in addition to gate and up."""
    in_place_gates: bool = False
    """True if the gated activation writes its gradients over its inputs (Liger kernels)."""
    dropout: bool = False
    """True if masks and inputs of dropout are kept (GPT recipes); flash attention regenerates its mask."""
    expanded_keys: bool = False
    """True if keys and values are repeated to the number of query heads before attention."""
    selective: Literal["attention", "matmul", "half-matmul"] = "matmul"
    """What ``recompute: selective`` recomputes: the core of attention, everything but matrix products, or everything
    but every other matrix product."""
    recompiles: bool = False
    """True if blocks are always compiled, whatever the layout says."""
    logit_wide: float = 3.0
    """Number of fp32 tensors of the logits' size that exist at once in the loss: in an eager loss the log-softmax, the
    gradients with respect to it, and the gradients with respect to the logits."""
    logit_wide_parallel: float | None = None
    """Value of ``logit_wide`` where tensor ranks share the vocabulary (DTensor's ``loss_parallel`` fills a tensor with
    zeros, adds the exponentials and scales the sum, each in a new tensor); None means ``logit_wide``."""
    logit_chunks: int = 1
    """Number of parts in which the loss is computed."""
    logit_limit: float = 0.0
    """Maximum number of logits that the loss holds at once; 0 sets no limit."""
    logits_kept: bool = True
    """True if all logits exist in the compute type even where the loss is computed in parts."""
    keeps_boundary: bool = False
    """True if a stage keeps, for each micro-batch in flight, the tensor that it sent to the next stage (Megatron-LM
    frees this tensor since 2022)."""
    kept_outputs: int = 0
    """Number of copies of the last stage's logits that the pipeline engine keeps for each micro-batch of a step, in the
    compute type (torch.distributed.pipelining keeps the logits until the step ends, then merges them)."""
    counted_groups: bool = False
    """True if it is known which process groups the ranks open, by axis and purpose; False if only the axes are
    known."""
    traced_moments: bool = False
    """True if it is known which tensors exist at each moment of a step; False if the peak is the fullest phase."""
    one_device_evidence: bool = False
    """True if all measured runs on accelerators had one device, so that predictions of memory have at least the error
    :data:`partool.cost.evidence.MEMORY_FLOOR`."""
    fragmentation: float = 0.06
    """Allocator overhead as a share of allocated memory where a run does not state whether it uses expandable segments:
    between :data:`partool.cost.training.peak.FRAGMENTATION`'s two values."""


MEMORY_STACKS: dict[str, MemoryStack] = {
    stack.name: stack
    for stack in (
        MemoryStack(
            "partool", narrow_frozen=True, copies_alone=True, masters_in_place=True, traced=True, logit_limit=2.0**26,
            logits_kept=False, narrow_beside_host=True,
            buckets_to_host=True, counted_host_memory=True, copies_shards_ahead=True, counted_groups=True,
            traced_moments=True, one_device_evidence=True,
        ),
        MemoryStack(
            "megatron", resident_copy=True, lasting_gradients=True, norm_passes=0.0, gate_products=1,
            in_place_gates=True, selective="attention", logit_wide=2.0,
        ),
        MemoryStack(
            "megatron-2021", resident_copy=True, gradient_bytes=2, step_gradient_bytes=4, lasting_gradients=True,
            norm_passes=0.0, dropout=True, selective="attention", wide_bf16_gradients="always",
            fragmentation=0.1, keeps_boundary=True,
        ),
        MemoryStack(
            "deepspeed", resident_copy=True, gradient_bytes=2, step_gradient_bytes=4, bucket_elements=5e8,
            live_elements=1e9, host_accumulates=True, selective="attention", wide_bf16_gradients="pipeline",
            keeps_boundary=True,
        ),
        MemoryStack("fsdp1", host_accumulates=True, selective="half-matmul"),
        MemoryStack(
            "fsdp2", host_accumulates=True, selective="half-matmul", pipeline_keeps_whole=True, kept_outputs=2,
            logit_wide_parallel=4.0, keeps_boundary=True,
        ),
        MemoryStack(
            "fsdp2-compiled", host_accumulates=True, selective="half-matmul", recompiles=True,
            pipeline_keeps_whole=True, kept_outputs=2, logit_wide_parallel=4.0, keeps_boundary=True,
        ),
        MemoryStack("jax", host_accumulates=True, selective="half-matmul", keeps_boundary=True),
        MemoryStack("torchtune", host_accumulates=True, wide_weights=False, expanded_keys=True, logit_chunks=8),
        MemoryStack(
            "nanotron", resident_copy=True, narrow_gradient_bytes=2, lasting_gradients=True, norm_passes=0.0,
            selective="attention",
            keeps_boundary=True,
        ),
    )
}  # fmt: skip
"""Code bases by name."""


def memory_stack(name: str) -> MemoryStack:
    """Return the facts about a code base; in ``name``, features follow the code base's name, each after a plus sign.

    ``+fused-loss``: the loss never holds its logits, and norms and gates are fused in place (Liger kernels);
    ``+whole-loss``: the loss is not computed in parts.
    """
    base, *features = name.split("+")
    base = {"deepspeed-2021": "deepspeed", "deepspeed-pipeline": "deepspeed"}.get(base, base)
    stack = MEMORY_STACKS[base]
    if "fused-loss" in features:
        stack = replace(stack, logit_chunks=64, logits_kept=False)
        stack = replace(stack, norm_passes=0.0, gate_products=1, in_place_gates=True)
    if "whole-loss" in features:
        stack = replace(stack, logit_chunks=1)
    return stack
