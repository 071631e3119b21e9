"""Writes a plan as a job configuration of torchtitan (0.2.1, 0.2.2).

The reader of this configuration is :mod:`partool.engines.torchtitan_spec`; a test reads back whatever is written here.
"""

from __future__ import annotations

from partool.catalog.lookup import table
from partool.engines.torchtitan_models import FLAVOURS, Flavour
from partool.engines.written import EngineTerms
from partool.plan.types import Plan
from partool.spec.model import ModelConfig, ModelSpec

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
_ROTATIONS = {"ring": "alltoall", "all_gather": "allgather"}
_OPTIMIZERS = {"adamw": "AdamW"}
_IN = "parallelism."


def terms(plan: Plan) -> EngineTerms:
    """Return the settings that make torchtitan train a plan; findings about parts for which it has none."""
    engine_terms = EngineTerms(plan)
    _model(engine_terms)
    _training(engine_terms)
    _degrees(engine_terms)
    _pipeline(engine_terms)
    _recompute(engine_terms)
    engine_terms.put("compile.enable", plan.layout.compile == "block", "parallel.compile")
    if plan.layout.offload.optimizer != "none":
        engine_terms.put("training.enable_cpu_offload", True, "parallel.offload")
        if plan.layout.offload.parameters == "none" or plan.layout.offload.gpu_fraction:
            way_out = "offload parameters and the whole optimizer, or neither"
            engine_terms.cannot(
                "torchtitan offloads parameters together with the optimizer", "parallel.offload", way_out
            )
    _optimizer(engine_terms)
    return engine_terms


def _model(to: EngineTerms) -> None:
    given = {} if to.plan.hf else to.plan.spec.get("model", {})
    for name, sizes in FLAVOURS.items():
        for size, flavour in sizes.items():
            if _same(flavour, given, to.plan.model):
                to.put("model.name", name, "model.preset")
                to.put("model.flavor", size.upper() if size[0].isdigit() and "x" not in size else size, "model.preset")
                return
    to.cannot("torchtitan's registry has no such model", "model", "use a preset that it has, such as llama3.1-8b")


def _same(flavour: Flavour, given: dict[str, object], model: ModelConfig) -> bool:
    """Return True if a flavour is the plan's model."""
    if isinstance(flavour, str):
        fields = dict(table("models").get(flavour, {}).get("fields", {}))
        if given.get("preset") == flavour and len(given) == 1:
            return True
    else:
        fields = dict(flavour)
    sizes = ModelSpec.model_validate({name: value for name, value in fields.items() if name in ModelSpec.model_fields})
    stated = {name for name in sizes.model_fields_set if name in ModelConfig.model_fields} - {"max_position"}
    sized = stated >= {"layers", "hidden", "heads", "vocab"}
    return sized and all(getattr(sizes, name) == getattr(model, name) for name in stated)


def _training(to: EngineTerms) -> None:
    plan, training = to.plan, to.plan.training
    layout = plan.layout
    piped = layout.pipeline.stages > 1
    # A pipeline runs empty at the end of each local batch, so that a local batch is all of a rank's step.
    local = layout.micro_batch * (layout.derived.accumulation if piped else 1)
    to.put("training.local_batch_size", local, "parallel.micro_batch")
    to.put("training.global_batch_size", training.global_batch, "training.global_batch")
    to.put("training.seq_len", training.sequence_length, "training.sequence_length")
    to.put("training.steps", training.steps, "training.steps")
    # Gradients are clipped to 1 unless the file says otherwise, and there is no value for off.
    to.put("training.max_norm", plan.optimizer.clip or 1e9, "optimizer.clip")
    words = {"bf16": "bfloat16", "fp8": "bfloat16", "fp32": "float32", "fp16": "float16"}
    to.put("training.mixed_precision_param", words.get(training.precision), "training.precision")
    if training.precision in ("fp64", "fp16"):
        to.cannot(f"torchtitan does not train in {training.precision}", "training.precision", "use bf16")
    if training.precision == "fp8":
        to.put("model.converters", ["float8"], "training.precision")
    to.put("debug.seed", training.seed, "training.seed")
    to.put("debug.deterministic", training.deterministic, "training.deterministic")


def _degrees(to: EngineTerms) -> None:
    layout = to.plan.layout
    mesh, zero, sequence = layout.mesh, layout.data.zero, layout.sequence
    sharded = zero > 0
    if not sharded and sequence.degree > 1:
        to.cannot("torchtitan shards the state over ranks that share sequences", "parallel.data.zero", "use zero: 3")
    to.state(_IN + "data_parallel_replicate_degree", mesh.dp_replicate if sharded else mesh.dp, "parallel.data.shard")
    to.state(_IN + "data_parallel_shard_degree", mesh.dp_shard if sharded else 1, "parallel.data.shard")
    if sharded and mesh.dp_shard * sequence.degree > 1:
        to.put(_IN + "fsdp_reshard_after_forward", "never" if zero == 2 else "default", "parallel.data.zero")
    to.state(_IN + "tensor_parallel_degree", layout.tensor.degree, "parallel.tensor.degree")
    if layout.tensor.degree > 1:
        to.put(
            _IN + "enable_async_tensor_parallel", layout.tensor.overlap == "symmetric", "parallel.tensor.overlap"
        )  # fmt: skip
        if not layout.tensor.sequence_norms:
            message = "torchtitan's norms share the sequence among tensor ranks"
            to.cannot(message, "parallel.tensor.sequence_norms", "use sequence_norms: true")
    to.state(_IN + "context_parallel_degree", sequence.degree, "parallel.sequence.degree")
    if sequence.degree > 1:
        to.put(_IN + "context_parallel_rotate_method", _ROTATIONS.get(sequence.method), "parallel.sequence.method")
        balance = "headtail" if sequence.order == "zigzag" else "None"
        to.put(_IN + "context_parallel_load_balancer", balance, "parallel.sequence.order")
    if layout.expert_ranks > 1:
        to.put(_IN + "expert_parallel_degree", layout.expert, "parallel.expert")
        to.put(_IN + "expert_tensor_parallel_degree", layout.expert_tensor, "parallel.expert_tensor")


def _pipeline(to: EngineTerms) -> None:
    pipeline = to.plan.layout.pipeline
    to.state(_IN + "pipeline_parallel_degree", pipeline.stages, "parallel.pipeline.stages")
    if pipeline.stages == 1:
        return
    to.put(_IN + "pipeline_parallel_schedule", _SCHEDULES.get(pipeline.schedule), "parallel.pipeline.schedule")
    to.put(_IN + "pipeline_parallel_microbatch_size", to.plan.layout.micro_batch, "parallel.micro_batch")
    if len(set(pipeline.layers)) > 1:
        way_out = "use stages whose number divides the layers"
        to.cannot("stages have different numbers of layers", "parallel.pipeline.layers", way_out)
    to.put(_IN + "pipeline_parallel_layers_per_stage", pipeline.layers[0], "parallel.pipeline.chunks")
    for end in ("first", "last"):
        to.state(f"{_IN}pipeline_parallel_{end}_stage_less_layers", 0, "parallel.pipeline.layers")


def _recompute(to: EngineTerms) -> None:
    policies, path = to.plan.layout.recompute, "parallel.recompute"
    kinds = set(policies)
    if kinds == {"selective"}:
        to.put("activation_checkpoint.mode", "selective", path)
        to.put("activation_checkpoint.selective_ac_option", "op", path)
        return
    if len(kinds) == 1:
        to.put("activation_checkpoint.mode", policies[0], path)
        return
    step = policies.index("full") + 1 if "full" in kinds else 0
    if step < 2 or list(policies) != ["none" if (place + 1) % step else "full" for place in range(len(policies))]:
        to.cannot("torchtitan recomputes all layers alike, or every n-th", path, "use one policy for all layers")
        return
    to.put("activation_checkpoint.mode", "selective", path)
    to.put("activation_checkpoint.selective_ac_option", str(step), path)


def _optimizer(to: EngineTerms) -> None:
    optimizer, schedule = to.plan.optimizer, to.plan.optimizer.schedule
    if optimizer.name not in _OPTIMIZERS:
        to.cannot(f"torchtitan has no optimizer {optimizer.name}", "optimizer.name", "use adamw")
    to.put("optimizer.name", _OPTIMIZERS.get(optimizer.name), "optimizer.name")
    to.put("optimizer.lr", optimizer.lr, "optimizer.lr")
    to.put("optimizer.beta1", optimizer.betas[0], "optimizer.betas")
    to.put("optimizer.beta2", optimizer.betas[1], "optimizer.betas")
    to.put("optimizer.eps", optimizer.eps, "optimizer.eps")
    to.put("optimizer.weight_decay", optimizer.weight_decay, "optimizer.weight_decay")
    to.state("lr_scheduler.warmup_steps", schedule.warmup_steps, "optimizer.schedule.warmup_steps")
    if schedule.kind in ("cosine", "linear"):
        to.put("lr_scheduler.decay_type", schedule.kind, "optimizer.schedule.kind")
        to.put("lr_scheduler.min_lr_factor", schedule.min_ratio, "optimizer.schedule.min_ratio")
    else:
        share = 0.0 if schedule.kind == "constant" else (schedule.decay_steps or to.plan.training.steps // 5)
        ratio = share / to.plan.training.steps
        to.state("lr_scheduler.decay_ratio", round(ratio, 6), "optimizer.schedule.decay_steps")
