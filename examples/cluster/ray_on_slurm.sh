#!/usr/bin/env bash
# Ray over the nodes of one Slurm job, with the training script as the driver on the first node:
#
#     sbatch --nodes 2 --gpus-per-node 8 examples/cluster/ray_on_slurm.sh python train.py
#
# Run it in the environment, or the container, that has ray-rollout.  Each step of srun ends with
# the job, so that no engine stays on a node.
#
# Two minutes before the end of its time, the command gets SIGTERM, and the job is queued again: the
# command must continue from its last checkpoint.  One that has ended with status 0 is not.
#SBATCH --job-name=rollout
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -euo pipefail
if [ $# -eq 0 ]; then
    echo "usage: sbatch --nodes N $0 COMMAND..." >&2
    exit 2
fi
main=
is_late=
# The shell runs a trap only between commands and in `wait`.
on_late() {
    is_late=yes
    [ -z "$main" ] || kill -TERM "$main" 2>/dev/null || true
}
trap on_late USR1
port=${RAY_PORT:-6379}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address="${nodes[0]}:$port"
# Without the token, every process that reaches the head can run code on these nodes.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_ADDRESS=$address

steps=()
end() {
    if [ ${#steps[@]} -gt 0 ]; then
        kill "${steps[@]}" 2>/dev/null || true
        wait "${steps[@]}" 2>/dev/null || true
    fi
    steps=()
}
trap end EXIT
# Of a subshell, which becomes srun: a signal for the subshell then reaches it.
on_node() {
    local node=$1
    shift
    exec srun --overlap --nodes 1 --ntasks 1 --nodelist "$node" "$@"
}

on_node "${nodes[0]}" ray start --head --port "$port" --block &
steps+=($!)
for node in "${nodes[@]:1}"; do
    on_node "$node" ray start --address "$address" --block &
    steps+=($!)
done
# A launch counts the GPUs of the cluster at once, so all nodes must have joined.
count_nodes='import ray; ray.init(log_to_driver=False); print(sum(n["Alive"] for n in ray.nodes()))'
deadline=$((SECONDS + ${RAY_START_SECONDS:-300}))
until [ "$( (on_node "${nodes[0]}" python3 -c "$count_nodes" 2>/dev/null) || echo 0)" = "${#nodes[@]}" ]; do
    if [ $SECONDS -ge $deadline ] || ! kill -0 "${steps[@]}" 2>/dev/null; then
        echo "Ray at $address does not have all of: ${nodes[*]}" >&2
        exit 1
    fi
    sleep 1
done
status=0
if [ -z "$is_late" ]; then
    on_node "${nodes[0]}" "$@" &
    main=$!
    # Between the line before and this one, the signal may have come without a process to end.
    [ -z "$is_late" ] || kill -TERM "$main" 2>/dev/null || true
    wait "$main" || status=$?
    if [ -n "$is_late" ]; then
        deadline=$((SECONDS + ${COMMAND_END_SECONDS:-60}))
        while kill -0 "$main" 2>/dev/null && [ $SECONDS -lt $deadline ]; do
            sleep 0.2
        done
        kill -KILL "$main" 2>/dev/null || true
        status=0
        wait "$main" || status=$?
    fi
fi
if [ -z "$is_late" ] || { [ -n "$main" ] && [ "$status" = 0 ]; }; then
    exit "$status"
fi
end
scontrol requeue "$SLURM_JOB_ID"
