#!/bin/bash
TEE_OUTPUT="${TEE_OUTPUT:-1}"
USE_FLASH_ATTN="${USE_FLASH_ATTN:-0}"
ENABLE_ROPE="${ENABLE_ROPE:-1}"
GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
MASTER_ADDR="${MASTER_ADDR:-localhost}"
MASTER_PORT="${MASTER_PORT:-6000}"
NNODES="${NNODES:-1}"
NODE_RANK="${NODE_RANK:-0}"
MODEL_SIZE="${MODEL_SIZE:-1.5}"
TP="${TP:-8}"
PP="${PP:-1}"
CP="${CP:-1}"
MBS="${MBS:-2}"
BS="${BS:-8}"
SEQ_LENGTH="${SEQ_LENGTH:-2048}"
MAX_POSITION_EMBEDDINGS="${MAX_POSITION_EMBEDDINGS:-131072}"
TOTAL_ITERS="${TOTAL_ITERS:-10}"
SEQ_PARALLEL="${SEQ_PARALLEL:-1}" 
TE_FP8="${TE_FP8:-0}"
MOCK_DATA="${MOCK_DATA:-0}"
MCORE="${MCORE:-1}"
RECOMPUTE_ACTIVATIONS="${RECOMPUTE_ACTIVATIONS:-none}" # full or sel
RECOMPUTE_NUM_LAYERS="${RECOMPUTE_NUM_LAYERS:-8}"
DIST_OPTIM="${DIST_OPTIM:-1}"
OPTIMIZER="${OPTIMIZER:-adam}"
if [ "$TOTAL_ITERS" -lt 4 ]; then
    echo "too few iterations"
    exit 1
fi
DATA_PATH=${DATA_PATH:-"data/wudao_qwenbpe_text_document"}
LOG_DIR="${LOG_DIR:-logs}"
TRAIN_LOG="${LOG_DIR}/output.log"
if [ $MODEL_SIZE = 0.5 ]; then
    HIDDEN_SIZE=896
    FFN_HIDDEN_SIZE=4864
    NUM_LAYERS=24
    NUM_HEADS=14
    NUM_KV_HEADS=2
    TOKENIZER_MODEL=${TOKENIZER_MODEL:-"Qwen/Qwen2-0.5B"}
elif [ $MODEL_SIZE = 1.5 ]; then
    HIDDEN_SIZE=1536
    FFN_HIDDEN_SIZE=8960
    NUM_LAYERS=28
    NUM_HEADS=12
    NUM_KV_HEADS=2
    TOKENIZER_MODEL=${TOKENIZER_MODEL:-"Qwen/Qwen2-1.5B"}
elif [ $MODEL_SIZE = 7 ]; then
    HIDDEN_SIZE=3584
    FFN_HIDDEN_SIZE=18944
    NUM_LAYERS=28
    NUM_HEADS=28
    NUM_KV_HEADS=4
    TOKENIZER_MODEL=${TOKENIZER_MODEL:-"Qwen/Qwen2-7B"}
else
    echo "Model size not supported."
    exit 1
fi
GROUP_SIZE=$(( ${NUM_HEADS} / ${NUM_KV_HEADS} ))
NUM_GROUPS=$(( ${NUM_HEADS} / ${GROUP_SIZE} ))
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} \
    --num-layers $NUM_LAYERS \
    --hidden-size $HIDDEN_SIZE \
    --ffn-hidden-size $FFN_HIDDEN_SIZE \
    --num-attention-heads $NUM_HEADS \
    --seq-length $SEQ_LENGTH \
    --max-position-embeddings $MAX_POSITION_EMBEDDINGS \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --no-position-embedding \
    --disable-bias-linear \
    --swiglu \
    --init-method-std 0.02 \
    --attention-dropout 0.0 \
    --hidden-dropout 0.0 \
    --normalization RMSNorm \
    --micro-batch-size $MBS \
    --global-batch-size $BS \
    --train-iters $TOTAL_ITERS \
    --no-async-tensor-model-parallel-allreduce \
    --bf16 \
    --no-masked-softmax-fusion \
    --disable-bias-linear \
"
QWEN_ARGS="
    --add-qkv-bias \
    --rotary-percent 1.0 \
    --rotary-base 1000000 \
    --rotary-seq-len-interpolation-factor 1 \
"
TRAIN_ARGS="--lr 1e-4 \
        --min-lr 1e-5 \
        --lr-decay-iters 320000 \
        --lr-decay-style cosine \
        --weight-decay 1.0e-1 \
        --clip-grad 1.0 \
        --optimizer ${OPTIMIZER} \
"
DATA_ARGS="
    --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model ${TOKENIZER_MODEL} \
    --dataloader-type cyclic \
    --save-interval 200000 \
    --tensorboard-dir $LOG_DIR \
    --log-interval 1 \
    --eval-interval 320000 \
    --eval-iters 10 \
    --num-workers 8
"
if [ "$MOCK_DATA" -eq 1 ]; then
    DATA_ARGS="$DATA_ARGS --mock-data"
else
    DATA_ARGS="$DATA_ARGS --data-path $DATA_PATH"
fi
OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 5000 \
    --log-throughput \
    --no-save-optim \
    --eval-iters -1   
"
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT \
"
EXTRA_ARGS="
    --group-query-attention \
    --num-query-groups $NUM_GROUPS \
    --no-gradient-accumulation-fusion \
    --distributed-backend nccl \
    --distributed-timeout-minutes 120 \
"
if [ $RECOMPUTE_ACTIVATIONS = full ]; then
    EXTRA_ARGS="$EXTRA_ARGS --recompute-method uniform --recompute-granularity full --recompute-num-layers ${RECOMPUTE_NUM_LAYERS}"
elif [ $RECOMPUTE_ACTIVATIONS = sel ]; then
    EXTRA_ARGS="$EXTRA_ARGS --recompute-activations"
fi
if [ $DIST_OPTIM -eq 1 ]; then
    EXTRA_ARGS="$EXTRA_ARGS --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
fi
if [ "$USE_FLASH_ATTN" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --use-flash-attn"
else
EXTRA_ARGS="$EXTRA_ARGS --attention-backend fused"
fi
if [ "$SEQ_PARALLEL" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --sequence-parallel"
fi
if [ "$MCORE" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --use-mcore-models"
fi
if [ "$ENABLE_ROPE" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --position-embedding-type rope"
fi
if [ "$TE_FP8" -eq 1 ]; then
EXTRA_ARGS="$EXTRA_ARGS --transformer-impl=transformer_engine \
    --fp8-format=hybrid \
    --attention-softmax-in-fp32 \
"
fi
run_cmd="
    torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
        $GPT_ARGS \
        $QWEN_ARGS \
        $DATA_ARGS \
        $OUTPUT_ARGS \
        $EXTRA_ARGS \
        $TRAIN_ARGS \
"
if [ "$TEE_OUTPUT" -eq 0 ]; then 
    run_cmd="$run_cmd >& $TRAIN_LOG"
else
    run_cmd="$run_cmd |& tee $TRAIN_LOG"
fi
eval $run_cmd
