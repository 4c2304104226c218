#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# sbatch deploy/slurm.sh train.py --your-arguments: one launcher a node, one process a GPU.
set -euo pipefail

export WANSHIM_PLAN=${WANSHIM_PLAN:-sequence} # the GPUs of a node train each sample together
export WANSHIM_PG_TIMEOUT_S=3600
export WANSHIM_RESUME=${WANSHIM_RESUME:-auto} # after a crash, a restart or a requeue the run goes on where it was
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else processes that torchrun restarts meet at the addresses of those that ended
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds that torchrun leaves its processes to end a step and save the state
export WANSHIM_PROGRESS_DIR=${SHARED:-$PWD}/training_logs # a folder that all nodes see
export WANSHIM_CACHE_DIR=${SHARED:-$PWD}/wanshim_cache    # likewise; it has to belong to you, mode 0700

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=${PORT:-29500}

# Two minutes before the time limit: all processes save their state, and the job goes back into the queue.
requeue() {
  kill -TERM "$training" || true
  wait "$training" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}
trap requeue USR1

srun wanshim run -- torchrun --max-restarts 3 --nnodes "$SLURM_NNODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
  --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID" "$@" &
training=$!
wait "$training"
