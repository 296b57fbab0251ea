#!/bin/bash
# Slurm job: starts Ray on every node of the allocation, and trains or resumes one run on it. docs/clusters.md
#   sbatch --nodes=2 --gpus-per-node=8 examples/cluster/slurm.sh train.toml /shared/runs/first --learner.lr 2e-6
#SBATCH --job-name=slipstream
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
set -euo pipefail

config=${1:?name a config file} run=${2:?name a run directory on a file system that all nodes share}
shift 2
if [ -n "${SLIPSTREAM_VENV:-}" ]; then . "$SLIPSTREAM_VENV/bin/activate"; fi
for program in slipstream ray; do
  command -v "$program" > /dev/null || { echo "no $program here: set SLIPSTREAM_VENV to its virtual environment" >&2; exit 1; }
done
port=${RAY_PORT:-6379} session=/tmp/ray-$SLURM_JOB_ID
export RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # without it, whoever reaches Ray's port runs code there
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }
ray_on() {  # keeps Ray running on a node, and tries again if it could not start; SIGTERM ends both
  local node=$1
  trap 'kill "$!"; exit' TERM
  while sleep 1; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" ray start "${@:2}" "${resources[@]}" --block > /dev/null &
    wait "$!" || true
  done
}
address=$(on "${nodes[0]}" hostname -I | awk '{ print $1 }'):$port
resources=(--num-cpus="${SLURM_CPUS_ON_NODE:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats)

collect() {  # ends Ray, and copies the logs of every node beside the run's own files
  trap - EXIT
  for node in "${nodes[@]}"; do
    on "$node" bash -c "mkdir -p '$run/logs/$node' && cp -rL '$session/session_latest/logs/.' '$run/logs/$node'" || true
  done
  kill $(jobs -p) 2> /dev/null || true
  wait || true
}
trap collect EXIT

joined() {  # waits until so many nodes are in the cluster
  local patience=${RAY_PATIENCE:-300}
  until [ "$(ray status --address "$address" 2> /dev/null | grep -c '^ *1 node_')" -ge "$1" ]; do
    ((patience-- > 0)) || { echo "Ray has fewer than $1 nodes; RAY_PATIENCE is over" >&2; exit 1; }
    sleep 1
  done
}
ray_on "${nodes[0]}" --head --node-ip-address="${address%:*}" --port="$port" --include-dashboard=false \
  --temp-dir="$session" &
joined 1
for node in "${nodes[@]:1}"; do
  ray_on "$node" --address="$address" &
done
joined "${#nodes[@]}"

export RAY_ADDRESS=$address  # what runtime.address = "auto" means, also after the job was requeued on other nodes
if [ -e "$run/ledger.jsonl" ]; then
  slipstream resume "$run" &
else
  slipstream train "$config" --runtime.address auto --output "$run" "$@" &
fi
coordinator=$!
trap 'kill -TERM $coordinator' TERM  # Slurm's notice before the time limit: save a checkpoint and stop
code=0
wait "$coordinator" || code=$?
while [ "$code" -gt 128 ] && kill -0 "$coordinator" 2> /dev/null; do  # the notice, not the end
  code=0
  wait "$coordinator" || code=$?
done
exit "$code"
