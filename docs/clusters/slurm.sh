#!/bin/bash
# A run on several nodes: sbatch slurm.sh recipe=cola epochs=3. Two minutes before its time ends, or when another job needs
# its nodes, it saves its state and goes back into the queue; started again, it continues in the same folder.
#SBATCH --job-name=runner --nodes=2 --ntasks-per-node=1 --gpus-per-node=4
#SBATCH --requeue --signal=USR1@120 --open-mode=append
folder=outputs/slurm/$SLURM_JOB_ID
if [ -e "$folder/config.yaml" ]; then run=("resume=$folder"); else run=("hydra.run.dir=$folder" "$@"); fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(scontrol show node "$first" | grep -oP 'NodeAddr=\K\S+') # a node's name need not resolve on the others
started=$(mktemp)
# USR1 is for the workers: it would end torchrun, and with it the workers before they have saved.
# A node whose worker ended before it could save does not tell the others: srun ends them after ten minutes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=115
srun --wait=600 bash -c 'trap "" USR1; exec torchrun "$@"' torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID.$SLURM_RESTART_COUNT" --rdzv-endpoint "$head:29500" \
  -m runner "${run[@]}" launch.grace_s=110
code=$?
# Slurm itself requeues only jobs that still run when their grace period ends.
if [ "$folder/summary.json" -nt "$started" ] && grep -q '"status": "PREEMPTED"' "$folder/summary.json"; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
