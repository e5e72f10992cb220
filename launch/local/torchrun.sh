#!/usr/bin/env bash
# Start a job's ranks with torchrun instead of `oppo`'s own launcher, on this machine.
#   launch/local/torchrun.sh NUM_RANKS train|sft|rm CONFIG.yaml [a.b=c ...]
# NUM_RANKS must be what the placement asks for: `oppo train CONFIG.yaml --dry-run` prints it.
set -euo pipefail
if [[ $# -lt 3 || $1 == -h || $1 == --help ]]; then
    sed -n '2,4s/^# \{0,1\}//p' "$0"
    exit $(($# < 3))
fi
ranks=$1
shift
exec torchrun --standalone --nproc-per-node "$ranks" --no-python oppo "$@"
