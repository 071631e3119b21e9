"""Arguments of Megatron-LM that change memory or time and that a spec has no field for.

See :mod:`partool.engines.megatron_keys` for where they are from.
"""

from __future__ import annotations

from partool.diagnostics.record import Severity
from partool.engines.settings import Unpriced

_ERRORS = {
    "adds layers that predict further tokens": "mtp-num-layers",
    "mixes kinds of layers": """
    hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern hybrid-layer-pattern is-hybrid-model
    heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
    """,
    "builds layers by a specification in Python": "spec",
    "divides the model into an encoder and a decoder": "encoder-num-layers decoder-num-layers retro-add-retriever",
    "keeps tensors of some layers in host memory": """
    cpu-offloading cpu-offloading-num-layers fine-grained-activation-offloading moe-paged-stash
    """,
    "computes in 4 bits": "fp4-format fp4-param-gather",
    "divides layers over stages by a pattern": "pipeline-model-parallel-layout",
    "divides the data-parallel ranks into groups with an optimizer state each": "num-distributed-optimizer-instances",
    "reads the arguments from a file": "yaml-cfg kitchen-config-file kitchen-recipe-number",
    "alternates training and generation": "perform-rl-step",
    "trains with another model's predictions": "logits-load-dir logits-save-dir",
    "keeps parts of the model fixed, so that they have no gradients": "freeze-LM freeze-ViT freeze-all-layers",
    "cuts attention into pieces that leave the device": """
    ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-offloading
    """,
    "shortens sequences during the run": "curriculum-learning random-ltd data-efficiency-curriculum-learning",
    "changes attention": """
    csa-window-size dsa-indexer-topk experimental-attention-variant attention-output-gate hybrid-context-parallel
    """,
    "changes the experts": "moe-latent-size moe-expert-rank-capacity-factor",
    "divides weights in another way": "tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards",
    "reads types of layers from a file": "te-precision-config-file",
    "is refused by Megatron-LM since 2021": "batch-size model-parallel-size warmup",
}
_WARNINGS = {
    "changes the types of gradients or of the optimizer's state": """
    main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype megatron-fsdp-main-grads-dtype
    megatron-fsdp-main-params-dtype
    """,
    "sends gradients in 16 bits": """
    grad-reduce-in-bf16 megatron-fsdp-grad-comm-dtype ddp-reduce-scatter-with-fp32-accumulation
    """,
    "keeps and sends parameters in 8 bits": """
    fp8-param-gather keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag
    """,
    "computes some layers in 16 bits": "first-last-layers-bf16",
    "keeps the sum of layers in fp32": "fp32-residual-connection",
    "computes the loss in 16 bits": "fp16-lm-cross-entropy",
    "shares the inputs of recomputed layers among tensor ranks": "distribute-saved-activations partition-activations",
    "changes when products or transfers of a step are done": """
    overlap-moe-expert-parallel-comm delay-wgrad-compute defer-embedding-wgrad-compute combined-1f1b split-bw
    """,
    "replays recorded kernels": "enable-cuda-graph external-cuda-graph cuda-graph-impl cuda-graph-scope",
    "sends tokens to experts by other kernels": "moe-enable-deepep moe-flex-dispatcher-backend",
    "pads what experts get": "moe-pad-expert-input-to-capacity",
    "recomputes layers with experts": "moe-layer-recompute",
    "changes buffers of FSDP": """
    fsdp-double-buffer suggested-communication-unit-size enable-full-sharding-in-hsdp outer-dp-sharding-strategy
    use-megatron-fsdp-v2
    """,
    "changes the size of the batch during the run": "step-batch-size-schedule",
    "cuts a micro-batch into pieces": "mlp-chunks-for-training",
    "computes the head in 8 bits": "fp8-output-proj",
    "uses slower kernels": "deterministic-mode",
    "normalises the embeddings": "embed-layernorm",
}
_NOTES = {
    "normalises queries and keys without weights": "qk-l2-norm",
    "adds a gate to the shared expert": "moe-shared-expert-gate",
    "leaves some layers without positions": "no-rope-freq",
    "adds a number per head": "softmax-type attention-sink-k",
    "chooses how the factors of 8-bit numbers are found": "fp8-recipe",
}
_OFF = {
    "num-distributed-optimizer-instances": ("1",), "cuda-graph-impl": ("none",), "softmax-type": ("vanilla",),
    "main-grads-dtype": ("fp32",), "main-params-dtype": ("fp32",), "exp-avg-dtype": ("fp32",),
    "exp-avg-sq-dtype": ("fp32",), "fp8-recipe": ("delayed", "tensorwise"), "spec": ("local",),
    "outer-dp-sharding-strategy": ("no_shard",), "megatron-fsdp-main-grads-dtype": ("fp32", "auto"),
    "megatron-fsdp-main-params-dtype": ("fp32", "auto"), "megatron-fsdp-grad-comm-dtype": ("fp32", "auto"),
}  # fmt: skip
_TABLES: dict[Severity, dict[str, str]] = {"error": _ERRORS, "warning": _WARNINGS, "note": _NOTES}

UNPRICED: dict[str, Unpriced] = {
    name: Unpriced(text, severity, _OFF[name]) if name in _OFF else Unpriced(text, severity)
    for severity, table in _TABLES.items()
    for text, names in table.items()
    for name in names.split()
}
"""What is known, by name."""
