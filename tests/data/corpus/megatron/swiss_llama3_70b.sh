#!/bin/bash
#SBATCH --nodes=32
#SBATCH --gpus-per-node=4
MBS=1 # Micro batch size
GBS=1024
SEQ_LEN=8192
TRAINING_STEPS=500
CHECKPOINT_STEPS=250
LOG_NCCL=false
NSYS_PROFILER=false
MOCK_DATA=false
MEGATRON_LM_DIR=/scratch/$USER/Megatron-LM
DATASET_CACHE_DIR=/scratch/$USER/cache
PROJECT_NAME=Megatron
EXP_NAME=llama3-$SLURM_NNODES-nodes
CKPT_DIR=$MEGATRON_LM_DIR/checkpoints
LOGGING_DIR=$MEGATRON_LM_DIR/logging
TENSORBOARD_DIR=$LOGGING_DIR/tensorboard
MASTER_ADDR=$(hostname)
MASTER_PORT=25678
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK/SLURM_GPUS_PER_NODE))
TRANSFORMER_ENGINE_ARGS=(
	--transformer-impl transformer_engine
	--use-precision-aware-optimizer
	--main-grads-dtype bf16
)
NETWORK_SIZE_ARGS=(
	--num-layers 80
	--hidden-size 8192
	--ffn-hidden-size 28672
	--num-attention-heads 64
	--group-query-attention
	--num-query-groups 8
	--max-position-embeddings $SEQ_LEN
	--position-embedding-type rope
	--rotary-base 500000
	--use-rope-scaling
	--rope-scaling-factor 8
	--make-vocab-size-divisible-by 128
	--normalization RMSNorm
	--swiglu
	--untie-embeddings-and-output-weights
)
LOGGING_ARGS=(
	--log-throughput
	--log-progress
	--tensorboard-dir $TENSORBOARD_DIR
	--log-timers-to-tensorboard
	--no-log-loss-scale-to-tensorboard
	--log-memory-to-tensorboard
)
REGULARIZATION_ARGS=(
	--attention-dropout 0.0
	--hidden-dropout 0.0
	--weight-decay 0.1
	--clip-grad 1.0
	--adam-beta1 0.9
	--adam-beta2 0.95
)
TRAINING_ARGS=(
	--micro-batch-size $MBS
	--global-batch-size $GBS
	--no-check-for-nan-in-loss-and-grad
	--train-iters $TRAINING_STEPS
	--log-interval 1
	--cross-entropy-loss-fusion
	--disable-bias-linear
	--optimizer adam
	--dataloader-type single
	--manual-gc
	--manual-gc-interval 50
)
INITIALIZATION_ARGS=(
	--seed 28
	--init-method-std 0.008944
)
LEARNING_RATE_ARGS=(
	--lr 0.00015
	--min-lr 0.000015
	--lr-decay-style cosine
	--lr-warmup-iters 200
)
CHECKPOINTING_ARGS=(
	--save $CKPT_DIR
	--save-interval $CHECKPOINT_STEPS
	--ckpt-format torch_dist
	--load $CKPT_DIR
	--async-save
)
MIXED_PRECISION_ARGS=(
	--bf16
)
DISTRIBUTED_ARGS=(
	--tensor-model-parallel-size $SLURM_GPUS_PER_NODE
	--sequence-parallel
	--pipeline-model-parallel-size 8
	--num-layers-per-virtual-pipeline-stage 5
	--context-parallel-size 1
	--use-distributed-optimizer
    --overlap-grad-reduce
	--overlap-param-gather
	--defer-embedding-wgrad-compute
	--wgrad-deferral-limit 22
	--overlap-p2p-communication-warmup-flush
)
TOKENIZER_ARGS=(
	--tokenizer-type HuggingFaceTokenizer
	--tokenizer-model some/tokenizer
)
DATA_ARGS=(
	--split 100,0,0
	--seq-length $SEQ_LEN
	--num-workers 1
	--num-dataset-builder-threads 1
)
srun -l bash -c 'echo $(hostname) $(nvidia-smi | grep -o "|\\s*[0-9]*MiB")' > memory.txt
if [ "$MOCK_DATA" = true ]; then
  DATA_ARGS="${DATA_ARGS[@]} --mock-data"
else
  DATA_ARGS="${DATA_ARGS[@]} --data-path $(python3 $MEGATRON_LM_DIR/create_data_config.py -p $DATASETS) --data-cache-path $DATASET_CACHE_DIR"
fi
TORCHRUN_ARGS=(
    --nproc-per-node $SLURM_GPUS_PER_NODE
	--nnodes $SLURM_NNODES
	--rdzv_endpoint $MASTER_ADDR:$MASTER_PORT
	--rdzv_backend c10d
	--max_restarts 0
	--tee 3
)
CMD_PREFIX="numactl --membind=0-3"
TRAINING_CMD="torchrun ${TORCHRUN_ARGS[@]} $MEGATRON_LM_DIR/pretrain_gpt.py \
    ${TRANSFORMER_ENGINE_ARGS[@]} \
    ${NETWORK_SIZE_ARGS[@]} \
    ${LOGGING_ARGS[@]} \
    ${REGULARIZATION_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${INITIALIZATION_ARGS[@]} \
    ${LEARNING_RATE_ARGS[@]} \
    ${CHECKPOINTING_ARGS[@]} \
    ${MIXED_PRECISION_ARGS[@]} \
    ${DISTRIBUTED_ARGS[@]} \
    ${TOKENIZER_ARGS[@]} \
    $DATA_ARGS"
if [ -n "$WANDB_API_KEY" ]; then
  TRAINING_CMD="$TRAINING_CMD \
    --wandb-save-dir $LOGGING_DIR \
    --wandb-project $PROJECT_NAME \
    --wandb-exp-name $EXP_NAME-$SLURM_JOB_ID"
else
  export WANDB_MODE=disabled
fi
if [ "$NSYS_PROFILER" = true ]; then
    NSYS_LAUNCHER="nsys profile -s none --trace='nvtx,cudnn,cublas,cuda' --force-overwrite true --capture-range=cudaProfilerApi --capture-range-end=stop"
    TRAINING_CMD="$NSYS_LAUNCHER $TRAINING_CMD --profile"
fi
printf '=%.0s' {1..100} >> environment.txt
srun -lu --cpus-per-task $SLURM_CPUS_PER_TASK --wait 60 bash -c "$CMD_PREFIX $TRAINING_CMD"
