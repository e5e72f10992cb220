#!/usr/bin/env bash
# Run a command of `oppo`; where it was told to stop and has saved (exit code 75), start it again with --resume.
#   launch/local/requeue.sh oppo train CONFIG.yaml [a.b=c ...]
# MAX_REQUEUES (20) bounds how often, REQUEUE_PAUSE_S (5) is the pause before. Ends with the command's exit code; 75 where
# there is no further start. SIGTERM, SIGUSR1 or SIGINT to this script is passed on, and then nothing is started again.
set -uo pipefail
if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
    sed -n '2,5s/^# \{0,1\}//p' "$0"
    exit $(($# == 0))
fi
told=0 interrupted=0 child=
pass_on() {
    told=1 interrupted=1
    [[ -z $child ]] || kill -s "$1" "$child" 2>/dev/null
}
trap 'pass_on TERM' TERM INT # a command behind `&` does not hear SIGINT
trap 'pass_on USR1' USR1
resume=()
for ((left = ${MAX_REQUEUES:-20}; ; left--)); do
    "$@" ${resume[@]+"${resume[@]}"} &
    child=$!
    while true; do
        interrupted=0
        wait "$child"
        code=$?
        ((interrupted)) || break # else a signal ended the wait, not the command
    done
    child=
    if ((code != 75 || told || left <= 0)); then
        exit "$code"
    fi
    resume=(--resume)
    echo "requeue: told to stop and saved; starting again in ${REQUEUE_PAUSE_S:-5} s, $((left - 1)) more times" >&2
    sleep "${REQUEUE_PAUSE_S:-5}" &
    wait $!
    ((told)) && exit 75
done
