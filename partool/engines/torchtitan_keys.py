"""Keys of torchtitan's configuration that do not change memory or time per step, as far as these are modelled.

``torchtitan/config_manager.py`` and ``torchtitan/config/job_config.py`` of 0.0 to 0.2, and the classes of 2026
(https://github.com/pytorch/torchtitan). Keys that are carried are in :mod:`partool.engines.torchtitan_spec`.
"""

from __future__ import annotations

_GROUPS = {
    "says where files are, or how they are read; partool prices steps, not files": """
    job.config_file job.dump_folder job.description job.use_for_integration_test job.print_args job.custom_config_module
    training.dataset training.dataset_path training.mixed_dataset training.dataset_streaming validation.dataset
    validation.dataset_path dataloader.dataset dataloader.dataset_path dataloader.num_workers dump_folder
    dataloader.infinite dataloader.persistent_workers dataloader.prefetch_factor dataloader.pin_memory
    training.num_workers training.data_probs training.synthetic_data hf_assets_path model.hf_assets_path
    model.tokenizer_path model.tokenizer_name model.print_after_conversion model_converters.print_after_conversion
    validator.dataloader.dataset debug.print_config debug.save_config_file config_file module config
    """,
    "says what is logged or profiled; its time is part of the constants": """
    profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq profiling.profiler_warmup
    profiling.profiler_active profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder
    profiling.profile_ranks profiling.profile_with_stack profiler.enable_profiling profiler.save_traces_folder
    profiler.profile_freq profiler.enable_memory_snapshot profiler.save_memory_snapshot_folder
    metrics.log_freq metrics.enable_tensorboard metrics.disable_color_printing metrics.enable_color_printing
    metrics.save_tb_folder metrics.save_for_all_ranks metrics.rank_0_only metrics.enable_wandb metrics.run_name
    metrics.disable_console_log
    memory_estimation.enable memory_estimation.enabled memory_estimation.disable_fake_mode
    """,
    "changes values of weights or gradients, not their sizes or operators": """
    optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay training.max_norm
    lr_scheduler.warmup_steps lr_scheduler.decay_ratio lr_scheduler.decay_type lr_scheduler.lr_min
    lr_scheduler.min_lr_factor lr_scheduler.total_steps training.warmup_steps debug.seed
    activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check debug.moe_force_load_balance
    debug.deterministic_warn_only training.debug_moe_force_load_balance
    """,
    "checkpoints are no part of a step's price": """
    checkpoint.enable checkpoint.enable_checkpoint checkpoint.enable_ft_dataloader_checkpoints checkpoint.folder
    checkpoint.interval checkpoint.interval_type checkpoint.initial_load_path checkpoint.initial_load_model_only
    checkpoint.initial_load_in_hf checkpoint.initial_load_in_hf_quantized checkpoint.initial_load_dequantize
    checkpoint.last_save_model_only checkpoint.last_save_model_weights_only checkpoint.last_save_in_hf
    checkpoint.model_weights_only checkpoint.export_dtype checkpoint.async_mode checkpoint.keep_latest_k
    checkpoint.load_step checkpoint.exclude_from_loading checkpoint.enable_first_step_checkpoint
    checkpoint.create_seed_checkpoint checkpoint.load_only checkpoint.initial_load_model_weights_only
    checkpoint.load_folder
    """,
    "says how processes meet, and for how long they wait": """
    comm.init_timeout_seconds comm.train_timeout_seconds comm.trace_buf_size comm.save_traces_folder
    comm.save_traces_file_prefix rdzv_backend rdzv_endpoint rdzv_id rdzv_conf local_ranks_filter role tee node_rank
    master_addr master_port max_restarts log_dir redirects standalone start_method monitor_interval
    virtual_local_rank
    """,
    "torchtitan's constants assume the usual kernels; the effect of others is not modelled": """
    optimizer.implementation optimizer.fused training.gc_freq training.gc_debug compile.backend
    parallelism.enable_compiled_autograd model.norm_type model.use_flex_attn model.attn_mask_type
    activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns activation_checkpoint.early_stop
    activation_checkpoint.debug activation_checkpoint.visualize_memory_budget_pareto
    training.mixed_precision_reduce parallelism.enable_fsdp_symm_mem
    float8.precompute_float8_dynamic_scale_for_fsdp float8.force_recompute_fp8_weight_in_bwd float8.recipe_name
    float8.scaling_type_input float8.scaling_type_weight float8.scaling_type_grad_output mx.recipe_name
    mx.mxfp8_dim1_cast_kernel_choice quantize.grouped_mm.mx.recipe_name quantize.grouped_mm.float8.recipe_name
    parallelism.pipeline_parallel_expert_parallel_overlap parallelism.full_dtensor
    """,
    "without fault_tolerance.enable it does nothing": """
    fault_tolerance.replica_id fault_tolerance.group_size fault_tolerance.min_replica_size
    fault_tolerance.process_group fault_tolerance.process_group_timeout_ms fault_tolerance.sync_steps
    fault_tolerance.should_quantize fault_tolerance.fragment_sync_delay fault_tolerance.fragment_update_alpha
    """,
}
"""Names by reason."""

NO_EFFECT: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}
"""Reason by name."""
