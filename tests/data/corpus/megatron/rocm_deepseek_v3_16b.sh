#!/bin/bash
TIMESTAMP=$(date +%Y%m%d_%H%M%S)
GPUS_PER_NODE=`python3 -c "import torch; print(torch.cuda.device_count())"`
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-$(shuf -n 1 -i 10000-65535)}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MODEL_SIZE=${MODEL_SIZE:-16B} # 16B, 671B.
TOKENIZER_MODEL="deepseek-ai/DeepSeek-V3"
MOCK_DATA="${MOCK_DATA:-1}"
DATA_CACHE_PATH=${DATA_CACHE_PATH:-"../.cache"}
if [ "$MOCK_DATA" -eq 1 ]; then
    data_args="--mock-data --data-cache-path ${DATA_CACHE_PATH}"
else
    data_args="--train-data-path data \
                --valid-data-path data \
                --test-data-path data
              "
fi
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-128}
LR=${LR:-1e-5}
MIN_LR=${MIN_LR:-1e-6}
SEQ_LEN="${SEQ_LEN:-4096}"
PAD_LEN=4096
TP=${TP:-1}  
ETP=${ETP:-1}
PP=${PP:-1}  
EP="${EP:-1}"  
ENABLE_DEEP_EP="${ENABLE_DEEP_EP:-false}"
ATTENTION_SINK_K=${ATTENTION_SINK_K:-0}
WINDOW_SIZE=${WINDOW_SIZE:-none}
TRAIN_ITERS=${TRAIN_ITERS:-10}
LR_WARMUP_ITERS=2
LR_DECAY_ITERS=$(( ${TRAIN_ITERS} - ${LR_WARMUP_ITERS}))
SAVE_INTERVAL=500000
TENSORBOARD_DIR="output/tensorboard/"
TRAIN_LOG=output/log.txt
if [ $MODEL_SIZE = 671B ]; then
    HIDDEN_SIZE=7168
    NUM_ATTN_HEADS=128 
    NUM_LAYERS=${NUM_LAYERS:-61}
    INTERMEDIATE_SIZE=18432
    MOE_INTERMEDIATE_SIZE=2048
    MAX_POSITION_EMBEDDINGS=${SEQ_LEN:-4096}
    EXTRA_VOCAB_SIZE=0 
    Q_LORA_RANK=1536
    KV_LORA_RANK=512
    QK_NOPE_HEAD_DIM=128
    QK_ROPE_HEAD_DIM=64
    V_HEAD_DIM=128
    ROPE_THETA=10000
    SCALE_FACTOR=40
    NUM_EXPERTS=256
    ROUTER_TOPK=8
    NUM_SHARED_EXPERTS=1
    MOE_LAYER_FREQ=1 # '([0]*3+[1]*58)' in full
    moe_options=" \
        --q-lora-rank ${Q_LORA_RANK} \
        --moe-router-score-function sigmoid \
        --moe-router-num-groups ${EP} \
        --moe-router-group-topk 4 \
        --moe-router-enable-expert-bias \
        --moe-router-bias-update-rate 1e-3
    "
elif [ $MODEL_SIZE = 16B ]; then
    HIDDEN_SIZE=2048
    NUM_ATTN_HEADS=16
    NUM_LAYERS=${NUM_LAYERS:-27}
    INTERMEDIATE_SIZE=10944
    MOE_INTERMEDIATE_SIZE=1408
    MAX_POSITION_EMBEDDINGS=${SEQ_LEN:-4096}
    EXTRA_VOCAB_SIZE=0
    Q_LORA_RANK=512
    KV_LORA_RANK=512
    QK_NOPE_HEAD_DIM=128
    QK_ROPE_HEAD_DIM=64
    V_HEAD_DIM=128
    ROPE_THETA=10000
    SCALE_FACTOR=40
    NUM_EXPERTS=64
    ROUTER_TOPK=6
    NUM_SHARED_EXPERTS=2
    MOE_LAYER_FREQ=([0]*3+[1]*24)
    
    moe_options=" \
        --q-lora-rank ${Q_LORA_RANK} \
        --moe-router-num-groups ${EP} \
    "
fi
moe_options=" \
    ${moe_options} \
    --moe-router-dtype fp32 \
    --multi-latent-attention \
    --qk-layernorm \
    --rerun-mode disabled \
    --attention-sink-k ${ATTENTION_SINK_K} \
    --moe-ffn-hidden-size ${MOE_INTERMEDIATE_SIZE} \
    --enable-shared-expert \
    --moe-layer-freq '${MOE_LAYER_FREQ}' \
    --num-shared-experts ${NUM_SHARED_EXPERTS} \
    --moe-shared-expert-intermediate-size  $((${NUM_SHARED_EXPERTS} * ${MOE_INTERMEDIATE_SIZE})) \
    --moe-router-load-balancing-type seq_aux_loss\
    --moe-router-topk ${ROUTER_TOPK} \
    --num-experts ${NUM_EXPERTS} \
    --moe-router-pre-softmax \
    --mscale 1.0 \
    --mscale-all-dim 1.0 \
    --moe-aux-loss-coeff 1e-2 \
    --expert-model-parallel-size ${EP} \
    --expert-tensor-parallel-size ${ETP} \
    --kv-lora-rank ${KV_LORA_RANK} \
    --qk-head-dim ${QK_NOPE_HEAD_DIM} \
    --qk-pos-emb-head-dim ${QK_ROPE_HEAD_DIM} \
    --v-head-dim ${V_HEAD_DIM} \
    --kv-channels ${V_HEAD_DIM} \
    --no-rope-fusion \
    "
if [ $ENABLE_DEEP_EP = true ]; then
    moe_options=" \
            ${moe_options} \
            --moe-token-dispatcher-type flex \
            --moe-enable-deepep \
        "
else 
    moe_options=" \
            ${moe_options} \
            --moe-token-dispatcher-type alltoall \
            --moe-shared-expert-overlap \
    "
fi
if [ $WINDOW_SIZE != none ]; then
    moe_options=" \
            ${moe_options} \
            --window-size ${WINDOW_SIZE}"
fi
megatron_options="  \
	--log-throughput \
	--no-gradient-accumulation-fusion \
	--no-async-tensor-model-parallel-allreduce \
	${data_args} \
        --lr ${LR} \
        --min-lr ${MIN_LR} \
        --lr-decay-style cosine \
        --adam-beta1 0.9 \
        --adam-beta2 0.95 \
        --weight-decay 0.1 \
        --clip-grad 1.0 \
        --init-method-std 0.008 \
        --attention-dropout 0.0 \
        --hidden-dropout 0.0 \
        --dataloader-type cyclic \
        --lr-decay-iters ${LR_DECAY_ITERS} \
        --lr-warmup-iters ${LR_WARMUP_ITERS} \
        --train-iters ${TRAIN_ITERS} \
        --micro-batch-size ${MICRO_BATCH_SIZE} \
        --global-batch-size ${GLOBAL_BATCH_SIZE} \
        --num-layers ${NUM_LAYERS} \
        --hidden-size ${HIDDEN_SIZE} \
        --num-attention-heads ${NUM_ATTN_HEADS} \
        --ffn-hidden-size ${INTERMEDIATE_SIZE} \
        --seq-length ${SEQ_LEN} \
        --max-position-embeddings ${MAX_POSITION_EMBEDDINGS} \
        --max-padding-length ${PAD_LEN} \
        --log-interval 1 \
        --eval-interval 10000 \
        --eval-iters -1 \
        --save-interval ${SAVE_INTERVAL} \
        --ckpt-format torch \
        --tensorboard-queue-size 1 \
        --tensorboard-dir ${TENSORBOARD_DIR} \
        --log-timers-to-tensorboard \
        --tensor-model-parallel-size ${TP} \
        --pipeline-model-parallel-size ${PP} \
        --num-workers 8 \
        --extra-vocab-size ${EXTRA_VOCAB_SIZE} \
        --tokenizer-type DeepSeekV3Tokenizer \
        --tokenizer-model ${TOKENIZER_MODEL}\
        --legacy-tokenizer
        --dataset LLama-Pretrain-Idxmap \
        --swiglu \
        --normalization RMSNorm \
        --norm-epsilon 1e-06 \
        --use-rotary-position-embeddings \
        --position-embedding-type rope \
        --untie-embeddings-and-output-weights \
        --disable-bias-linear \
        --rotary-base ${ROPE_THETA} \
        --rotary-scaling-factor ${SCALE_FACTOR} \
        --use-distributed-optimizer \
        --use-flash-attn \
        --bf16 \
        "
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
run_cmd="torchrun $DISTRIBUTED_ARGS pretrain_deepseek.py ${megatron_options} ${moe_options}"
run_cmd="$run_cmd | tee $TRAIN_LOG"
eval ${run_cmd}
