#!/usr/bin/bash
ROOT="$( cd "$( dirname "${BASH_SOURCE[0]}" )/../.." && pwd )"
DIST_ENV=${DIST_ENV:-dsw}
MEGATRON_PATH=$ROOT # patch
if [ $DIST_ENV = dsw ]; then
MASTER_ADDR=localhost
MASTER_PORT=$(shuf -n 1 -i 10000-65535)
NNODES=1
NODE_RANK=0
GPUS_PER_NODE=8
elif [ $DIST_ENV = dlc ]; then
NNODES=${WORLD_SIZE}
NODE_RANK=${RANK}
GPUS_PER_NODE=${KUBERNETES_CONTAINER_RESOURCE_GPU}
fi
TP=8
PP=1
CP=1
EDP=8
ETP=1
DO=${DIST_OPT:-true}
TE=${TE:-true} # ${TE:-false}
PRETRAIN_CHECKPOINT_PATH="/raid/gpt-oss-20b"
OUTPUT_BASEPATH=output
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT \
"
load_options="
    --load $PRETRAIN_CHECKPOINT_PATH"
DATASET_PATH=${DATASET_PATH}
if [ -z "$DATASET_PATH" ];then
  load_dataset="--mock-data"
else
  load_dataset="--train-data-path ${DATASET_PATH}"
fi
if [ $DO = true ]; then
    do_options=" \
		--use-distributed-optimizer"
elif [ $DO = false ]; then
    do_options=" \
                    "
fi
if [ $TE = true ]; then
    te_options=" \
		--transformer-impl transformer_engine"
elif [ $TE = false ]; then
    te_options=" \
        --transformer-impl local"
fi
pr_options=" \
    --bf16
    --fp8-format hybrid \
    --fp8-param-gather \
    --fp8-amax-compute-algo max \
    --fp8-amax-history-len 1024"
GPT_OSS_SFT_MODEL_ARGS=" \
    --no-masked-softmax-fusion \
    --untie-embeddings-and-output-weights \
    --no-rope-fusion \
    --normalization RMSNorm \
    --num-layers 24 \
    --hidden-size 2880 \
    --ffn-hidden-size 2880 \
    --num-attention-heads 64 \
    --group-query-attention \
    --num-query-groups 8 \
    --kv-channels 64 \
    --seq-length 4096 \
    --max-position-embeddings 4096 \
    --make-vocab-size-divisible-by 128 \
    --use-mcore-models \
    --rotary-percent 1.0 \
    --rotary-base 150000 \
    --no-bias-gelu-fusion \
    --sequence-parallel \
    --export-force-local-attention \
    --no-bias-dropout-fusion \
    --padded-vocab-size 201088 \
    --quick-geglu \
    --glu-linear-offset 1.0 \
    --softmax-type learnable \
    --window-attn-skip-freq 2 \
    --activation-func-clamp-value 7.0 \
    --window-size 128,0 \
    --enable-gpt-oss \
"
MODEL_ARGS=(
    --init-method-std 0.01
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --rope-type yarn
    --position-embedding-type yarn
)
MOE_ARGS=(
    --num-experts 32
    --moe-router-load-balancing-type none # aux_loss by default
    --moe-router-topk 4
    --moe-aux-loss-coeff 0.0
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-ffn-hidden-size 2880
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-router-score-function softmax
)
DATA_ARGS=(
    $load_dataset
    --data-cache-path $OUTPUT_BASEPATH/index_mapping
    --num-workers 5
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$PRETRAIN_CHECKPOINT_PATH/tokenizer"
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --lr 1e-4
    --train-iters 500000
    --lr-decay-iters 320000
    --lr-decay-style cosine
    --min-lr 1.0e-5
    --weight-decay 0.1
    --lr-warmup-iters 500
    --clip-grad 1.0
    --overlap-grad-reduce
    --overlap-param-gather
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --context-parallel-size $CP
    --expert-model-parallel-size $EDP
    --expert-tensor-parallel-size $ETP
    --sequence-parallel
    --use-distributed-optimizer
    --disable-gloo-process-groups
    --enable-gpt-oss
)
OUTPUT_ARGS="
        --log-interval 1 \
        --eval-interval 1000 \
        --eval-iters 0 \
        --save-interval ${SAVE_INTERVAL:-50}
        --save "${OUTPUT_BASEPATH}/checkpoint" \
"
LOGGING_ARGS="
        --timing-log-level 2 \
        --log-throughput
        --log-timers-to-tensorboard \
        --log-validation-ppl-to-tensorboard \
        --tensorboard-queue-size 1 \
        --tensorboard-dir "${OUTPUT_BASEPATH}/tensorboard" \
"
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"GptOSS-20b-bf16-SFT"}
        --wandb-exp-name ${WANDB_NAME:-"gptoss-20b-bf16"} 
    )
fi
torchrun ${DISTRIBUTED_ARGS[@]} $MEGATRON_PATH/pretrain_gpt.py \
    $load_options \
    $GPT_OSS_SFT_MODEL_ARGS \
    ${MODEL_ARGS[@]} \
    $do_options \
    $te_options \
    ${MOE_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    --recompute-activations \
    $pr_options \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${OUTPUT_ARGS} \
    ${LOGGING_ARGS} 2>&1 | tee ${OUTPUT_BASEPATH}/log.txt
