#!/usr/bin/env bash
# Ray on every node of a Slurm allocation, then a training command on the first:
#
#   sbatch recipes/slurm.sh bash recipes/musique/run_qwen3_8b_fsdp2.sh trainer.total_training_steps=20
#
# verl and verl-prefix must be installed in the Python that is first on PATH, on every node or on a shared disk. In a
# container: CONTAINER='apptainer run --nv --bind /shared image.sif'. The recipes take NNODES and NGPUS_PER_NODE from here;
# another command takes trainer.nnodes and trainer.n_gpus_per_node. The job ends with the command, by its exit code.
#SBATCH --job-name=verl-prefix
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=slurm-%j.out

set -euo pipefail

PORT=${PORT:-6379}
read -ra CONTAINER <<<"${CONTAINER:-}"
mapfile -t NODES < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")
export NNODES=${#NODES[@]} NGPUS_PER_NODE=${SLURM_GPUS_PER_NODE##*:} # h100:8 is 8
# Ray's token of this job, on every node. Newer releases ask for one, where an older cluster left it in ~/.ray.
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N16 -tx8 /dev/urandom | tr -d ' ')}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token} RAY_AUTH_TOKEN
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK} # srun does not take it from sbatch

ON=(srun --overlap --nodes=1 --ntasks=1)
HEAD=("${ON[@]}" --nodelist="${NODES[0]}")

wait_for() { # N nodes, since verl asks once how many GPUs there are; after ten minutes the job ends
    "${HEAD[@]}" "${CONTAINER[@]}" timeout 600 python3 -c "
import ray, time
while not ray.is_initialized():
    try:
        ray.init(logging_level='ERROR')
    except (ConnectionError, RuntimeError):
        time.sleep(2)
while sum(node['Alive'] for node in ray.nodes()) < $1:
    time.sleep(2)"
}

HEAD_IP=$("${HEAD[@]}" hostname --all-ip-addresses | awk '{print $1}')
export RAY_ADDRESS=${HEAD_IP}:${PORT}
RESOURCES=(--num-cpus="${SLURM_CPUS_PER_TASK}" --num-gpus="${NGPUS_PER_NODE}" --block)

trap 'jobs -p | xargs -r kill' EXIT
"${HEAD[@]}" "${CONTAINER[@]}" ray start --head --node-ip-address="${HEAD_IP}" --port="${PORT}" "${RESOURCES[@]}" &
wait_for 1
for node in "${NODES[@]:1}"; do
    "${ON[@]}" --nodelist="${node}" "${CONTAINER[@]}" ray start --address="${RAY_ADDRESS}" "${RESOURCES[@]}" &
done
wait_for "${NNODES}"

"${HEAD[@]}" "${CONTAINER[@]}" "$@"
