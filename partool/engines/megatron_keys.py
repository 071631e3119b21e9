"""Arguments of Megatron-LM (``megatron/training/arguments.py``, core 0.12) that do not change memory or time per step.

https://github.com/NVIDIA/Megatron-LM; arguments that are carried into specs are in :mod:`partool.engines.megatron`.
"""

from __future__ import annotations

_GROUPS = {
    "says where files are, or how they are read; partool prices steps, not files": """
    data-path train-data-path valid-data-path test-data-path data-cache-path split num-workers mmap-bin-files
    no-mmap-bin-files mock-data dataloader-type no-create-attention-mask-in-dataloader reset-position-ids
    reset-attention-mask eod-mask-loss data-impl per-split-data-args-path num-dataset-builder-threads merge-file
    vocab-file train-sync-interval
    """,
    "the model's vocabulary has its effect; see --vocab-size and --padded-vocab-size": """
    tokenizer-type tokenizer-model make-vocab-size-divisible-by tiktoken-pattern tiktoken-special-tokens
    trust-remote-code tokenizer-hf-use-fast vocab-extra-ids
    """,
    "checkpoints are no part of a step's price": """
    save load save-interval no-save-optim no-save-rng no-load-optim no-load-rng ckpt-format use-checkpoint-args
    no-use-checkpoint-args exit-on-missing-checkpoint async-save use-dist-ckpt ckpt-fully-parallel-save
    ckpt-fully-parallel-load ckpt-assume-constant-structure finetune pretrained-checkpoint dist-ckpt-strictness
    auto-detect-ckpt-format non-persistent-save-interval override-opt-param-scheduler
    override-opt_param-scheduler use-persistent-ckpt-worker exit-interval exit-duration-in-mins
    exit-signal-handler
    """,
    "says what is logged; its time is part of the constants of Megatron-LM": """
    log-interval log-throughput log-progress log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard
    log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
    log-world-size-to-tensorboard log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard tensorboard-dir
    tensorboard-log-interval tensorboard-queue-size wandb-project wandb-exp-name wandb-save-dir timing-log-level
    timing-log-option logging-level one-logger-project one-logger-run-name profile profile-step-start
    profile-step-end profile-ranks use-pytorch-profiler moe-per-layer-logging
    check-weight-hash-across-dp-replicas-interval
    """,
    "changes values of weights or gradients, not their sizes or operators": """
    seed init-method-std lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters
    lr-warmup-samples lr-warmup-fraction lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters weight-decay
    start-weight-decay end-weight-decay weight-decay-incr-style adam-beta1 adam-beta2 adam-eps sgd-momentum
    clip-grad initial-loss-scale min-loss-scale loss-scale loss-scale-window hysteresis norm-epsilon rotary-base
    rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor use-rope-scaling
    rope-scaling-factor mscale mscale-all-dim apply-layernorm-1p attention-softmax-in-fp32
    no-query-key-layer-scaling apply-query-key-layer-scaling rotary-interleaved no-rope-fusion
    moe-input-jitter-eps fp8-amax-history-len fp8-amax-compute-algo fp8-margin fp8-interval
    init-model-with-meta-device moe-router-topk-scaling-factor moe-aux-loss-coeff moe-z-loss-coeff
    moe-router-bias-update-rate moe-router-load-balancing-type moe-router-pre-softmax moe-router-dtype
    use-cpu-initialization no-initialization no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad
    rerun-mode no-rerun
    """,
    "says how processes meet": """
    master_addr master_port node_rank node-rank rdzv_id rdzv_backend rdzv_endpoint rdzv-id rdzv-backend
    rdzv-endpoint max_restarts tee log_dir log-dir redirects distributed-backend distributed-timeout-minutes
    local-rank local_rank lazy-mpu-init master-addr master-port use-ring-exchange-p2p
    nccl-communicator-config-path manual-gc manual-gc-interval high-priority-stream-groups use-tp-pp-dp-mapping
    enable-ft-package
    """,
    "Megatron-LM's constants assume the usual kernels and overlaps; the effect of others is not modelled": """
    use-mcore-models use-legacy-models transformer-impl use-flash-attn attention-backend overlap-grad-reduce
    overlap-param-gather no-gradient-accumulation-fusion no-masked-softmax-fusion no-bias-gelu-fusion
    no-bias-swiglu-fusion no-bias-dropout-fusion no-async-tensor-model-parallel-allreduce moe-grouped-gemm
    moe-permute-fusion moe-token-dispatcher-type moe-shared-expert-overlap cross-entropy-loss-fusion
    cross-entropy-fusion-impl overlap-p2p-communication no-overlap-p2p-communication no-persist-layer-norm
    use-precision-aware-optimizer ddp-bucket-size ddp-average-in-collective ddp-num-buckets align-grad-reduce
    align-param-gather
    calculate-per-token-loss no-scatter-gather-tensors-in-pipeline tp-comm-bootstrap-backend te-rng-tracker
    overlap-param-gather-with-optimizer-step empty-unused-memory-level
    """,
}
"""Names by reason."""

NO_EFFECT: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}
"""Reason by name."""
