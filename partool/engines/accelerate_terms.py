"""Writes a plan as accelerate's configuration and as ``TrainingArguments`` (accelerate 1.10, transformers 4.57).

The reader is :mod:`partool.engines.accelerate`; a test reads back whatever is written here. Names that begin with
:data:`~partool.engines.accelerate_files.OF` are accelerate's own.
"""

from __future__ import annotations

from partool.engines.accelerate_files import OF
from partool.engines.written import EngineTerms
from partool.plan.types import Plan

_OPTIMIZERS = {"adamw": "adamw_torch", "lion": "lion_32bit", "sgd": "sgd", "adagrad": "adagrad"}
_SCHEDULES = {"cosine": "cosine_with_min_lr", "linear": "linear", "constant": "constant_with_warmup"}
_FSDP = OF + "fsdp_config.fsdp_"
_MESH = OF + "parallelism_config.parallelism_config_"


def terms(plan: Plan) -> EngineTerms:
    """Return the settings that make Trainer train a plan; findings about parts for which it has none."""
    engine_terms = EngineTerms(plan)
    layout, training = plan.layout, plan.training
    _machines(engine_terms)
    _sharding(engine_terms)
    _mesh(engine_terms)
    engine_terms.put("per_device_train_batch_size", layout.micro_batch, "parallel.micro_batch")
    engine_terms.put("gradient_accumulation_steps", layout.derived.accumulation, "parallel.micro_batch")
    engine_terms.put("max_length", training.sequence_length, "training.sequence_length")
    engine_terms.put("max_steps", training.steps, "training.steps")
    if training.precision in ("bf16", "fp16"):
        engine_terms.put(training.precision, True, "training.precision")
    elif training.precision != "fp32":
        engine_terms.cannot(f"Trainer does not train in {training.precision} here", "training.precision", "use bf16")
    policies = set(layout.recompute)
    engine_terms.put("gradient_checkpointing", policies == {"full"}, "parallel.recompute")
    if not (policies <= {"none"} or policies == {"full"}):
        engine_terms.cannot("Trainer recomputes all layers or none", "parallel.recompute", "use full or none")
    engine_terms.put("torch_compile", layout.compile == "block", "parallel.compile")
    engine_terms.put("seed", training.seed, "training.seed")
    engine_terms.put("full_determinism", training.deterministic, "training.deterministic")
    _optimizer(engine_terms)
    return engine_terms


def _machines(to: EngineTerms) -> None:
    devices = to.plan.devices
    to.put(OF + "compute_environment", "LOCAL_MACHINE", "hardware")
    to.put(OF + "num_machines", devices.nodes, "hardware.nodes")
    to.put(OF + "num_processes", devices.nodes * devices.per_node, "hardware.per_node")
    to.put(OF + "mixed_precision", {"bf16": "bf16", "fp16": "fp16"}.get(to.plan.training.precision, "no"),
           "training.precision")  # fmt: skip


def _sharding(to: EngineTerms) -> None:
    layout = to.plan.layout
    zero, offload = layout.data.zero, layout.offload
    to.put(OF + "distributed_type", "FSDP" if zero else "MULTI_GPU", "parallel.data.zero")
    if not zero:
        return
    to.put(_FSDP + "version", 2, "parallel.data.zero")
    to.state(_FSDP + "reshard_after_forward", zero == 3, "parallel.data.zero")
    to.put(_FSDP + "auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "parallel.data")
    to.put(_FSDP + "state_dict_type", "SHARDED_STATE_DICT", "parallel.data")
    if offload.optimizer != "none":
        to.put(_FSDP + "offload_params", True, "parallel.offload")
        if offload.parameters == "none" or offload.gpu_fraction:
            way_out = "offload parameters and the whole optimizer, or neither"
            to.cannot("FSDP offloads parameters together with the optimizer", "parallel.offload", way_out)


def _mesh(to: EngineTerms) -> None:
    layout = to.plan.layout
    mesh, sequence = layout.mesh, layout.sequence
    hybrid = layout.data.zero > 0 and mesh.dp_replicate > 1
    if not hybrid and mesh.tp * mesh.cp == 1:
        return
    sharded = layout.data.zero > 0
    if not sharded and (mesh.dp > 1 or mesh.cp > 1):
        message = "accelerate shares matrices and sequences next to sharded data-parallel ranks only"
        to.cannot(message, "parallel.data.zero", "use zero: 3")
    sizes = (
        ("dp_replicate", mesh.dp_replicate if sharded else mesh.dp), ("dp_shard", mesh.dp_shard if sharded else 1),
        ("tp", mesh.tp), ("cp", mesh.cp),
    )  # fmt: skip
    for name, size in sizes:
        path = {"tp": "parallel.tensor.degree", "cp": "parallel.sequence.degree"}.get(name, "parallel.data.shard")
        to.put(f"{_MESH}{name}_size", size, path)
    if sequence.degree > 1:
        strategy = "alltoall" if sequence.method == "ring" else "allgather"
        to.put(_MESH + "cp_comm_strategy", strategy, "parallel.sequence.method")
        if sequence.order != "zigzag":
            to.cannot("accelerate shares sequences zigzag", "parallel.sequence.order", "use order: zigzag")


def _optimizer(to: EngineTerms) -> None:
    optimizer, schedule = to.plan.optimizer, to.plan.optimizer.schedule
    if optimizer.name not in _OPTIMIZERS:
        to.cannot(f"partool's {optimizer.name} is no optimizer of Trainer", "optimizer.name", "use adamw")
    to.put("optim", _OPTIMIZERS.get(optimizer.name), "optimizer.name")
    to.put("learning_rate", optimizer.lr, "optimizer.lr")
    if optimizer.name == "adamw":
        for name, value in (("adam_beta1", optimizer.betas[0]), ("adam_beta2", optimizer.betas[1])):
            to.put(name, value, "optimizer.betas")
        to.put("adam_epsilon", optimizer.eps, "optimizer.eps")
    to.put("weight_decay", optimizer.weight_decay, "optimizer.weight_decay")
    to.put("max_grad_norm", optimizer.clip, "optimizer.clip")
    kind = _SCHEDULES.get(schedule.kind)
    if kind is None:
        to.cannot(f"Trainer's schedule {schedule.kind} needs settings of its own", "optimizer.schedule", "use cosine")
    if schedule.kind == "linear" and schedule.min_ratio:
        kind = "polynomial"  # Trainer's linear one falls to 0
    to.put("lr_scheduler_type", kind, "optimizer.schedule.kind")
    least = f'{{"lr_end": {optimizer.lr * schedule.min_ratio}, "power": 1.0}}'
    if schedule.kind == "cosine":
        least = f'{{"min_lr_rate": {schedule.min_ratio}}}'
    if kind not in ("linear", "constant_with_warmup"):
        to.put("lr_scheduler_kwargs", least, "optimizer.schedule.min_ratio")
    to.put("warmup_steps", schedule.warmup_steps or None, "optimizer.schedule.warmup_steps")
