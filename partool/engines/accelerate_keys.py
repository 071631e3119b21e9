"""Settings of accelerate and of ``TrainingArguments`` that do not change memory or time per step, as far as modelled.

``accelerate/commands/launch.py`` and ``config_args.py`` of accelerate 0.20 to 1.10
(https://github.com/huggingface/accelerate), ``transformers/training_args.py`` of 4.30 to 4.57
(https://github.com/huggingface/transformers), and common arguments of the scripts in examples of transformers, TRL and
LLaMA-Factory. Names with ``accelerate.`` are accelerate's own, those with ``launch.`` torchrun's and deepspeed's.
"""

from __future__ import annotations

_GROUPS = {
    "changes values of weights or gradients, not their sizes or operators": """
    learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type
    lr_scheduler_kwargs warmup_ratio warmup_steps seed data_seed label_smoothing_factor neftune_noise_alpha
    optim_args fp16_opt_level half_precision_backend fp16_backend tf32 average_tokens_across_devices
    num_train_epochs embedding_learning_rate lr_end
    """,
    "says what is logged or shown": """
    log_level log_level_replica log_on_each_node logging_dir logging_strategy logging_first_step logging_steps
    logging_nan_inf_filter run_name disable_tqdm report_to project trackio_space_id skip_memory_metrics
    include_tokens_per_second include_num_input_tokens_seen debug log_completions wandb_project wandb_entity
    plot_loss logging_rank0_only verbose logging_level
    """,
    "checkpoints are no part of a step's price": """
    output_dir overwrite_output_dir save_strategy save_steps save_total_limit save_safetensors save_on_each_node
    save_only_model restore_callback_states_from_checkpoint load_best_model_at_end metric_for_best_model
    greater_is_better resume_from_checkpoint push_to_hub hub_model_id hub_strategy hub_token hub_private_repo
    hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token overwrite_cache
    cache_dir save_model ddp_timeout_save
    """,
    "how long an evaluation takes depends on the data, and it is not priced": """
    do_train do_eval do_predict eval_strategy evaluation_strategy prediction_loss_only
    per_device_eval_batch_size per_gpu_eval_batch_size eval_accumulation_steps eval_delay eval_steps
    eval_on_start eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_inputs_for_metrics
    include_for_metrics bf16_full_eval fp16_full_eval past_index label_names use_legacy_prediction_loop
    jit_mode_eval predict_with_generate generation_max_length val_size max_eval_samples compute_accuracy
    """,
    "says which data and tokenizer there are, or how data are prepared": """
    dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory
    dataloader_persistent_workers remove_unused_columns ignore_data_skip group_by_length length_column_name
    dataset dataset_name dataset_config dataset_config_name dataset_path dataset_dir data_path eval_data_path
    train_file validation_file data_dir template chat_template dataset_text_field dataset_num_proc dataset_mixer
    dataset_splits dataset_train_split dataset_test_split preprocessing_num_workers packing eval_packing
    packing_strategy padding_free max_samples max_train_samples streaming tokenizer_name tokenizer_name_or_path
    tokenizer_path use_fast_tokenizer trust_remote_code model_revision revision token use_auth_token model_type
    config_name config_overrides config config_file lazy_preprocess is_multimodal stage split mask_history
    train_on_prompt completion_only_loss assistant_only_loss dataset_kwargs dataset_mixture dataset_configs
    model_init_kwargs truncation_side padding_side pad_to_multiple_of new_special_tokens add_special_tokens
    conv_template version model_code_revision validation_split_percentage keep_linebreaks dataset_prepared_path
    overwrite_dataset tokenized_path neat_packing image_dir
    """,
    "says how processes meet and where they run": """
    local_rank ddp_backend ddp_timeout ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
    tpu_num_cores tpu_metrics_debug no_cuda use_cpu use_mps_device ray_scope _n_gpu mp_parameters
    accelerator_config torch_empty_cache_steps low_cpu_mem_usage local_files_only accelerate.compute_environment
    accelerate.machine_rank accelerate.gpu_ids accelerate.main_process_ip accelerate.main_process_port
    accelerate.rdzv_backend accelerate.rdzv_conf accelerate.same_network accelerate.main_training_function
    accelerate.enable_cpu_affinity accelerate.downcast_bf16 accelerate.tpu_name accelerate.tpu_zone
    accelerate.tpu_use_cluster accelerate.tpu_use_sudo accelerate.tpu_env accelerate.tpu_vm
    accelerate.command_file accelerate.commands accelerate.use_cpu accelerate.debug accelerate.config_file
    accelerate.quiet accelerate.num_cpu_threads_per_process accelerate.module accelerate.no_python
    accelerate.tee accelerate.log_dir accelerate.role accelerate.max_restarts accelerate.monitor_interval
    accelerate.cpu accelerate.ipex_config accelerate.mpirun_config accelerate.tp_config accelerate.fsdp_config
    accelerate.deepspeed_config accelerate.dynamo_config accelerate.megatron_lm_config accelerate.fp8_config
    accelerate.parallelism_config accelerate.m launch.master_addr launch.master_port launch.node_rank
    launch.rdzv_id launch.rdzv_backend launch.rdzv_endpoint launch.rdzv_conf launch.max_restarts launch.tee
    launch.log_dir launch.redirects launch.standalone launch.role launch.hostfile launch.include launch.exclude
    launch.launcher launch.module launch.no_local_rank launch.force_multi launch.start_method
    launch.local_ranks_filter launch.enable_each_rank_log launch.ssh_port
    """,
    "the constants assume the usual kernels and overlaps; the effect of others is not modelled": """
    attn_implementation flash_attn use_flash_attn use_flash_attention_2 use_flash_attn_2
    gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant liger_kernel_config use_cache
    fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap include_mfu sdp_attention xformers use_reentrant_gc
    use_unsloth_gc fsdp_config.min_num_params fsdp_config.fsdp_min_num_params
    accelerate.fsdp_config.fsdp_min_num_params fsdp_config.transformer_layer_cls_to_wrap
    fsdp_config.fsdp_transformer_layer_cls_to_wrap accelerate.fsdp_config.fsdp_transformer_layer_cls_to_wrap
    fsdp_config.auto_wrap_policy fsdp_config.fsdp_auto_wrap_policy accelerate.fsdp_config.fsdp_auto_wrap_policy
    fsdp_config.backward_prefetch fsdp_config.fsdp_backward_prefetch
    accelerate.fsdp_config.fsdp_backward_prefetch fsdp_config.backward_prefetch_policy
    fsdp_config.fsdp_backward_prefetch_policy accelerate.fsdp_config.fsdp_backward_prefetch_policy
    fsdp_config.forward_prefetch fsdp_config.fsdp_forward_prefetch accelerate.fsdp_config.fsdp_forward_prefetch
    fsdp_config.limit_all_gathers fsdp_config.fsdp_limit_all_gathers
    accelerate.fsdp_config.fsdp_limit_all_gathers fsdp_config.use_orig_params fsdp_config.fsdp_use_orig_params
    accelerate.fsdp_config.fsdp_use_orig_params fsdp_config.cpu_ram_efficient_loading
    fsdp_config.fsdp_cpu_ram_efficient_loading accelerate.fsdp_config.fsdp_cpu_ram_efficient_loading
    fsdp_config.sync_module_states fsdp_config.fsdp_sync_module_states
    accelerate.fsdp_config.fsdp_sync_module_states fsdp_config.state_dict_type fsdp_config.fsdp_state_dict_type
    accelerate.fsdp_config.fsdp_state_dict_type fsdp_config.xla fsdp_config.fsdp_xla
    accelerate.fsdp_config.fsdp_xla fsdp_config.xla_fsdp_v2 fsdp_config.fsdp_xla_fsdp_v2
    accelerate.fsdp_config.fsdp_xla_fsdp_v2 fsdp_config.xla_fsdp_grad_ckpt fsdp_config.fsdp_xla_fsdp_grad_ckpt
    accelerate.fsdp_config.fsdp_xla_fsdp_grad_ckpt fsdp_config.mixed_precision fsdp_config.fsdp_mixed_precision
    accelerate.fsdp_config.fsdp_mixed_precision accelerate.dynamo_config.dynamo_mode
    accelerate.dynamo_config.dynamo_use_fullgraph accelerate.dynamo_config.dynamo_use_dynamic
    accelerate.dynamo_config.dynamo_use_regional_compilation accelerate.fp8_config.backend
    accelerate.fp8_config.fp8_backend accelerate.fp8_config.use_autocast_during_eval
    accelerate.fp8_config.fp8_use_autocast_during_eval accelerate.fp8_config.margin
    accelerate.fp8_config.fp8_margin accelerate.fp8_config.interval accelerate.fp8_config.fp8_interval
    accelerate.fp8_config.format accelerate.fp8_config.fp8_format accelerate.fp8_config.amax_history_len
    accelerate.fp8_config.fp8_amax_history_len accelerate.fp8_config.amax_history_length
    accelerate.fp8_config.fp8_amax_history_length accelerate.fp8_config.amax_compute_algo
    accelerate.fp8_config.fp8_amax_compute_algo accelerate.fp8_config.amax_compute_algorithm
    accelerate.fp8_config.fp8_amax_compute_algorithm accelerate.fp8_config.override_linear_precision
    accelerate.fp8_config.fp8_override_linear_precision accelerate.fp8_config.opt_level
    accelerate.fp8_config.fp8_opt_level accelerate.fp8_config.optimization_level
    accelerate.fp8_config.fp8_optimization_level accelerate.fp8_config.fp8_fp8_format
    """,
    "DeepSpeed's and Megatron-LM's constants have its effect": """
    accelerate.deepspeed_config.gradient_clipping accelerate.deepspeed_config.zero3_init_flag
    accelerate.deepspeed_config.zero3_save_16bit_model accelerate.deepspeed_config.deepspeed_config_file
    accelerate.deepspeed_config.deepspeed_hostfile accelerate.deepspeed_config.deepspeed_exclusion_filter
    accelerate.deepspeed_config.deepspeed_inclusion_filter
    accelerate.deepspeed_config.deepspeed_multinode_launcher
    accelerate.deepspeed_config.deepspeed_moe_layer_cls_names
    accelerate.megatron_lm_config.megatron_lm_gradient_clipping
    """,
    "belongs to adapters; where they are switched on, that is an error": """
    lora_target lora_rank lora_alpha lora_dropout lora_r lora_target_modules lora_modules_to_save lora_task_type
    use_dora use_rslora bnb_4bit_quant_type use_bnb_nested_quant quantization_method
    """,
}
"""Names by reason."""

NO_EFFECT: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}
"""Reason by name."""
