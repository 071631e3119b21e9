"""Writes a plan as a configuration of DeepSpeed (0.14 to 0.19).

The reader of this configuration is :mod:`partool.engines.deepspeed`; a test reads back whatever is written here.
"""

from __future__ import annotations

from partool.engines.written import EngineTerms
from partool.plan.types import Plan

_OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "adagrad": "Adagrad"}
_ZERO = "zero_optimization"


def terms(plan: Plan) -> EngineTerms:
    """Return the keys of a configuration that makes DeepSpeed train a plan; findings about parts without a key."""
    found = EngineTerms(plan)
    layout, training = plan.layout, plan.training
    found.put("train_batch_size", training.global_batch, "training.global_batch")
    found.put("train_micro_batch_size_per_gpu", layout.micro_batch, "parallel.micro_batch")
    found.put("gradient_accumulation_steps", layout.derived.accumulation, "parallel.micro_batch")
    if training.precision in ("bf16", "fp16"):
        found.put(f"{training.precision}.enabled", True, "training.precision")
    elif training.precision != "fp32":
        found.cannot(f"DeepSpeed's configuration has no {training.precision}", "training.precision", "use bf16")
    _sharding(found)
    _offload(found)
    if layout.tensor.degree > 1:
        found.put("tensor_parallel.autotp_size", layout.tensor.degree, "parallel.tensor.degree")
    if layout.sequence.degree > 1:
        found.put("sequence_parallel_size", layout.sequence.degree, "parallel.sequence.degree")
    policies = set(layout.recompute)
    found.untold["parallel.recompute"] = layout.recompute[0] if len(policies) == 1 else list(layout.recompute)
    _optimizer(found)
    return found


def _sharding(to: EngineTerms) -> None:
    zero = to.plan.layout.data.zero
    to.state(f"{_ZERO}.stage", zero, "parallel.data.zero")
    if zero:
        to.put(f"{_ZERO}.overlap_comm", True, "parallel.data")
        to.put(f"{_ZERO}.contiguous_gradients", True, "parallel.data")
    if zero == 3:
        to.put(f"{_ZERO}.stage3_gather_16bit_weights_on_model_save", True, "parallel.data")


def _offload(to: EngineTerms) -> None:
    offload, zero = to.plan.layout.offload, to.plan.layout.data.zero
    path = "parallel.offload.optimizer"
    if offload.optimizer != "none":
        to.put(f"{_ZERO}.offload_optimizer.device", offload.optimizer, path)
        to.put(f"{_ZERO}.offload_optimizer.pin_memory", True, path)
        if offload.gpu_fraction:
            to.put(
                f"{_ZERO}.offload_optimizer.ratio",
                round(1.0 - offload.gpu_fraction, 6),
                "parallel.offload.gpu_fraction",
            )
            if zero < 3:
                way_out = "use gpu_fraction: 0, or zero: 3"
                to.cannot("DeepSpeed offloads a part of the state with ZeRO-3 only", "parallel.offload", way_out)
        if offload.optimizer == "nvme":
            to.put(f"{_ZERO}.offload_optimizer.nvme_path", offload.dir, "parallel.offload.dir")
            if zero < 3:
                to.cannot("DeepSpeed offloads to disks with ZeRO-3 only", path, "use zero: 3, or optimizer: cpu")
    if offload.parameters != "none":
        to.put(f"{_ZERO}.offload_param.device", offload.parameters, "parallel.offload.parameters")
        to.put(f"{_ZERO}.offload_param.pin_memory", True, "parallel.offload.parameters")
        if offload.parameters == "nvme":
            to.put(f"{_ZERO}.offload_param.nvme_path", offload.dir, "parallel.offload.dir")


def _optimizer(to: EngineTerms) -> None:
    optimizer, steps = to.plan.optimizer, to.plan.training.steps
    to.put("optimizer.type", _OPTIMIZERS[optimizer.name], "optimizer.name")
    to.put("optimizer.params.lr", optimizer.lr, "optimizer.lr")
    if optimizer.name in ("adamw", "lion"):
        to.put("optimizer.params.betas", list(optimizer.betas), "optimizer.betas")
    if optimizer.name in ("adamw", "adagrad"):
        to.put("optimizer.params.eps", optimizer.eps, "optimizer.eps")
    if optimizer.name == "sgd":
        to.put("optimizer.params.momentum", optimizer.momentum, "optimizer.momentum")
    to.put("optimizer.params.weight_decay", optimizer.weight_decay, "optimizer.weight_decay")
    to.put("gradient_clipping", optimizer.clip or None, "optimizer.clip")
    schedule = optimizer.schedule
    if schedule.kind == "cosine":
        to.put("scheduler.type", "WarmupCosineLR", "optimizer.schedule.kind")
        to.put("scheduler.params.total_num_steps", steps, "training.steps")
        to.state("scheduler.params.warmup_num_steps", schedule.warmup_steps, "optimizer.schedule.warmup_steps")
        to.put("scheduler.params.cos_min_ratio", schedule.min_ratio, "optimizer.schedule.min_ratio")
    elif schedule.kind == "linear":
        to.put("scheduler.type", "WarmupDecayLR", "optimizer.schedule.kind")
        to.put("scheduler.params.total_num_steps", steps, "training.steps")
        to.put("scheduler.params.warmup_max_lr", optimizer.lr, "optimizer.lr")
        to.state("scheduler.params.warmup_num_steps", schedule.warmup_steps, "optimizer.schedule.warmup_steps")
    else:
        to.put("scheduler.type", "WarmupLR", "optimizer.schedule.kind")
        to.put("scheduler.params.warmup_max_lr", optimizer.lr, "optimizer.lr")
        to.state("scheduler.params.warmup_num_steps", max(1, schedule.warmup_steps), "optimizer.schedule.warmup_steps")
