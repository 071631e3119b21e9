#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
CHECKPOINT_PATH=${1:-"checkpoints/deepseek2_lite_fp8"}
TENSORBOARD_LOGS_PATH=${2:-"tensorboard_logs/deepseek2_lite_fp8"}
TOKENIZER_ARG="deepseek-ai/DeepSeek-V2-Lite"
DATA_ARG=${4:-"dataset/wikitext_text_document"}
GPUS_PER_NODE=8
NUM_NODES=1
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NODE_RANK=${NODE_RANK:-0}
PRETRAIN_SCRIPT_PATH="pretrain_gpt.py"
TP_SIZE=8
CP_SIZE=1     
PP_SIZE=1     
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=64
NUM_LAYERS=16 
MOE_LAYERS=$(($NUM_LAYERS-1))
DTYPE="bf16"
SEQ_LENGTH=1024
MAX_POSITION_EMBEDDINGS=1024
DATA_CACHE_PATH="${PWD}/cache"

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
GPT_ARGS=(
    --num-layers $NUM_LAYERS 
    --hidden-size 2048 
    --ffn-hidden-size 10944 
    --num-attention-heads 16 
    --kv-channels 16 
    --seq-length $SEQ_LENGTH 
    --max-position-embeddings $MAX_POSITION_EMBEDDINGS 
    --attention-dropout 0.0 
    --hidden-dropout 0.0 
    --disable-bias-linear 
    --untie-embeddings-and-output-weights 
    --normalization RMSNorm 
    --norm-epsilon 1e-6 
    --swiglu 
    --no-masked-softmax-fusion 
    --attention-softmax-in-fp32 
    --use-mcore-models 
    --tokenizer-type HuggingFaceTokenizer 
    --make-vocab-size-divisible-by 3200 
    --transformer-impl local
)
MLA_ARGS=(
    --multi-latent-attention 
    --kv-lora-rank 512 
    --v-head-dim 128 
    --qk-head-dim 128 
    --qk-layernorm 
    --qk-pos-emb-head-dim 64 
)
MOE_ARGS=(
    --num-experts 64 
    --moe-layer-freq "([0]+[1]*$MOE_LAYERS)" 
    --moe-ffn-hidden-size 1408 
    --moe-grouped-gemm 
    --moe-router-score-function softmax 
    --moe-router-topk 6 
    --moe-router-topk-scaling-factor 1.0 
    --moe-router-pre-softmax 
    --moe-shared-expert-intermediate-size 2816 
    --moe-aux-loss-coeff 1e-3 
    --moe-token-dispatcher-type alltoall 
    --moe-token-drop-policy probs 
    --moe-router-load-balancing-type seq_aux_loss 
)
ROPE_ARGS=(
    --position-embedding-type rope 
    --no-rope-fusion 
    --rotary-percent 1.0 
    --rotary-base 10000 
    --rotary-scaling-factor 40 
    --mscale 0.707 
    --mscale-all-dim 0.707 
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO_BATCH_SIZE
    --global-batch-size $GLOBAL_BATCH_SIZE
    --train-samples 47340000
    --lr-decay-samples 47245280
    --lr-warmup-samples 94720
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss 
    --manual-gc 
    --empty-unused-memory-level 1 
    --exit-duration-in-mins 235000000
    --no-persist-layer-norm
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    if grep -q "transformer-impl local" <<< "${GPT_ARGS[@]}"; then
        echo "ERROR: needs transformer_engine"
        exit 1
    fi
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    --pipeline-model-parallel-size $PP_SIZE
    --sequence-parallel
)
DDP_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
DATA_ARGS_LIST=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS_LIST+=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 128256" 
        "--data-cache-path ${DATA_CACHE_PATH}"
        "--tiktoken-pattern v2" 
        "--split '99,1,0'"
        "--num-workers 1"
    )
else
    DATA_ARGS_LIST+=(
        "--data-path $DATA_ARG"
        "--tokenizer-type HuggingFaceTokenizer" 
        "--tokenizer-model $TOKENIZER_ARG"
        "--data-cache-path ${DATA_CACHE_PATH}"
        "--split '99,1,0'"
        "--no-create-attention-mask-in-dataloader"
        # "--no-mmap-bin-files"
        "--num-workers 1"
        "--vocab-size 128256"
    )
fi
EVAL_AND_LOGGING_ARGS=(
    --log-interval 1
    --eval-iters 32
    --eval-interval 100
    --save-interval 1000
    --log-throughput
    # --profile
    --ckpt-format torch_dist 
    --distributed-timeout-minutes 120
    --save "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)
torchrun ${DISTRIBUTED_ARGS[@]} \
    "$PRETRAIN_SCRIPT_PATH" \
    ${GPT_ARGS[@]} \
    ${MLA_ARGS[@]} \
    ${ROPE_ARGS[@]} \
    ${MOE_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${DTYPE_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS_LIST[@]} \
    ${EVAL_AND_LOGGING_ARGS[@]}
