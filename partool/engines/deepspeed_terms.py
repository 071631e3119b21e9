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
    engine_terms = EngineTerms(plan)
    layout, training = plan.layout, plan.training
    # Without an mpu, DeepSpeed divides this batch among all ranks, those that share matrices too, and refuses it.
    batch = training.global_batch if layout.tensor.degree == 1 else None
    engine_terms.put("train_batch_size", batch, "training.global_batch")
    engine_terms.put("train_micro_batch_size_per_gpu", layout.micro_batch, "parallel.micro_batch")
    engine_terms.put("gradient_accumulation_steps", layout.derived.accumulation, "parallel.micro_batch")
    if training.precision in ("bf16", "fp16"):
        engine_terms.put(f"{training.precision}.enabled", True, "training.precision")
    elif training.precision != "fp32":
        engine_terms.cannot(f"DeepSpeed's configuration has no {training.precision}", "training.precision", "use bf16")
    _sharding(engine_terms)
    _offload(engine_terms)
    if layout.tensor.degree > 1:
        engine_terms.put("tensor_parallel.autotp_size", layout.tensor.degree, "parallel.tensor.degree")
    if layout.sequence.degree > 1:
        engine_terms.put("sequence_parallel_size", layout.sequence.degree, "parallel.sequence.degree")
    policies = set(layout.recompute)
    engine_terms.untold["parallel.recompute"] = layout.recompute[0] if len(policies) == 1 else list(layout.recompute)
    _optimizer(engine_terms)
    return engine_terms


def _sharding(to: EngineTerms) -> None:
    zero = to.plan.layout.data.zero
    to.state(f"{_ZERO}.stage", zero, "parallel.data.zero")
    if zero:
        to.put(f"{_ZERO}.overlap_comm", True, "parallel.data")
        to.put(f"{_ZERO}.contiguous_gradients", True, "parallel.data")
    if zero == 3:
        persistent = to.plan.layout.data.persistent
        to.state(f"{_ZERO}.stage3_param_persistence_threshold", persistent, "parallel.data.persistent")
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
    optimizer = to.plan.optimizer
    if optimizer.name not in _OPTIMIZERS:
        to.cannot(f"partool's {optimizer.name} is no optimizer of DeepSpeed", "optimizer.name", "use adamw")
    to.put("optimizer.type", _OPTIMIZERS.get(optimizer.name), "optimizer.name")
    to.put("optimizer.params.lr", optimizer.lr, "optimizer.lr")
    if optimizer.name in ("adamw", "lion"):
        to.put("optimizer.params.betas", list(optimizer.betas), "optimizer.betas")
    if optimizer.name in ("adamw", "adagrad"):
        to.put("optimizer.params.eps", optimizer.eps, "optimizer.eps")
    if optimizer.name == "sgd":
        to.put("optimizer.params.momentum", optimizer.momentum, "optimizer.momentum")
    to.put("optimizer.params.weight_decay", optimizer.weight_decay, "optimizer.weight_decay")
    # Gradients are clipped to 1 unless the file says otherwise; 0 is off.
    to.put("gradient_clipping", float(optimizer.clip), "optimizer.clip")
    _schedule(to)


def _schedule(to: EngineTerms) -> None:
    """Add the schedule whose rates are nearest to the plan's.

    DeepSpeed's schedules move one step late, so that steps 0 and 1 have the lowest rate, and warm up for two steps at
    least. ``WarmupLR`` and ``WarmupDecayLR`` have the plan's rate once the warm-up is over, and from the fourth step;
    ``WarmupCosineLR`` once a warm-up of three steps or more is over.
    """
    path = "optimizer.schedule."
    schedule, lr, steps = to.plan.optimizer.schedule, to.plan.optimizer.lr, to.plan.training.steps
    warmup, least = schedule.warmup_steps, schedule.min_ratio
    params: dict[str, float]
    if schedule.kind == "wsd":
        to.cannot("DeepSpeed has no schedule that stays and then decays", path + "kind", "use cosine or linear")
        return
    if schedule.kind == "constant" and warmup <= 1:
        return
    if schedule.kind == "cosine":
        name, length, total = "WarmupCosineLR", max(1, warmup - 1), steps - 1
        params = {"cos_min_ratio": least, "warmup_min_ratio": 1 / max(1, warmup)}
    else:
        length, total = max(2, warmup - 2), steps - 2
        if schedule.kind == "linear":
            name, lowest = "WarmupDecayLR", least
            highest = 1 - (1 - least) * (length + 2 - warmup) / max(1, steps - warmup)
        else:
            name, lowest, highest = "WarmupLR", 2 / warmup, 1.0
        params = {"warmup_min_lr": lr * lowest, "warmup_max_lr": lr * max(lowest, highest)}
    to.put("scheduler.type", name, path + "kind")
    if schedule.kind != "constant":
        to.put("scheduler.params.total_num_steps", max(1, total), "training.steps")
    to.put("scheduler.params.warmup_num_steps", length, path + "warmup_steps")
    to.put("scheduler.params.warmup_type", "linear", path + "kind")
    for key, value in params.items():
        to.state(f"scheduler.params.{key}", value, path + ("warmup_steps" if key[:3] == "war" else "min_ratio"))
