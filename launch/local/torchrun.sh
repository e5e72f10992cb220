#!/usr/bin/env bash
# Start a job's ranks with torchrun instead of `oppo`'s own launcher, on this machine or on several.
#   launch/local/torchrun.sh RANKS_HERE train|sft|rm CONFIG.yaml [a.b=c ...]
# Several machines: call it on each with the same NNODES and MASTER_ADDR (the host of node 0), and its own NODE_RANK:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/local/torchrun.sh 4 train CONFIG.yaml
# MASTER_PORT (29500) must be free there; after RENDEZVOUS_TIMEOUT_S (300) machines that have not met are an error.
# MAX_RESTARTS=N starts all ranks again, up to N times, where one is killed: give `checkpoint.every_steps=S --resume`, too.
# nvidia-resiliency-ext's ft_launcher does it where it is installed, else torchrun.
# All ranks together must be as many as the placement asks for: `oppo train CONFIG.yaml --dry-run` prints it.
set -euo pipefail
if [[ $# -lt 3 || $1 == -h || $1 == --help ]]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    [[ ${1:-} == -* ]]
    exit
fi
ranks=$1
shift
meeting=(--standalone)
if [[ ${NNODES:-1} -gt 1 ]]; then
    meeting=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?the number of this machine, from 0}"
        --master-addr "${MASTER_ADDR:?the host of node 0}" --master-port "${MASTER_PORT:-29500}"
        --rdzv-conf "timeout=${RENDEZVOUS_TIMEOUT_S:-300}")
fi
launcher=(torchrun)
if [[ ${MAX_RESTARTS:-0} -gt 0 ]]; then
    if command -v ft_launcher > /dev/null; then
        launcher=(ft_launcher --ignore-missing-fault-tol-cfg)
    fi
    launcher+=(--max-restarts "$MAX_RESTARTS")
fi
exec "${launcher[@]}" "${meeting[@]}" --nproc-per-node "$ranks" --no-python oppo "$@"
