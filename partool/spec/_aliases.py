"""Names of settings in other tools, and what a spec has in their place."""

from __future__ import annotations

ALIASES = {
    **dict.fromkeys(("num_workers", "num_nodes", "nnodes", "n_nodes"), "hardware.nodes"),
    **dict.fromkeys(
        ("nproc_per_node", "gpus_per_node", "n_gpus_per_node", "num_gpus", "ngpus", "gpu_count"), "hardware.per_node"
    ),
    **dict.fromkeys(("max_restarts", "max_retries", "retries"), "launch.restarts"),
    **dict.fromkeys(("envs", "environment", "env_vars"), "launch.env"),
    **dict.fromkeys(("walltime", "time_limit", "timeout_min"), "launch.slurm.time"),
    **dict.fromkeys(("docker_image", "container_image", "image_id"), "launch.image"),
    **dict.fromkeys(("file_mounts", "volumes", "container_mounts"), "launch.mounts"),
    **dict.fromkeys(("batch_size", "global_batch_size", "train_batch_size"), "training.global_batch"),
    **dict.fromkeys(
        ("micro_batch_size", "per_device_train_batch_size", "local_batch_size", "train_micro_batch_size_per_gpu",
         "train_micro_batch_size", "device_train_microbatch_size"),
        "parallel.micro_batch",
    ),
    **dict.fromkeys(("max_steps", "num_steps", "train_steps", "train_iters", "total_steps"), "training.steps"),
    **dict.fromkeys(
        ("seq_len", "seq_length", "max_seq_len", "max_seq_length", "cutoff_len", "sequence_len"),
        "training.sequence_length",
    ),
    **dict.fromkeys(("torch_dtype", "mixed_precision", "mixed_precision_param", "dtype"), "training.precision"),
    **dict.fromkeys(("eval_steps", "eval_interval"), "training.validation.every"),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree", "tp", "tp_size"),
        "parallel.tensor",
    ),
    **dict.fromkeys(
        ("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree", "pp", "pp_size"),
        "parallel.pipeline",
    ),
    **dict.fromkeys(
        ("context_parallel_size", "context_parallel_degree", "sequence_parallel_size", "sequence_parallel_degree",
         "cp", "cp_size", "sp_size"),
        "parallel.sequence",
    ),
    **dict.fromkeys(
        ("expert_model_parallel_size", "expert_parallel_size", "expert_parallel_degree", "expert_parallel", "ep",
         "ep_size"),
        "parallel.expert",
    ),
    **dict.fromkeys(
        ("expert_tensor_parallel_size", "expert_tensor_parallel_degree", "etp", "etp_size"), "parallel.expert_tensor"
    ),
    **dict.fromkeys(("zero_optimization", "fsdp", "fsdp_config"), "parallel.data"),
    **dict.fromkeys(
        ("zero_stage", "data_parallel_sharding_strategy", "sharding_strategy", "fsdp_sharding_strategy"),
        "parallel.data.zero",
    ),
    **dict.fromkeys(("data_parallel_shard_degree", "dp_shard", "fsdp_size"), "parallel.data.shard"),
    **dict.fromkeys(("pipeline_parallel_schedule", "pp_schedule"), "parallel.pipeline.schedule"),
    **dict.fromkeys(
        ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_size"),
        "parallel.pipeline.chunks",
    ),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_param"), "parallel.offload"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint", "recompute_granularity"),
        "parallel.recompute",
    ),
    **dict.fromkeys(("torch_compile", "enable_torch_compile"), "parallel.compile"),
    **dict.fromkeys(
        ("max_grad_norm", "max_norm", "gradient_clipping", "clip_grad", "clip_grad_norm"), "optimizer.clip"
    ),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_decay_style"), "optimizer.schedule.kind"),
    **dict.fromkeys(("warmup", "lr_warmup_iters", "lr_warmup_steps", "num_warmup_steps"),
                    "optimizer.schedule.warmup_steps"),
    **dict.fromkeys(("optim", "optimizer_name"), "optimizer.name"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "beta1", "beta2"), "optimizer.betas"),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), "optimizer.eps"),
    **dict.fromkeys(("save_steps", "save_interval"), "checkpoint.every"),
    **dict.fromkeys(("logging_steps", "log_interval", "log_freq", "steps_per_print"), "training.log_every"),
    **dict.fromkeys(("run_name", "experiment_name"), "name"),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer"), "model.layers"),
    **dict.fromkeys(("d_model", "n_embd"), "model.hidden"),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head"), "model.heads"),
    **dict.fromkeys(("num_key_value_heads", "num_query_groups", "n_kv_heads"), "model.kv_heads"),
    **dict.fromkeys(
        ("dataset", "datasets", "dataset_path", "data_path", "train_data_path", "train_file", "train_files"),
        "data.source",
    ),
    **dict.fromkeys(("sample_packing", "packing"), "data.pack"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs"), "training.epochs"),
    **dict.fromkeys(("train_tokens", "max_tokens", "total_tokens"), "training.tokens"),
    "chat_template": "data.template",
    "loss_type": "training.objective.form",
    "label_smoothing": "training.objective.smoothing",
    **dict.fromkeys(("simpo_gamma", "gamma_beta_ratio"), "training.objective.gamma"),
    **dict.fromkeys(("orpo_alpha", "odds_ratio_weight"), "training.objective.weight"),
    **dict.fromkeys(("rl", "pref_loss"), "training.objective.kind"),
    **dict.fromkeys(("precompute_ref_log_probs", "ref_model"), "training.objective.reference"),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path", "load_teacher"), "training.distill.teacher"),
    **dict.fromkeys(("kd_temp", "distillation_temperature"), "training.distill.temperature"),
    "kd_beta_ce": "training.distill.weight",
    "learning_rate": "optimizer.lr",
    "save_total_limit": "checkpoint.keep",
    **dict.fromkeys(("wandb_project", "trackio_project"), "telemetry.project"),
    **dict.fromkeys(("wandb_group", "run_group"), "telemetry.group"),
    **dict.fromkeys(("wandb_tags", "run_tags"), "telemetry.tags"),
    "intermediate_size": "model.ffn_hidden",
    "max_position_embeddings": "model.max_position",
    **dict.fromkeys(("n_routed_experts", "num_local_experts", "num_experts", "num_moe_experts"), "model.moe.experts"),
    **dict.fromkeys(("num_experts_per_tok", "moe_router_topk"), "model.moe.top_k"),
    **dict.fromkeys(("mtp", "mtp_num_layers", "num_nextn_predict_layers"), "model.multi_token"),
    "mtp_loss_scaling_factor": "training.multi_token_weight",
    **dict.fromkeys(("moe_intermediate_size", "moe_ffn_hidden_size"), "model.moe.ffn_hidden"),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), "model.moe.shared_experts"),
    **dict.fromkeys(("scoring_func", "moe_router_score_function"), "model.moe.scores"),
    **dict.fromkeys(("router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss_alpha"), "model.moe.aux_loss"),
    **dict.fromkeys(("capacity_factor", "moe_expert_capacity_factor"), "model.moe.capacity"),
    **dict.fromkeys(("n_group", "moe_router_num_groups"), "model.moe.groups"),
    **dict.fromkeys(("topk_group", "moe_router_group_topk"), "model.moe.top_groups"),
    "norm_topk_prob": "model.moe.normalise",
    "routed_scaling_factor": "model.moe.scaling_factor",
    "first_k_dense_replace": "model.moe.first_dense_layers",
    **dict.fromkeys(("lora_r", "lora_rank"), "adapter.rank"),
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    **dict.fromkeys(("target_modules", "lora_target_modules", "lora_target"), "adapter.targets"),
    **dict.fromkeys(("modules_to_save", "lora_modules_to_save"), "adapter.train"),
    **dict.fromkeys(("use_rslora", "peft_use_rslora"), "adapter.rslora"),
    "use_dora": "adapter.kind",
    "loraplus_lr_ratio": "adapter.lr_ratio",
    "lora_model_dir": "adapter.weights",
    "kv_lora_rank": "model.mla.kv_rank",
    "q_lora_rank": "model.mla.q_rank",
}  # fmt: skip
"""Name of a setting in other tools → path of the matching setting in a spec."""

NOTES = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum_steps"),
        "it follows from `training.global_batch` and `parallel.micro_batch`",
    ),
    **dict.fromkeys(("bf16", "fp16"), "write `training.precision`: bf16 (the default), fp16, fp32 or fp8"),
    **dict.fromkeys(
        (
            "dp",
            "dp_size",
            "data_parallel",
            "data_parallel_size",
            "data_parallel_degree",
            "data_parallel_replicate_degree",
            "dp_replicate",
            "world_size",
        ),
        "nothing to write: data parallelism gets the devices that tensor, pipeline and sequence parallelism leave; "
        "`hardware` says how many there are",
    ),
    **dict.fromkeys(
        ("sequence_parallel", "enable_sequence_parallel"),
        "write `parallel.tensor` for Megatron's, which goes with tensor parallelism, or `parallel.sequence` for "
        "context parallelism",
    ),
    **dict.fromkeys(
        ("output_dir", "save_dir", "logging_dir", "dump_folder", "save_folder", "save"),
        "nothing to write: a run gets a folder of its own, below PARTOOL_HOME; `checkpoint.dir` places checkpoints",
    ),
    "train_samples": "write `training.steps`: the samples divided by `global_batch`",
    **dict.fromkeys(
        ("attn_implementation", "use_flash_attention_2", "use_flash_attn", "flash_attention"),
        "nothing to write: partool chooses kernels; `kernels` says which",
    ),
    **dict.fromkeys(
        ("report_to", "wandb", "mlflow", "trackio", "enable_wandb", "use_wandb"),
        "write `telemetry: {trackers: [wandb]}`; there are wandb, mlflow, trackio and tensorboard",
    ),
    **dict.fromkeys(
        ("tensorboard", "enable_tensorboard", "tensorboard_dir"), "write `telemetry: {trackers: [tensorboard]}`"
    ),
    **dict.fromkeys(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "save_best"),
        "write `checkpoint.best`: the metric, its mode and how many of the best checkpoints are kept",
    ),
    **dict.fromkeys(
        ("early_stopping", "early_stopping_patience", "early_stopping_threshold"),
        "write `training.early_stop`: its patience and the least change that counts",
    ),
    **dict.fromkeys(("use_ema", "ema_decay"), "write `training.ema`: the decay of the average"),
    **dict.fromkeys(("min_lr", "lr_min"), "write `optimizer.schedule.min_ratio`: min_lr divided by `optimizer.lr`"),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory"), "nothing to write: ranks read ahead by themselves"
    ),
    **dict.fromkeys(
        (
            "model_name_or_path",
            "model_name",
            "base_model",
            "pretrained_model_name_or_path",
            "hf_repo",
            "pretrained",
            "hf_assets_path",
        ),
        "write `model: NAME` for a preset, or `model: {hf: FOLDER}` for a downloaded model of transformers",
    ),
    "deepspeed": "partool import FILE reads a DeepSpeed configuration into a spec",
    "resume_from_checkpoint": "partool launch SPEC --resume RUN continues a run",
    "drop_tokens": "set `model.moe.capacity` to drop tokens beyond it; without it no token is dropped",
    **dict.fromkeys(
        ("lora", "peft", "peft_config", "lora_config"),
        "write `adapter: {rank: 16, alpha: 32, targets: all-linear}`: docs/guide/adapters.md",
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"),
        "frozen weights beside an adapter are stored in the type of computation; there are no bases of 4 or 8 bits",
    ),
}
"""Name of a setting in other tools that no single setting of a spec matches → what to do."""

BESIDE = {
    "gpus": "per_node",
    "devices": "per_node",
    **dict.fromkeys(("gpu", "device", "gpu_type", "device_type", "gpu_name", "card"), "accelerator"),
    **dict.fromkeys(("memory", "gpu_memory", "vram", "hbm"), "memory_gib"),
}
"""Name of a setting in other tools → the matching key of the same section; it counts in sections that have this key."""

IN_SECTION = {
    "data": dict.fromkeys(("path", "paths", "files", "name", "dataset_name"), "source"),
    "hardware": {"type": "accelerator", "name": "accelerator", "model": "accelerator"},
    "optimizer": {"type": "name", "kind": "name"},
    "model": dict.fromkeys(("name", "model_type"), "preset"),
    "checkpoint": {
        **dict.fromkeys(("interval", "freq"), "every"),
        **dict.fromkeys(("folder", "path", "output_dir", "save_dir"), "dir"),
        **dict.fromkeys(("keep_latest_k", "max_to_keep"), "keep"),
    },
}
"""Section → name of a setting in other tools → the matching key of this section."""
