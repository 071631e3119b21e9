"""Writes a plan as arguments of Megatron-LM (core 0.12).

The reader of these arguments is :mod:`partool.engines.megatron`; a test reads back whatever is written here.
"""

from __future__ import annotations

from partool.engines.written import EngineTerms
from partool.plan.types import Plan
from partool.spec.experts import Moe
from partool.spec.model import ModelConfig

_EXCHANGES = {"ring": "p2p", "ulysses": "a2a", "all_gather": "all_gather"}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_POSITIONS = {"learned": "learned_absolute", "rope": "rope", "none": "none"}
_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def terms(plan: Plan) -> EngineTerms:
    """Return the arguments that make Megatron-LM train a plan; findings about parts for which it has none."""
    engine_terms = EngineTerms(plan)
    if plan.hf is not None:
        engine_terms.cannot(
            "Megatron-LM does not train a model that transformers builds", "model.hf", "write model.config"
        )
    _model(engine_terms, plan.model)
    _training(engine_terms)
    _parallel(engine_terms)
    _recompute(engine_terms)
    _optimizer(engine_terms)
    return engine_terms


def _model(to: EngineTerms, model: ModelConfig) -> None:
    for name, value in (
        ("num-layers", model.layers), ("hidden-size", model.hidden), ("ffn-hidden-size", model.ffn_hidden),
        ("num-attention-heads", model.heads), ("max-position-embeddings", model.max_position),
    ):  # fmt: skip
        to.put(name, value, f"model.{name}")
    if model.mla is None:
        to.put("kv-channels", model.head_dim, "model.head_dim")
    if model.kv_heads != model.heads and model.mla is None:
        to.put("group-query-attention", True, "model.kv_heads")
        to.put("num-query-groups", model.kv_heads, "model.kv_heads")
    to.put("padded-vocab-size", model.vocab, "model.vocab")
    to.put("normalization", _NORMS[model.norm], "model.norm")
    to.put("norm-epsilon", model.norm_eps, "model.norm_eps")
    to.put("swiglu", model.activation == "swiglu", "model.activation")
    if model.activation not in ("swiglu", "gelu"):
        to.cannot(f"no argument gives the activation {model.activation}", "model.activation", "use swiglu or gelu")
    to.put("position-embedding-type", _POSITIONS[model.position], "model.position")
    if model.position == "rope":
        theta = model.rope_theta
        to.put("rotary-base", int(theta) if float(theta).is_integer() else theta, "model.rope_theta")
    if model.rope_scaling is not None and model.mla is None:
        to.put("use-rope-scaling", model.rope_scaling.kind == "llama3", "model.rope_scaling")
        to.put("rope-scaling-factor", model.rope_scaling.factor, "model.rope_scaling")
    _biases(to, model)
    to.put("qk-layernorm", model.qk_norm, "model.qk_norm")
    to.put("untie-embeddings-and-output-weights", not model.tied_embeddings, "model.tied_embeddings")
    if set(model.layer_types) - {"full"}:
        to.cannot("layers with windows or axes of a grid have no arguments here", "model.attention", "use full ones")
    if model.sinks:
        to.cannot("sinks of attention", "model.attention.sinks", "drop sinks")
    if model.mla is not None:
        to.put("multi-latent-attention", True, "model.mla")
        for name, width in (
            ("q-lora-rank", model.mla.q_rank), ("kv-lora-rank", model.mla.kv_rank),
            ("qk-head-dim", model.mla.nope_head_dim), ("qk-pos-emb-head-dim", model.mla.rope_head_dim),
            ("v-head-dim", model.mla.v_head_dim),
        ):  # fmt: skip
            to.put(name, width, "model.mla")
    if model.moe is not None:
        _experts(to, model.moe, model.layers)
    to.put("attention-dropout", "0.0", "model")
    to.put("hidden-dropout", "0.0", "model")
    to.put("init-method-std", model.init_std, "model.init_std")


def _biases(to: EngineTerms, model: ModelConfig) -> None:
    linear = model.out_bias
    to.put("disable-bias-linear", not linear, "model.ffn_bias")
    to.put("add-qkv-bias", model.qkv_bias and not linear, "model.qkv_bias")
    if model.ffn_bias != linear or (linear and not model.qkv_bias):
        way_out = "give all of them biases, or only qkv_bias, or none"
        to.cannot("Megatron-LM has biases in all linear layers, or in queries, keys and values", "model", way_out)


def _experts(to: EngineTerms, moe: Moe, layers: int) -> None:
    to.put("num-experts", moe.experts, "model.moe.experts")
    to.put("moe-router-topk", moe.top_k, "model.moe.top_k")
    to.put("moe-ffn-hidden-size", moe.ffn_hidden, "model.moe.ffn_hidden")
    if moe.first_dense_layers and moe.every == 1:
        dense = moe.first_dense_layers
        to.put("moe-layer-freq", f"([0]*{dense}+[1]*{layers - dense})", "model.moe.first_dense_layers")
    elif moe.first_dense_layers:
        to.cannot("dense layers first, then experts in every n-th", "model.moe.every", "use every: 1")
    else:
        to.put("moe-layer-freq", moe.every if moe.every > 1 else None, "model.moe.every")
    if moe.layers:
        to.cannot("experts that differ by layer", "model.moe.layers", "drop layers: all layers of experts are alike")
    if moe.bias:
        to.cannot("biases of routers and experts", "model.moe.bias", "drop bias")
    if moe.residual:
        to.cannot("weights of shared experts against routed ones", "model.moe.residual", "drop residual")
    shared = moe.shared_experts * moe.ffn_hidden
    to.put("moe-shared-expert-intermediate-size", shared or None, "model.moe.shared_experts")
    to.put("moe-router-score-function", moe.scores, "model.moe.scores")
    to.put("moe-router-pre-softmax", moe.scores == "softmax" and not moe.normalise, "model.moe.normalise")
    if moe.groups > 1:
        to.put("moe-router-num-groups", moe.groups, "model.moe.groups")
        to.put("moe-router-group-topk", moe.top_groups, "model.moe.top_groups")
    to.put("moe-router-enable-expert-bias", moe.bias_rate is not None, "model.moe.bias_rate")
    to.put("moe-router-bias-update-rate", moe.bias_rate or None, "model.moe.bias_rate")
    if moe.scaling_factor != 1.0:
        to.put("moe-router-topk-scaling-factor", moe.scaling_factor, "model.moe.scaling_factor")
    to.put("moe-router-load-balancing-type", "aux_loss" if moe.aux_loss else "none", "model.moe.aux_loss")
    to.put("moe-aux-loss-coeff", moe.aux_loss or None, "model.moe.aux_loss")
    to.put("moe-z-loss-coeff", moe.z_loss or None, "model.moe.z_loss")
    to.put("moe-expert-capacity-factor", moe.capacity, "model.moe.capacity")
    to.put("moe-grouped-gemm", True, "model.moe")
    to.put("moe-token-dispatcher-type", "alltoall", "model.moe")


def _training(to: EngineTerms) -> None:
    training = to.plan.training
    to.put("seq-length", training.sequence_length, "training.sequence_length")
    to.put("micro-batch-size", to.plan.layout.micro_batch, "parallel.micro_batch")
    to.put("global-batch-size", training.global_batch, "training.global_batch")
    to.put("train-iters", training.steps, "training.steps")
    to.put("bf16", training.precision in ("bf16", "fp8"), "training.precision")
    to.put("fp16", training.precision == "fp16", "training.precision")
    to.put("fp8-format", "hybrid" if training.precision == "fp8" else None, "training.precision")
    if training.precision == "fp64":
        to.cannot("Megatron-LM has no fp64", "training.precision", "use fp32")
    to.put("seed", training.seed or None, "training.seed")
    if training.validation.every:
        batches = -(-training.validation.samples // training.global_batch)
        to.put("eval-interval", training.validation.every, "training.validation.every")
        to.put("eval-iters", batches, "training.validation.samples")


def _parallel(to: EngineTerms) -> None:
    layout, model = to.plan.layout, to.plan.model
    tensor = layout.tensor
    to.state("tensor-model-parallel-size", tensor.degree, "parallel.tensor.degree")
    to.put("sequence-parallel", tensor.degree > 1 and tensor.sequence_norms, "parallel.tensor.sequence_norms")
    if model.vocab % tensor.degree:
        way_out = f"use a multiple of {tensor.degree}, which pads the vocabulary"
        to.cannot(f"{model.vocab} rows do not divide over {tensor.degree} tensor ranks", "model.vocab", way_out)
    if model.moe is not None and tensor.degree > 1 and not tensor.sequence_norms:
        way_out = "use sequence_norms: true"
        to.cannot(
            "experts on tensor ranks need --sequence-parallel in Megatron-LM", "parallel.tensor.sequence_norms", way_out
        )
    pipeline = layout.pipeline
    to.state("pipeline-model-parallel-size", pipeline.stages, "parallel.pipeline.stages")
    if pipeline.chunks > 1:
        to.put("num-virtual-stages-per-pipeline-rank", pipeline.chunks, "parallel.pipeline.chunks")
    if len(set(pipeline.layers)) > 1:
        way_out = "use stages whose number divides the layers"
        to.cannot("stages have different numbers of layers", "parallel.pipeline.layers", way_out)
    if layout.sequence.degree > 1:
        to.put("context-parallel-size", layout.sequence.degree, "parallel.sequence.degree")
        to.put("cp-comm-type", _EXCHANGES.get(layout.sequence.method), "parallel.sequence.method")
        if layout.sequence.method == "ring" and layout.sequence.order != "zigzag":
            to.cannot("rings of Megatron-LM are zigzag", "parallel.sequence.order", "use order: zigzag")
    if layout.expert_ranks > 1:
        to.put("expert-model-parallel-size", layout.expert, "parallel.expert")
        to.put("expert-tensor-parallel-size", layout.expert_tensor, "parallel.expert_tensor")
    _sharding(to)


def _sharding(to: EngineTerms) -> None:
    zero, offload = to.plan.layout.data.zero, to.plan.layout.offload
    to.put("use-distributed-optimizer", zero > 0, "parallel.data.zero")
    if zero > 1:
        to.put("use-megatron-fsdp", True, "parallel.data.zero")
        to.put("data-parallel-sharding-strategy", _SHARDING[zero], "parallel.data.zero")
        to.put("no-gradient-accumulation-fusion", True, "parallel.data.zero")
        to.put("ckpt-format", "fsdp_dtensor", "parallel.data.zero")
    if offload.optimizer != "none":
        to.put("optimizer-cpu-offload", True, "parallel.offload.optimizer")
        to.put("optimizer-offload-fraction", round(1.0 - offload.gpu_fraction, 6), "parallel.offload.gpu_fraction")
        # Its checks want both, and have the second for Adam only.
        to.put("use-precision-aware-optimizer", True, "parallel.offload.optimizer")
        if to.plan.optimizer.name != "adamw":
            to.cannot("Megatron-LM offloads the state of Adam only", "parallel.offload.optimizer", "use adamw")
    to.put("overlap-grad-reduce", True, "parallel.data")
    to.put("overlap-param-gather", zero > 0, "parallel.data")


def _recompute(to: EngineTerms) -> None:
    layout, path = to.plan.layout, "parallel.recompute"
    policies = set(layout.recompute)
    if policies <= {"none"}:
        return
    if policies == {"attention"}:
        to.put("recompute-granularity", "selective", path)
        return
    to.put("recompute-granularity", "full", path)
    if policies == {"full"}:
        to.put("recompute-method", "uniform", path)
        to.put("recompute-num-layers", 1, path)
        return
    bounds = layout.pipeline.bounds if layout.pipeline.chunks == 1 else ()
    counts = {layout.recompute[start:stop].count("full") for start, stop in bounds}
    first = [layout.recompute[start : start + min(counts)] for start, _ in bounds] if len(counts) == 1 else []
    if policies != {"full", "none"} or not first or any(set(part) != {"full"} for part in first):
        way_out = "recompute all layers alike, or the first of each stage, equally many of each"
        to.cannot("Megatron-LM recomputes the first layers of every stage, or all", path, way_out)
        return
    to.put("recompute-method", "block", path)
    to.put("recompute-num-layers", min(counts), path)


def _optimizer(to: EngineTerms) -> None:
    optimizer, steps = to.plan.optimizer, to.plan.training.steps
    name = _OPTIMIZERS.get(optimizer.name)
    if name is None:
        to.cannot(f"Megatron-LM has no optimizer {optimizer.name}", "optimizer.name", "use adamw or sgd")
    to.put("optimizer", name, "optimizer.name")
    to.put("lr", optimizer.lr, "optimizer.lr")
    kind = optimizer.schedule.kind
    to.put("lr-decay-style", {"wsd": "WSD"}.get(kind, kind), "optimizer.schedule.kind")
    to.put("min-lr", optimizer.lr * optimizer.schedule.min_ratio, "optimizer.schedule.min_ratio")
    to.put("lr-warmup-iters", optimizer.schedule.warmup_steps or None, "optimizer.schedule.warmup_steps")
    if kind == "wsd":
        to.put("lr-wsd-decay-style", "linear", "optimizer.schedule.kind")
        to.put("lr-wsd-decay-iters", optimizer.schedule.decay_steps or steps // 5, "optimizer.schedule.decay_steps")
    to.put("weight-decay", optimizer.weight_decay, "optimizer.weight_decay")
    to.put("clip-grad", optimizer.clip, "optimizer.clip")
    if optimizer.name == "adamw":
        for name, value in zip(("adam-beta1", "adam-beta2"), optimizer.betas, strict=True):
            to.put(name, value, "optimizer.betas")
        to.put("adam-eps", optimizer.eps, "optimizer.eps")
    else:
        to.put("sgd-momentum", optimizer.momentum, "optimizer.momentum")
