"""Arguments of Megatron-LM that do not change memory or time per step.

They were compared with ``megatron/training/arguments.py`` of https://github.com/NVIDIA/Megatron-LM at commit 000c4ac2
(core 0.15) and of the package megatron-core 0.19.2 (https://pypi.org/project/megatron-core/); a few are of older
versions, of Megatron-DeepSpeed (https://github.com/microsoft/Megatron-DeepSpeed) and of Pai-Megatron-Patch. Arguments
that are carried into specs are in :mod:`partool.engines.megatron` and the modules that it uses, those that change the
price without a counterpart in :mod:`partool.engines.megatron_unpriced`.
"""

from __future__ import annotations

from collections.abc import Iterable

_GROUPS = {
    "says where files are, or how they are read; partool prices steps, not files": """
    data-path train-data-path valid-data-path test-data-path data-cache-path split num-workers mmap-bin-files
    no-mmap-bin-files mock-data dataloader-type no-create-attention-mask-in-dataloader reset-position-ids
    reset-attention-mask eod-mask-loss data-impl per-split-data-args-path num-dataset-builder-threads merge-file
    vocab-file train-sync-interval data-args-path object-storage-cache-path mid-level-dataset-surplus
    allow-ambiguous-pad-tokens sample-rate mask-prob short-seq-prob disable-msc valid-num-workers
    train-weighted-split-paths-path valid-weighted-split-paths-path test-weighted-split-paths-path
    train-weighted-split-paths valid-weighted-split-paths repeated-dataloader dataset train-mode valid-path
    prompt-path dataloader-save max-padding-length no-data-sharding data-per-class-fraction classes-fraction
    full-validation multiple-validation-sets test-mode
    per-dataset-sequences-path validation-set-names dataloader-fast-cache-load dataloader-defer-npy-index-mmap
    dataloader-inter-document-masking fim- phase-transition-iterations start-eval-at-iter eval-global-batch-size
    eval-micro-batch-size enable-msc
    """,
    "the model's vocabulary has its effect; see --vocab-size and --padded-vocab-size": """
    tokenizer-type tokenizer-model tiktoken-pattern tiktoken-special-tokens tiktoken-num-special-tokens
    trust-remote-code tokenizer-hf-use-fast vocab-extra-ids tokenizer-metadata legacy-tokenizer
    tokenizer-name-or-path patch-tokenizer-type extra-vocab-size sft sft-tokenizer-prompt-format
    tokenizer-hf-no-use-fast tokenizer-hf-no-include-special-tokens tokenizer-sentencepiece-legacy
    no-tokenizer-sentencepiece-ignore-extra-whitespaces tokenizer-special-tokens chat-template null-tokenizer-eod-id
    null-tokenizer-pad-id
    """,
    "checkpoints are no part of a step's price": """
    save load save-interval persistent-save-interval save-retain-interval no-save-optim no-save-rng no-load-optim
    no-load-rng load-main-params-from-ckpt ckpt-format ckpt-step ckpt-convert-format ckpt-convert-save
    ckpt-convert-update-legacy-dist-opt-format use-checkpoint-args use-mp-args-from-checkpoint-args
    no-use-tokenizer-model-from-checkpoint-args no-use-checkpoint-args exit-on-missing-checkpoint async-save
    use-dist-ckpt dist-ckpt-format ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load
    ckpt-assume-constant-structure finetune pretrained-checkpoint dist-ckpt-strictness
    dist-ckpt-save-pre-mcore-014 dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
    auto-detect-ckpt-format non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
    non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo no-strict-fsdp-dtensor-load
    override-opt-param-scheduler use-checkpoint-opt-param-scheduler use-persistent-ckpt-worker exit-interval
    exit-duration-in-mins exit-signal-handler replication replication-jump replication-factor moe-use-upcycling
    moe-upcycling-granularity kill-switch-path allow-missing-vision-projection-checkpoint
    universal-checkpoint adlr-autoresume adlr-autoresume-interval
    async-ckpt- async-strategy ckpt-fully-parallel- no-ckpt-load-validate-sharding-integrity dist-ckpt-workers
    no-stream-ckpt-dequant override-ckpt-iteration verify-integrity exit-signal exit-signal-handler-
    save-activations-interval save-dgrads-interval save-params-interval save-tokens-per-expert-interval
    save-wgrads-interval
    """,
    "says what is logged; its time is part of the constants of Megatron-LM": """
    log-interval log-throughput log-progress log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard
    log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
    log-world-size-to-tensorboard log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard log-energy
    log-optimizer-states-to-tensorboard log-memory-interval log-straggler disable-straggler-on-startup
    straggler-ctrlr-port straggler-minmax-count tensorboard-dir tensorboard-log-interval tensorboard-queue-size
    wandb-project wandb-entity wandb-exp-name wandb-save-dir timing-log-level timing-log-option
    no-barrier-with-level-1-timing logging-level one-logger-project one-logger-run-name one-logger-async
    no-one-logger app-tag-run-name app-tag-run-version config-logger-dir profile profile-step-start
    profile-step-end profile-ranks use-pytorch-profiler record-memory-history memory-snapshot-path
    moe-per-layer-logging check-weight-hash-across-dp-replicas-interval run-workload-inspector-server
    dump-param-to-param-group-map
    log-device-memory-used log-max-attention-logit moe-routing-trace- nvtx-ranges record-shapes
    pytorch-profiler-collect- flight-recorder- no-flight-recorder-
    """,
    "changes values of weights or gradients, not their sizes or operators": """
    seed data-parallel-random-init init-method-std embedding-init-method-std init-method-xavier-uniform lr min-lr
    lr-decay-style lr-decay-iters lr-decay-samples lr-decay-tokens lr-warmup-iters lr-warmup-samples
    lr-warmup-tokens lr-warmup-fraction lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters
    lr-wsd-decay-samples decoupled-lr decoupled-min-lr head-lr-mult weight-decay start-weight-decay
    end-weight-decay weight-decay-incr-style adam-beta1 adam-beta2 adam-eps sgd-momentum clip-grad
    initial-loss-scale min-loss-scale loss-scale loss-scale-window hysteresis norm-epsilon layernorm-epsilon
    rotary-base rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor
    rotary-position-embeddings-theta use-rope-scaling rope-scaling-factor rope-type mscale mscale-all-dim
    apply-layernorm-1p attention-softmax-in-fp32 no-query-key-layer-scaling apply-query-key-layer-scaling
    rotary-interleaved apply-residual-connection-post-layernorm glu-linear-offset activation-func-clamp-value
    moe-input-jitter-eps fp8-amax-history-len fp8-amax-compute-algo fp8-margin fp8-interval
    init-model-with-meta-device moe-router-topk-scaling-factor moe-aux-loss-coeff moe-z-loss-coeff
    moe-loss-coeff moe-router-bias-update-rate moe-router-load-balancing-type
    moe-router-dtype moe-token-drop-policy moe-apply-probs-on-input moe-eval-capacity-factor moe-min-capacity
    create-moe-param-group mtp-loss-scaling-factor use-cpu-initialization no-initialization
    no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads
    rerun-mode no-rerun error-injection-rate error-injection-type iterations-to-skip
    result-rejected-tracker-filename train-tokens disable-bf16-reduced-precision-matmul
    accumulate-allreduce-grads-in-fp32 no-position-embedding no-pipeline-parallel topk-group
    lion-beta1 lion-beta2 lr-decay-steps lr-warmup-steps wd-incr-steps wsd-decay-steps no-weight-decay-cond-type
    apply-wd-to-qk-layernorm use-mup mup- qk-clip qk-clip-alpha qk-clip-threshold moe-router-force-biased
    moe-router-quantile-balancing-ema moe-enable-routing-replay use-same-sampling-seed-across-dp-ranks yarn-
    no-yarn-correction-range-round-to-int
    """,
    "says how processes meet, or what they do when one fails": """
    master-addr master-port node-rank rdzv-id rdzv-backend rdzv-endpoint max-restarts tee log-dir redirects
    monitor-interval standalone force-multi hostfile launcher include exclude distributed-backend
    distributed-timeout-minutes distributed-timeout-seconds-after-init local-rank lazy-mpu-init
    use-ring-exchange-p2p nccl-communicator-config-path manual-gc manual-gc-interval no-manual-gc-eval
    high-priority-stream-groups use-tp-pp-dp-mapping enable-ft-package calc-ft-timeouts
    disable-gloo-process-groups pipeline-model-parallel-comm-backend tp-comm-bootstrap-backend inprocess-restart
    inprocess-max-iterations inprocess-monitor-thread-interval inprocess-monitor-process-interval
    inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout
    inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout
    inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity inprocess-active-world-size
    inprocess-empty-cuda-cache decrease-batch-size-if-needed abort-on-unmet-fused-kernel-constraints
    enable-experimental deepspeed deepspeed-config deepspeed-activation-checkpointing deepspeed-mpi
    fault-injector- ft-num-warmup-iters gpu-sniff-test-interval fake-process-group create-all-gather-group
    high-priority-a2a-comm-stream
    """,
    "Megatron-LM's constants assume the usual kernels and overlaps; the effect of others is not modelled": """
    use-mcore-models use-legacy-models transformer-impl use-flash-attn use-flash-attn-v2 use-te attention-backend
    overlap-grad-reduce overlap-param-gather no-gradient-accumulation-fusion no-masked-softmax-fusion
    no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
    no-async-tensor-model-parallel-allreduce moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion
    moe-router-fusion moe-token-dispatcher-type moe-shared-expert-overlap cross-entropy-loss-fusion
    cross-entropy-fusion-impl overlap-p2p-communication no-overlap-p2p-communication
    overlap-p2p-communication-warmup-flush no-persist-layer-norm ddp-bucket-size ddp-average-in-collective
    ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw align-grad-reduce no-align-grad-reduce
    align-param-gather no-align-param-gather no-gradient-reduce-div-fusion calculate-per-token-loss
    no-scatter-gather-tensors-in-pipeline te-rng-tracker inference-rng-tracker
    overlap-param-gather-with-optimizer-step empty-unused-memory-level tp-comm-overlap tp-comm-overlap-cfg
    disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad
    disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag disable-tp-comm-split-rs use-te-activation-func
    use-fused-weighted-squared-relu no-clone-scatter-output-in-embedding
    microbatch-group-size-per-virtual-pipeline-stage use-nccl-ub disable-symmetric-registration use-sharp
    sharp-enabled-group fsdp-manual-registration no-pin-cpu-grads no-pin-cpu-params
    use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d use-contiguous-parameters-in-local-ddp
    disable-mamba-mem-eff-path moe-router-padding-for-fp8 no-fp8-wgrad onnx-safe DDP-impl
    moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size
    moe-single-grouped-weight moe-single-grouped-bias moe-flex-dispatcher-num-sms moe-hybridep- moe-ncclep-
    moe-permute-fusion-into-hybridep no-tp-comm- disable-jit-fuser flash-attention-version fused-residual-rmsnorm
    mla-down-proj-fusion use-transformer-engine-op-fuser use-grouped-gemm-for-dense-mlp
    use-grouped-gemm-for-shared-expert no-use-layer-wise-param-layout batch-invariant-mode
    overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release fsdp-db-
    megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
    moe-router-padding-for-quantization optimizer-cuda-graph
    """,
    "is for inference or for evaluation only": """
    inference-batch-times-seqlen-threshold max-tokens-to-oom output-bert-embeddings bert-embedder-type
    flash-decode use-legacy-static-engine inference-max-requests inference-max-seq-length
    inference-max-batch-size inference-dynamic-batching inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-block-size inference-dynamic-batching-buffer-guaranteed-fraction
    inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-max-requests-override
    inference-dynamic-batching-max-tokens-override inference-dynamic-batching-num-cuda-graphs
    inference-dynamic-batching-track-paused-request-events decode-only-cuda-graphs
    inference-dynamic-batching-unified-memory-level symmetric-ar-type nccl-all-reduce-for-prefill
    mlp-chunks-for-prefill disable-chunked-prefill inference-wandb-logging-step-interval cache-mla-latents
    moe-pad-experts-for-cuda-graph-inference cuda-graph-warmup-steps skip-train retriever-seq-length
    inference- enable-chunked-prefill num-speculative-tokens refit-method mamba-inference-
    """,
    "has an effect only with an argument that is an error here": """
    pp-partition-method encoder-seq-length decoder-seq-length relative-attention-num-buckets
    relative-attention-max-distance mrope-section rl- grpo- langrl- logits- dsa-indexer- dsa-kernel-backend
    no-dsa-indexer- linear- mtp-detach-heads mtp-hybrid-override-pattern mtp-standalone mtp-use-repeated-layer
    muon- activation-offload-fraction cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph
    delta-offload-bytes-across-pp-ranks fine-grained-offloading-max-inflight-offloads min-offloaded-tensor-size
    offload-modules moe-paged-stash- use-kitchen-attention kitchen-attention-backend max-seqlen-per-dp-cp-rank
    ddp-param-name-patterns-for-fp32-local-accumulation mamba- no-moe- cuda-graph-modules fp4-recipe
    fp4-quantizer-factory fp8-quantizer-factory
    muon-momentum muon-no-split-qkv muon-use-nesterov muon-scale-mode muon-fp32-matmul-prec muon-num-ns-steps
    muon-tp-mode muon-extra-scale-factor retro-project-dir retro-cyclic-train-iters retro-encoder-layers
    retro-encoder-hidden-dropout retro-encoder-attention-dropout retro-num-neighbors retro-num-retrieved-chunks
    retro-attention-gate retro-no-verify-neighbor-count optimizer-offload-policy bert-no-binary-head
    ict-head-size biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load
    titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path retriever-report-topk-accuracies
    retriever-score-scaling block-data-path embedding-path indexer-batch-size indexer-log-interval num-classes
    img-h img-w num-channels patch-dim vision-pretraining vision-pretraining-type vision-backbone-type
    swin-backbone-type mask-type mask-factor iter-per-epoch dino-local-img-size dino-local-crops-number
    dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer
    dino-warmup-teacher-temp dino-teacher-temp dino-warmup-teacher-temp-epochs img-embedding-idx
    language-model-type disable-vision-class-token mamba-state-dim mamba-head-dim mamba-num-groups
    mamba-num-heads ds-sequence-parallel-fpdt-chunk-size num-layers-at-start-in-bf16
    num-layers-at-end-in-bf16 wgrad-deferral-limit moe-deepep-num-sms
    """,
    "is what Megatron-LM does by default": "moe-extended-tp async-tensor-model-parallel-allreduce",
    "the types that it allows are arguments of their own": "use-precision-aware-optimizer",
    "--num-shared-experts says how many there are": "enable-shared-expert",
}
"""Names by reason; a name that ends with a dash stands for all that begin with it."""

NO_EFFECT: dict[str, str] = {name: reason for reason, names in _GROUPS.items() for name in names.split()}
"""Reason by name."""


def no_effect(names: Iterable[str]) -> dict[str, str]:
    """Return the reason of each of the arguments ``names`` that has no effect."""
    return {name: NO_EFFECT[key] for name in names if (key := _key(name)) is not None}


def _key(name: str) -> str | None:
    return name if name in NO_EFFECT else next((each for each in _BEGINNINGS if name.startswith(each)), None)


_BEGINNINGS = sorted((name for name in NO_EFFECT if name.endswith("-")), key=len, reverse=True)
