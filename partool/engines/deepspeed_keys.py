"""Keys of DeepSpeed's configuration that do not change memory or time per step, as far as these are modelled.

https://www.deepspeed.ai/docs/config-json/ (0.14 to 0.19). Keys that are carried are in
:mod:`partool.engines.deepspeed`.
"""

from __future__ import annotations

_GROUPS = {
    "changes values, not sizes or operators": """
    gradient_clipping prescale_gradients gradient_predivide_factor fp16.loss_scale fp16.initial_scale_power
    fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale fp16.consecutive_hysteresis fp16.auto_cast
    optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay
    optimizer.params.adam_w_mode optimizer.params.torch_adam optimizer.params.bias_correction
    optimizer.params.momentum scheduler.type scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr
    scheduler.params.warmup_num_steps scheduler.params.total_num_steps scheduler.params.warmup_type
    scheduler.params.last_batch_iteration scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio
    disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer sparse_gradients
    """,
    "says what is logged or measured": """
    steps_per_print wall_clock_breakdown dump_state memory_breakdown tensorboard.enabled tensorboard.output_path
    tensorboard.job_name wandb.enabled wandb.group wandb.team wandb.project csv_monitor.enabled
    csv_monitor.output_path csv_monitor.job_name flops_profiler.enabled flops_profiler.profile_step
    flops_profiler.module_depth flops_profiler.top_modules flops_profiler.detailed flops_profiler.output_file
    comms_logger.enabled comms_logger.verbose comms_logger.prof_all comms_logger.debug
    """,
    "the constants of DeepSpeed come from runs with its defaults, and the effect of another value is not modelled": """
    zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.reduce_bucket_size zero_optimization.allgather_partitions
    zero_optimization.allgather_bucket_size zero_optimization.sub_group_size
    zero_optimization.round_robin_gradients zero_optimization.ignore_unused_parameters
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_optimizer.buffer_count
    zero_optimization.offload_optimizer.fast_init zero_optimization.offload_optimizer.pipeline_read
    zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_param.pin_memory
    zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
    zero_optimization.offload_param.max_in_cpu aio.block_size aio.queue_depth aio.thread_count aio.single_submit
    aio.overlap_events activation_checkpointing.contiguous_memory_optimization communication_data_type
    compile.disable activation_checkpointing.number_checkpoints
    activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile
    """,
    "checkpoints are no part of a step's price": """
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.stage3_gather_fp16_weights_on_model_save checkpoint.use_node_local_storage
    checkpoint.load_universal zero_optimization.load_from_fp32_weights checkpoint.tag_validation
    """,
}
"""Names by reason."""

NO_EFFECT: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}
"""Reason by name."""
