#!/bin/bash
CURRENT_DIR="$( cd "$( dirname "$0" )" && pwd )"
GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
RUN_ENV="${RUN_ENV:-cluster}"
if [ $RUN_ENV = cluster ]; then
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-27777}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
elif [ $RUN_ENV = slurm ]; then
MASTER_ADDR=${SLURM_MASTER_ADDR}
MASTER_PORT=${SLURM_MASTER_PORT}
NNODES=$SLURM_NNODES
NODE_RANK=${SLURM_NODEID}
fi
MODEL_SIZE=${MODEL_SIZE:-"8x7B"}
TP_SIZE=${TP_SIZE:-8}
PP_SIZE=${PP_SIZE:-1}
EP_SIZE=${EP_SIZE:-8}
ETP_SIZE=${ETP_SIZE:-1}
CP_SIZE=${CP_SIZE:-1}
SP=${SP:-true}
GBS=${GBS:-64}
MBS=${MBS:-4}
SEQLEN=${SEQLEN:-4096}
PR=${PR:-bf16} # bf16, fp16, fp8
TRAIN_ITERS=${TRAIN_ITERS:-10}
LR_WARMUP_ITERS=2
LR_DECAY_ITERS=$(( ${TRAIN_ITERS} - ${LR_WARMUP_ITERS}))
TOKENIZER_MODEL=${TOKENIZER_MODEL:-"/path/to/tokenizer.model"}
EXTRA_ARGS=(
    --use-flash-attn
    --no-gradient-accumulation-fusion
    --moe-layer-freq 1
)
PROFILE=${PROFILE:-false}
FORCE_BALANCE=${FORCE_BALANCE:-false}
TENSORBOARD_DIR="output/tensorboard/"
TRAIN_LOG=output/log.txt
if [ $PROFILE = true ]; then
    EXTRA_ARGS+=(
            --profile 
            --profile-ranks 0 
            --use-pytorch-profiler 
            --moe-router-force-load-balancing
            )
elif [ $FORCE_BALANCE = true ]; then
    EXTRA_ARGS+=(
            --moe-router-force-load-balancing
        )
fi
if [ $PR = fp16 ]; then
    pr_options=(
		    --fp16 
            --apply-query-key-layer-scaling)
elif [ $PR = bf16 ]; then
    pr_options=(
        --bf16)
elif [ $PR = fp8 ]; then
    TRANSFORMER_IMPL=transformer_engine
    pr_options=(
        --bf16
        --fp8-format hybrid 
        --fp8-amax-compute-algo max 
        --fp8-amax-history-len 1024)
else
    profile_options=()
fi
USE_GROUPED_GEMM="${USE_GROUPED_GEMM:-true}"
MOE_USE_LEGACY_GROUPED_GEMM="${MOE_USE_LEGACY_GROUPED_GEMM:-true}"
GPT_LAYER_IN_TE="${GPT_LAYER_IN_TE:-true}"
AC="${AC:-none}" #none #sel #full
export RECOMPUTE_METHOD=${RECOMPUTE_METHOD:-block} # block uniform
export RECOMPUTE_NUM_LAYERS=${RECOMPUTE_NUM_LAYERS:-1}
if [ $AC = full ]; then
    activation_checkpoint_options=(
		    --recompute-method ${RECOMPUTE_METHOD} 
		    --recompute-granularity full 
            --recompute-num-layers ${RECOMPUTE_NUM_LAYERS})
elif [ $AC = sel ]; then
    activation_checkpoint_options=(
        --recompute-activations)
elif [ $AC = none ]; then
    activation_checkpoint_options=()
    
fi
MOE_PERMUTE_FUSION=${MOE_PERMUTE_FUSION:-false}
if [ $MOE_PERMUTE_FUSION != false ]; then
    moe_permute_fustion_options=" \
            --moe-permute-fusion "
else
    moe_permute_fustion_options=""
fi
if [ $USE_GROUPED_GEMM = true ]; then
    USE_GROUPED_GEMM_OPTION="--moe-grouped-gemm"
else
    USE_GROUPED_GEMM_OPTION=""
fi
if [ $MOE_USE_LEGACY_GROUPED_GEMM = true ]; then
    USE_LEGACY_GROUPED_GEMM_OPTION="--moe-use-legacy-grouped-gemm"
else
    USE_LEGACY_GROUPED_GEMM_OPTION=""
fi
if [ $GPT_LAYER_IN_TE = true ]; then
    TRANSFORMER_IMPL=transformer_engine
else
    TRANSFORMER_IMPL=local
fi
if [ -z ${MP_VP} ]; then
    vp_options=()
else
    vp_options=(
        --num-layers-per-virtual-pipeline-stage ${MP_VP} 
        )
fi
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
if [ "$MODEL_SIZE" = "8x7B" ]; then
    NUM_LAYERS=${NUM_LAYERS:-32}
elif [ "$MODEL_SIZE" = "8x22B" ]; then
    NUM_LAYERS=${NUM_LAYERS:-56}
else
    echo "invalid model size"
    exit 1
fi
if [ "$MODEL_SIZE" = "8x7B" ]; then
MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length ${SEQLEN}
    --max-position-embeddings 32768
    --num-layers $NUM_LAYERS
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --no-masked-softmax-fusion
    --no-position-embedding
    --rotary-base 1000000
)
elif [ "$MODEL_SIZE" = "8x22B" ]; then
MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length ${SEQLEN}
    --max-position-embeddings 65536
    --num-layers $NUM_LAYERS
    --hidden-size 6144
    --ffn-hidden-size 16384
    --num-attention-heads 48
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --rotary-base 1000000
)
else
    echo "invalid model size"
    exit 1
fi
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --transformer-impl ${TRANSFORMER_IMPL} 
    $USE_GROUPED_GEMM_OPTION 
    $USE_LEGACY_GROUPED_GEMM_OPTION 
    --moe-token-dispatcher-type alltoall
    --overlap-grad-reduce
    --overlap-param-gather
    $moe_permute_fustion_options
)
MOCK_DATA="${MOCK_DATA:-1}"
DATA_CACHE_PATH="${DATA_CACHE_PATH:-../.cache}"
DATA_ARGS=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model ${TOKENIZER_MODEL}
    --split 9900,80,20
)
if [ $MOCK_DATA = 1 ];then
	EXTRA_ARGS+=( 
	--mock-data 
	--data-cache-path $DATA_CACHE_PATH
	)
else
	EXTRA_ARGS+=( 
	--data-path data
	--data-cache-path ${DATA_CACHE_PATH} 
	)
fi
TRAINING_ARGS=(
    --micro-batch-size ${MBS}
    --global-batch-size ${GBS}
    --lr 1e-4
    --train-iters ${TRAIN_ITERS}
    --lr-decay-iters ${LR_DECAY_ITERS}
    --lr-decay-style cosine
    --min-lr 1.0e-5
    --weight-decay 0.1
    --lr-warmup-iters ${LR_WARMUP_ITERS}
    --clip-grad 1.0
    --seed 1234
    --ckpt-format torch 
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP_SIZE}
    --pipeline-model-parallel-size ${PP_SIZE}
    --expert-model-parallel-size ${EP_SIZE}
    --expert-tensor-parallel-size ${ETP_SIZE}
    --context-parallel-size ${CP_SIZE} 
    --use-distributed-optimizer
)
if [ $SP = true ] && [ "$TP_SIZE" -gt 1 ]; then
    MODEL_PARALLEL_ARGS+=( --sequence-parallel )
fi
LOGGING_ARGS=(
    --log-interval 1
    --save-interval 500
    --eval-interval 1000000
    --eval-iters -1
    --log-throughput
    --tensorboard-log-interval 1
    --tensorboard-dir ${TENSORBOARD_DIR}/tensorboard
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
        --wandb-exp-name ${WANDB_NAME:-${MODEL_SIZE}}
        --wandb-save-dir logs/wandb 
    )
fi
command="torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${pr_options[@]} \
    ${activation_checkpoint_options[@]} \
    ${MOE_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${LOGGING_ARGS[@]} \
    ${EXTRA_ARGS[@]}"

command="$command  2>&1 | tee $TRAIN_LOG"
echo "launch_command=${command}"
eval ${command}
