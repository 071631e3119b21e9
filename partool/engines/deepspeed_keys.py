"""Keys of DeepSpeed's configuration that are not carried into specs.

They were compared with ``deepspeed/runtime/config.py``, ``zero/config.py``, ``zero/offload_config.py``,
``precision_config.py``, ``constants.py`` and ``compile/config.py`` of DeepSpeed 0.19.8 (https://pypi.org/project/deepspeed/);
0.14 had some more sections. Keys that are carried are in :mod:`partool.engines.deepspeed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partool.diagnostics.record import Severity
from partool.engines.settings import Setting, Unpriced, is_off

_GROUPS = {
    "changes values, not sizes or operators": """
    gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op fp16.loss_scale
    fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale
    fp16.consecutive_hysteresis fp16.auto_cast bf16.immediate_grad_update bf16.check_grad_overflow
    optimizer.params. optimizer.legacy_fusion scheduler. disable_allgather zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer dataloader_drop_last data_types.keep_in_fp32_modules data_types.buffer_dtype
    managed_gradient_accumulation vocabulary_size
    """,
    "says what is logged or measured": """
    steps_per_print wall_clock_breakdown dump_state memory_breakdown log_level timers. tensorboard. wandb.
    csv_monitor. comet. monitor_config. flops_profiler. comms_logger. comms_config.
    zero_optimization.log_trace_cache_warnings
    """,
    "the constants of DeepSpeed come from runs with its defaults, and the effect of another value is not modelled": """
    zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.allgather_partitions zero_optimization.sub_group_size zero_optimization.round_robin_gradients
    zero_optimization.ignore_unused_parameters zero_optimization.use_multi_rank_bucket_allreduce
    zero_optimization.compute_grad_norm zero_optimization.memory_efficient_linear
    zero_optimization.override_module_apply zero_optimization.enable_sanity_checks
    zero_optimization.legacy_stage1 zero_optimization.parameter_alignment zero_optimization.leaf_module.
    zero_optimization.stage3_module_granularity_threshold zero_optimization.module_granularity_threshold
    zero_optimization.stage3_use_all_reduce_for_fetch_params
    zero_optimization.save_muon_momentum_buffer_in_memory zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.buffer_count
    zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.pipeline_read
    zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.cpuadam_cores_perc
    zero_optimization.offload_param.pin_memory zero_optimization.offload_param.buffer_count
    zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu aio.
    activation_checkpointing.contiguous_memory_optimization compile. disable_python_gc
    activation_checkpointing.number_checkpoints activation_checkpointing.synchronize_checkpoint_boundary
    activation_checkpointing.profile use_data_before_expert_parallelism seq_parallel_communication_data_type
    tensor_parallel.
    """,
    "checkpoints are no part of a step's price": """
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.stage3_gather_fp16_weights_on_model_save checkpoint. zero_optimization.load_from_fp32_weights
    zero_optimization.elastic_checkpoint zero_optimization.pipeline_loading_checkpoint nebula. datastates.
    """,
    "is for generation, between steps of training": "hybrid_engine.",
    "is a remark": "_comment comment",
}
"""Names by reason; a name that ends with a dot stands for all keys of a section."""

_REASONS: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}

_DEFAULTS = {
    "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_prefetch_bucket_size": 5e7,
    "stage3_model_persistence_threshold": 2**63 - 1,
}  # fmt: skip
"""Sizes of buffers; each also has a name without ``stage3_``."""
_BUFFERS = {
    f"zero_optimization.{each}": Unpriced("is another size of a buffer than DeepSpeed's own", "note", (str(size),))
    for name, size in _DEFAULTS.items()
    for each in (name, name.removeprefix("stage3_"))
}
_ERRORS = {
    "is another algorithm": """
    sparse_attention. compression_training. quantize_training. progressive_layer_drop. curriculum_learning.
    data_efficiency. eigenvalue. zero_optimization.zenflow. elasticity. weight_quantization.
    zero_optimization.mics_shard_size zero_optimization.zero_quantized_nontrainable_weights
    """,
    "changes the types of weights and of the optimizer's state": """
    bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states fp16.fp16_master_weights_and_grads
    data_types.param_dtype amp. torch_autocast. fp8.
    """,
    "sends parameters or gradients in 8 or 4 bits": """
    zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients
    """,
    "divides experts or stages by itself": "expert_parallel. pipeline.",
}
_WARNINGS = {
    "changes the type of gradients": "data_types.grad_accum_dtype communication_data_type",
    "compiles gathers into the model": "compile.deepcompile",
    "sends gradients of embeddings sparsely": "sparse_gradients",
    "updates on the host while the device computes": "zero_optimization.offload_optimizer.super_offload",
    "tries other settings before it trains": "autotuning.",
    "gathers parameters one by one": "zero_optimization.stage3_allgather_sequential",
}
_OFF = ("0", "0.0", "1", "-1", "False", "None", "none", "{}")
_TABLES: dict[Severity, dict[str, str]] = {"error": _ERRORS, "warning": _WARNINGS}

UNPRICED: dict[str, Unpriced] = _BUFFERS | {
    name: Unpriced(text, severity, _OFF)
    for severity, table in _TABLES.items()
    for text, names in table.items()
    for name in names.split()
}
"""Keys that change memory or time, by name."""


TOP = frozenset(name.partition(".")[0] for name in (*_REASONS, *UNPRICED)) - {"_comment", "comment", "pipeline"} | {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", "bfloat16", "fp16",
    "optimizer", "zero_optimization", "activation_checkpointing", "sequence_parallel_size",
}  # fmt: skip
"""Names at the top of a configuration."""


def no_effect(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the reason of each key that has no effect; sections that are switched off have none."""
    off = _switched_off(settings)
    reasons = {name: "it is switched off" for name in settings if name.startswith(off)}
    return {name: _REASONS[key] for name in settings if (key := _key(name, _REASONS)) is not None} | reasons


def unpriced(settings: Mapping[str, Setting]) -> dict[str, Unpriced]:
    """Return what is known of each key that changes the price."""
    off = _switched_off(settings)
    keys = {name: key for name in settings if (key := _key(name, UNPRICED)) is not None}
    return {name: UNPRICED[key] for name, key in keys.items() if not name.startswith(off)}


def _switched_off(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    ends = [name for name, setting in settings.items() if name.endswith(".enabled") and is_off(setting.value)]
    return tuple(name.removesuffix("enabled") for name in ends)


def _key(name: str, table: Mapping[str, Any]) -> str | None:
    """Return the entry of a table for a key: its own, or that of the section that it is in."""
    end = len(name)
    for _ in range(_DEEPEST):
        if name[:end] in table:
            return name[:end]
        end = name.rfind(".", 0, end - 1) + 1
        if not end:
            return None
    return None


_DEEPEST = 8
"""Sections within sections that a key is looked for in; DeepSpeed's own have three."""
