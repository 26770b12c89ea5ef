#!/bin/bash
# One server on two nodes of 4 GPUs each, a stage on each: sbatch serving/recipes/slurm.sh
#SBATCH --job-name=dsv41
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
set -euo pipefail

export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}"
model="${MODEL:-/data/DeepSeek-V4.1-Flash}"

# One task a node: it takes all GPUs of its node. Task 0 serves, on the first node of the job.
# scancel sends SIGTERM, and SIGKILL after KillWait (30 s): requests get less than that to finish.
exec srun --kill-on-bad-exit=1 \
    python -m serving.main --distributed --model "$model" --host 0.0.0.0 --port 8000 \
    --pipeline-stages 20,20 --tensor-parallel-size 4 --max-model-len 131072 --max-num-seqs 4 \
    --max-num-batched-tokens 512 --kv-cache-memory-bytes 4G --engram-placement ram \
    --shutdown-timeout 20
