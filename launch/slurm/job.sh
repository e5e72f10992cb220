# shellcheck shell=bash
# shellcheck disable=SC2317 # tasks call some functions: srun starts a shell that is given their text
# What a job of launch/slurm does on its first node, with CONFIG.yaml [a.b=c ...] as arguments: check the nodes, start a task a
# rank with srun, pass signals on, end a component whose peer has gone, and requeue the job where there is more to do.
#
# Exit codes: 0 finished, 75 to be requeued (done here, up to OPPO_MAX_RESTARTS), others as `oppo train` has them.
set -uo pipefail # not -e: exit codes are read below

say() { echo "oppo slurm [$(date +%FT%T) restart $restart]: $*" >&2; }
die() {
    say "$*"
    exit 2
}

# --- In a task -----------------------------------------------------------------------------------------------------------

# Start one rank.  Slurm signals this shell alone (proctrack/cgroup) or its children, too (proctrack/linuxproc), so what comes
# is passed on as SIGUSR1, which asks for nothing twice.  The exit code is kept in a file: srun's own is the largest of all
# tasks', and tasks that it ends because another failed hide why that one did.  75 becomes 0, or srun would end those ranks
# that are about to leave, too.
run_rank() { # RECORDS FIRST_RANK NUM_RANKS FIRST_NODE RANKS_PER_NODE COMMAND...
    local records=$1 child='' told=0 code later
    export RANK=$(($2 + SLURM_PROCID)) WORLD_SIZE=$3 LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$5
    export GROUP_RANK=$(($4 + SLURM_NODEID)) # as torchrun names the number of a node
    shift 5
    trap 'told=1; [[ -z $child ]] || kill -USR1 "$child" 2>/dev/null' USR1 TERM
    trap '[[ -z $child ]] || kill -USR2 "$child" 2>/dev/null' USR2 # asks for the stacks of a rank
    setup_rank
    "$@" &
    child=$!
    ((!told)) || kill -USR1 "$child" 2>/dev/null
    while :; do
        wait "$child"
        code=$?
        if ((code <= 128)) || ! kill -0 "$child" 2>/dev/null; then break; fi # else a trap ended the wait
    done
    if ((code > 128)); then # the child may have ended while a trap ended the wait
        wait "$child" 2>/dev/null
        later=$?
        ((later == 127)) || code=$later
    fi
    echo "$code" >"$records/.$RANK" && mv "$records/.$RANK" "$records/$RANK"
    ((code != 75)) || code=0
    exit "$code"
}

# Whether a node can take part, told in a line (other programs may say more): @ NAME VERSION, or @ NAME: what is wrong.
check_node() { # RECORDS RANKS_PER_NODE COMMAND...
    local records=$1 ranks=$2 version found
    shift 2
    setup_rank
    version=$("$@" --version 2>&1) || {
        echo "@ $SLURMD_NODENAME: cannot run '$* --version': ${version##*$'\n'}"
        exit 1
    }
    [[ -d $records && -w $records ]] || {
        echo "@ $SLURMD_NODENAME: $records is not there, or cannot be written; put OPPO_LOG_DIR on a shared file system"
        exit 1
    }
    if ((${SLURM_GPUS_ON_NODE:-0} > 0)); then
        found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
        if ((found < ranks)); then
            echo "@ $SLURMD_NODENAME: $found GPUs answer, but $ranks ranks are to run there"
            exit 1
        fi
    fi
    echo "@ $SLURMD_NODENAME ${version##*$'\n'}"
}

# --- On the first node of the job ---------------------------------------------------------------------------------------

read_settings() {
    local cluster_env=${OPPO_CLUSTER_ENV-}
    [[ -n $cluster_env || -z ${here-} || ! -e $here/cluster.env ]] || cluster_env=$here/cluster.env
    OPPO_COMMAND=(oppo) OPPO_SRUN_OPTIONS=(--cpu-bind=none)
    setup_rank() { :; }
    if [[ -n $cluster_env ]]; then
        [[ -r $cluster_env ]] || die "OPPO_CLUSTER_ENV=$cluster_env cannot be read"
        # shellcheck source=/dev/null
        source "$cluster_env" || die "$cluster_env failed"
    fi
    : "${OPPO_LOG_DIR:=logs}" "${OPPO_WAIT_S:=60}" "${OPPO_PEERS_S:=10}"
    : "${OPPO_MAX_RESTARTS:=50}" "${OPPO_MAX_CRASHES:=3}"
    [[ $OPPO_LOG_DIR == /* ]] || OPPO_LOG_DIR=$PWD/$OPPO_LOG_DIR
    : "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
    : "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 20000))}"
    # Each srun is a step of its own with a number of its own: what all ranks of this attempt call the run.
    export MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID=$SLURM_JOB_ID TORCHELASTIC_RESTART_COUNT=$restart
}

# Ranks and nodes of each component, as arrays; NAMES is empty where all nodes are alike.
read_components() {
    local k tasks nodes
    num_ranks=0 num_nodes=0
    for ((k = 0; k < ${SLURM_HET_SIZE:-1}; k++)); do
        if [[ -n ${SLURM_HET_SIZE-} ]]; then
            tasks=SLURM_NTASKS_HET_GROUP_$k nodes=SLURM_JOB_NUM_NODES_HET_GROUP_$k
            tasks=${!tasks} nodes=${!nodes} names[k]=$([[ $k == 0 ]] && echo actor || echo scorer)
        else
            nodes=$SLURM_JOB_NUM_NODES tasks=${SLURM_NTASKS:-$((nodes * ${SLURM_NTASKS_PER_NODE:-1}))}
        fi
        ((tasks % nodes == 0)) || die "$tasks tasks on $nodes nodes: every node must have as many; give --ntasks-per-node"
        first_rank[k]=$num_ranks first_node[k]=$num_nodes ranks[k]=$tasks nodes_of[k]=$nodes
        num_ranks=$((num_ranks + tasks)) num_nodes=$((num_nodes + nodes))
    done
}

# srun's options for a component: its nodes and tasks, and the container.
srun_options() { # COMPONENT TASKS_PER_NODE
    local k=$1 mounts=$PWD:$PWD,$OPPO_LOG_DIR:$OPPO_LOG_DIR
    options=(--export=ALL --distribution=block --nodes="${nodes_of[k]}" --ntasks=$((nodes_of[k] * $2)) --ntasks-per-node="$2")
    [[ -z ${names[k]-} ]] || options+=(--het-group="$k")
    options+=(${OPPO_SRUN_OPTIONS[@]+"${OPPO_SRUN_OPTIONS[@]}"})
    if [[ -n ${OPPO_CONTAINER_IMAGE-} ]]; then
        options+=(--container-image="$OPPO_CONTAINER_IMAGE" --container-workdir="$PWD" --no-container-mount-home
            --container-mounts="$mounts${OPPO_CONTAINER_MOUNTS:+,$OPPO_CONTAINER_MOUNTS}")
    fi
}

check_nodes() {
    local k seen versions options
    for k in "${!ranks[@]}"; do
        srun_options "$k" 1
        srun "${options[@]}" bash -c "$(declare -f setup_rank check_node); check_node \"\$@\"" check_node \
            "$records" $((ranks[k] / nodes_of[k])) "${OPPO_COMMAND[@]}" </dev/null >"$state/nodes.$k" &
        wait_for $! || {
            ((!told && !cancelled)) || return 0
            seen=$(sed -n 's/^@ //p' "$state/nodes.$k" | paste -s -d ';')
            die "not all nodes can take part, so nothing was started: ${seen:-srun started nothing there, and says why above}"
        }
    done
    seen=$(sed -n 's/^@ //p' "$state"/nodes.*)
    versions=$(cut -d ' ' -f 2- <<<"$seen" | sort -u | paste -s -d ';')
    [[ $versions != *';'* ]] || die "the nodes have different versions of oppo ($versions): install one"
    say "$num_nodes nodes answer with $versions: $(cut -d ' ' -f 1 <<<"$seen" | paste -s -d ' ')"
}

# The exit code of a process of ours, however often a signal ends the wait.
wait_for() { # PID
    local code
    while :; do
        wait "$1"
        code=$?
        if ((code <= 128)) || ! kill -0 "$1" 2>/dev/null; then return "$code"; fi
    done
}

start_components() { # CONFIG [a.b=c ...]
    local k options config=$1
    shift
    for k in "${!ranks[@]}"; do
        srun_options "$k" $((ranks[k] / nodes_of[k]))
        options+=(--wait="$OPPO_WAIT_S" --kill-on-bad-exit=1 --open-mode=append
            --output="${state}_r${restart}_${names[k]:+${names[k]}-}%t.log") # %j would be another for each component
        srun "${options[@]}" bash -c "$(declare -f setup_rank run_rank); run_rank \"\$@\"" run_rank \
            "$records" "${first_rank[k]}" "$num_ranks" "${first_node[k]}" $((ranks[k] / nodes_of[k])) \
            "${OPPO_COMMAND[@]}" train "$config" ${1+"$@"} --resume </dev/null &
        pids[k]=$!
    done
    say "$num_ranks ranks started, which meet at $MASTER_ADDR:$MASTER_PORT; logs: ${state}_r${restart}_*.log"
    ((!told && !cancelled)) || pass_on # what came meanwhile
}

# srun passes SIGUSR1 on to all its tasks; SIGTERM would make it kill them.
pass_on() {
    local k
    for k in "${!pids[@]}"; do
        [[ -n ${codes[k]-} ]] || kill -USR1 "${pids[k]}" 2>/dev/null
    done
}

# Until all components have ended.  One that outlives another is ended, too: soon where the other failed.
watch_components() {
    local k left deadline=''
    while :; do
        left=0
        for k in "${!pids[@]}"; do
            [[ -z ${codes[k]-} ]] || continue
            if kill -0 "${pids[k]}" 2>/dev/null; then
                left=$((left + 1))
                continue
            fi
            wait "${pids[k]}"
            codes[k]=$?
            ((codes[k] == 0)) || say "component ${names[k]:-of all ranks} ended with exit code ${codes[k]}"
            deadline=$((SECONDS + (codes[k] ? OPPO_PEERS_S : OPPO_WAIT_S)))
        done
        ((left)) || return
        if [[ -n $deadline ]] && ((SECONDS >= deadline)); then
            for k in "${!pids[@]}"; do
                [[ -z ${codes[k]-} ]] || continue
                [[ -n ${ended[k]-} ]] || say "component ${names[k]} has lost its peer: it is ended"
                ended[k]=1
                kill -TERM "${pids[k]}" 2>/dev/null # makes srun kill its tasks
            done
        fi
        sleep 1 &
        wait $!
    done
}

# What the attempt came to, in `verdict`: finished, stopped (told to), killed (a rank, by a signal) or failed; and `code`.
judge() {
    local k file rank rank_code num_records=0 num_stopped=0 killed='' failed='' silent=''
    for file in "$records"/*; do
        [[ -e $file ]] || continue
        num_records=$((num_records + 1)) rank=${file##*/} rank_code=$(<"$file")
        for k in "${!ended[@]}"; do # its ranks were killed from here
            ((rank_code != 137 || rank < first_rank[k] || rank >= first_rank[k] + ranks[k])) || continue 2
        done
        case $rank_code in
        0) ;;
        75 | 138 | 143) num_stopped=$((num_stopped + 1)) ;; # 138, 143: told so early that it could not yet listen
        *) if ((rank_code > 128)); then killed=$rank_code; else failed=${failed:-$rank_code}; fi ;;
        esac
    done
    for k in "${!codes[@]}"; do # a component that was ended here says nothing of its own
        ((codes[k] == 0)) || [[ -n ${ended[k]-} ]] || silent=${codes[k]}
    done
    verdict=finished code=0
    if ((num_records < num_ranks)) && ((${silent:-0} > 128)); then
        killed=${killed:-$silent} # a node, or shell and rank together: nobody was left to keep the record
    fi
    if [[ -n $killed ]]; then
        verdict=killed code=$killed
    elif [[ -n $failed ]] && ! ((told && num_stopped)); then # ranks that were told leave others alone, which is no failure
        verdict=failed code=$failed
    elif ((num_stopped)) || { ((told)) && ((num_records < num_ranks)); }; then
        verdict=stopped code=75
    elif ((num_records < num_ranks)); then
        verdict=failed code=${silent:-1}
    fi
    [[ $verdict != killed ]] || ((!told)) || verdict=stopped # too late to save: no fault of the ranks
}

# Put the job back into the queue, unless it was cancelled or has been there too often.
requeue() {
    local crashes=0 job
    if [[ $verdict == killed ]]; then
        crashes=$(($(cat "$state/crashes" 2>/dev/null || echo 0) + 1))
    fi
    echo "$crashes" >"$state/crashes"
    job=$(scontrol show job -o "$SLURM_JOB_ID" | head -n 1)
    if ((cancelled)) || [[ $job == *JobState=CANCELLED* ]]; then
        say "cancelled: not requeued; submit the job again to continue"
    elif ((crashes > 0 && crashes >= OPPO_MAX_CRASHES)); then
        say "$crashes attempts in a row ended with a rank killed by a signal (exit code $code), and OPPO_MAX_CRASHES is" \
            "$OPPO_MAX_CRASHES: not requeued"
    elif ((restart >= OPPO_MAX_RESTARTS)); then
        say "requeued $restart times, and OPPO_MAX_RESTARTS is $OPPO_MAX_RESTARTS: not requeued"
    else
        trap - TERM # which Slurm sends now
        say "$verdict: requeued, restart $((restart + 1)) of at most $OPPO_MAX_RESTARTS"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60
    fi
}

main() { # CONFIG [a.b=c ...]
    local restart=${SLURM_RESTART_COUNT:-0} told=0 cancelled=0 num_ranks num_nodes state records flag verdict code
    local -a names=() first_rank=() first_node=() ranks=() nodes_of=() pids=() codes=() ended=()
    (($#)) || die "no configuration: sbatch ... $SLURM_JOB_NAME CONFIG.yaml [a.b=c ...]"
    [[ -r $1 ]] || die "$1 cannot be read in $PWD, where this job runs; name it as it is there"
    trap 'told=1; say "told to stop: the ranks save and end"; pass_on' USR1
    trap 'cancelled=1; say "cancelled, or out of time: the ranks may save until they are killed"; pass_on' TERM
    read_settings
    read_components
    state=$OPPO_LOG_DIR/${SLURM_JOB_NAME}_$SLURM_JOB_ID records=$state/r$restart
    # A run that is over: oppo's summary where the run directory is known, else a flag of this configuration.
    flag=${OPPO_RUN_DIR:+$OPPO_RUN_DIR/summary.json}
    : "${flag:=$OPPO_LOG_DIR/$SLURM_JOB_NAME.$({ cat -- "$1" && printf '%s\n' "$@"; } | cksum | tr ' ' -).finished}"
    if [[ -e $flag ]]; then
        say "finished already, says $flag; nothing to do (remove it to run again)"
        return 0
    fi
    mkdir -p "$records" || die "$records cannot be made: OPPO_LOG_DIR must be a folder that can be written"
    check_nodes
    if ((told || cancelled)); then
        verdict=stopped code=75
    else
        start_components "$@"
        watch_components
        judge
    fi
    case $verdict in
    finished)
        [[ -n ${OPPO_RUN_DIR-} ]] || : >"$flag"
        say "finished"
        ;;
    failed) say "failed with exit code $code: not requeued; the ranks' logs say why ($OPPO_LOG_DIR)" ;;
    *) requeue ;;
    esac
    return "$code"
}

main "$@"
exit $?
