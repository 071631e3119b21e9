#!/bin/bash
set -ex
DIR=`pwd`
BASE_PATH=dataset
DS_CONFIG=${BASE_PATH}/deepspeed.json
DATASET=${BASE_PATH}/my-gpt2_text_document
TOKENIZER_PATH=${BASE_PATH}/llama-7b/tokenizer.model
HIDDEN_SIZE=2048
FFN_HIDDEN_SIZE=5504
NUM_LAYERS=24
NUM_HEADS=16
SEQ=2048
LR_WARMUP_STEPS=2000
WEIGHT_DECAY=0.1
GRAD_CLIP=1
activation_checkpoint="false"
ZERO_STAGE=1
#DTYPE="fp16"
DTYPE="bf16"
TP=2
PP=2
DP=2
SP=1
WORLD_SIZE=$((TP*PP*DP*SP))
GLOBAL_BATCH=32
MICRO_BATCH=$((GLOBAL_BATCH/WORLD_SIZE))
TRAIN_ITERS=250000
LR=3e-4
MIN_LR=3e-5
DEBUG_MODE=1
if [[ $DEBUG_MODE == 1 ]]; then
        EXIT_INTERVAL=200
        SIZE_TAG="toy"
else
        EXIT_INTERVAL=$TRAIN_ITERS
        SIZE_TAG="big"
fi  
EXP_DIR="z${ZERO_STAGE}_uni_ckpt" 
CHECKPOINT_PATH=${EXP_DIR}/checkpoints/${SIZE_TAG}
LOG_DIR="${EXP_DIR}/tensorboard"
ds_args=""
ds_args=" --deepspeed ${ds_args}"
ds_args=" --deepspeed_config=$DS_CONFIG ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
if [ "${activation_checkpoint}" = "true" ]; then
  ds_args="--deepspeed-activation-checkpointing ${ds_args}"
  ds_args="--recompute-granularity full --recompute-method uniform ${ds_args}"
fi
if [[ ${ZERO_STAGE} -gt 1 ]]; then
ds_args="${ds_args} \
    --no-pipeline-parallel"
fi
options=" \
       --tensor-model-parallel-size $TP \
       --pipeline-model-parallel-size $PP \
       --ds-sequence-parallel-size $SP \
       --num-layers $NUM_LAYERS \
       --hidden-size $HIDDEN_SIZE \
       --ffn-hidden-size $FFN_HIDDEN_SIZE \
       --num-attention-heads $NUM_HEADS \
       --micro-batch-size $MICRO_BATCH \
       --global-batch-size $GLOBAL_BATCH \
       --seq-length $SEQ \
       --max-position-embeddings $SEQ \
       --train-iters $TRAIN_ITERS \
       --save ${CHECKPOINT_PATH} \
       --load ${CHECKPOINT_PATH} \
       --data-path $DATASET \
       --data-impl mmap \
       --tokenizer-type GPTSentencePieceTokenizer \
       --tokenizer-model $TOKENIZER_PATH \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr $LR \
       --lr-decay-style cosine \
       --min-lr $MIN_LR \
       --weight-decay $WEIGHT_DECAY \
       --clip-grad $GRAD_CLIP \
       --lr-warmup-iters $LR_WARMUP_STEPS \
       --optimizer adam \
       --adam-beta1 0.9 \
       --adam-beta2 0.95 \
       --log-interval 1 \
       --save-interval 100 \
       --eval-interval 10 \
       --eval-iters 40 \
	   --exit-interval ${EXIT_INTERVAL} \
       --${DTYPE} \
       --no-query-key-layer-scaling \
       --attention-dropout 0 \
       --hidden-dropout 0 \
       --use-rotary-position-embeddings \
       --untie-embeddings-and-output-weights \
       --swiglu \
       --normalization rmsnorm \
       --disable-bias-linear \
       --tensorboard-dir $LOG_DIR \
       $ds_args
"
WORKER_STR="--num_nodes 1 --num_gpus $WORLD_SIZE"
run_cmd="deepspeed --master_port 29700 $WORKER_STR ${DIR}/pretrain_gpt.py $@ ${options}"
echo ${options}
echo ${run_cmd}
eval ${run_cmd}
#       --hidden-size $HIDDEN_SIZE \
