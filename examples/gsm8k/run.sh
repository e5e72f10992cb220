#!/usr/bin/env bash
# The whole chain on GSM8K: tokenizer, SFT, reward model, PPO with both overlaps.  `run.sh --help` says how to call it.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: run.sh [--short] DATA_DIR [OUT_DIR]

  DATA_DIR   holds gsm8k_train.jsonl, gsm8k_test.jsonl and gsm8k_preference_pairs.jsonl
  OUT_DIR    where everything is written (default: runs/gsm8k, with --short runs/gsm8k-short, in the repository)
  --short    a few steps of each stage: some two minutes on two cores, to see that the chain works

Finished stages in OUT_DIR are reused; an interrupted stage starts anew.  To repeat a stage, remove its folder
(OUT_DIR/sft, rm, ppo) and those of the stages after it.
TEXT
}

fail() {
  echo "run.sh: $*" >&2
  exit 2
}

variant=full
arguments=()
for argument in "$@"; do
  case "$argument" in
    -h | --help) usage; exit 0 ;;
    --short) variant=short ;;
    -*) usage >&2; fail "$argument is not an option" ;;
    *) arguments+=("$argument") ;;
  esac
done
if ((${#arguments[@]} < 1 || ${#arguments[@]} > 2)); then
  usage >&2
  fail "DATA_DIR is needed, OUT_DIR may follow; ${#arguments[@]} arguments were given"
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(cd "$here/../.." && pwd)
data=${arguments[0]}
out=${arguments[1]:-$repository/runs/gsm8k$([[ $variant == full ]] || echo -short)}

[[ -d $data ]] || fail "DATA_DIR '$data' is not a folder (looked from $PWD); name the one that holds the GSM8K files"
for name in gsm8k_train.jsonl gsm8k_test.jsonl gsm8k_preference_pairs.jsonl; do
  [[ -f $data/$name ]] || fail "$name is missing (looked for $data/$name); see README.md for where it comes from"
done
[[ ! -x $repository/.venv/bin/oppo ]] || PATH=$repository/.venv/bin:$PATH
command -v oppo >/dev/null || fail "the command oppo was not found; run 'make .venv/.installed' in $repository first"

mkdir -p "$out" || fail "OUT_DIR '$out' cannot be created; name a folder that you may write"
data=$(cd "$data" && pwd)
out=$(cd "$out" && pwd)
export GSM8K_OUT=$out  # the configurations find everything below it
if [[ -f $out/variant && $(<"$out/variant") != "$variant" ]]; then
  fail "OUT_DIR '$out' holds a $(<"$out/variant") run and this is a $variant one; name another OUT_DIR"
fi
echo "$variant" >"$out/variant"

# Settings that the short version replaces; every other one stands in the configuration files.
overrides() {
  case "$variant $1" in
    "short sft") echo steps=16 batch_size=16 max_tokens=192 optimizer.warmup_steps=2 ;;
    "short rm") echo steps=24 batch_size=8 max_tokens=192 optimizer.warmup_steps=2 optimizer.lr=1.5e-3 ;;
    "short ppo") echo steps=30 data.max_prompt_tokens=64 rollout.max_response_tokens=32 actor.optimizer.lr=5.0e-4 \
      ppo.kl.coefficient=0.002 evaluation.data.max_rows=16 ;;
  esac
}

# ppo.yaml has two ranks, and each rank on a GPU needs one of its own.
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
one_gpu() { [[ $gpus != 1 || $1 != ppo ]] || echo placement.mode=single; }

# stage KIND NAME CONFIG: a run whose summary.json exists is finished.
stage() {
  if [[ -f $out/$2/summary.json ]]; then
    echo "== $2: finished earlier, reused ($out/$2)"
  else
    echo "== $2"
    # shellcheck disable=SC2046
    oppo "$1" "$here/$3" $(overrides "$2") $(one_gpu "$2")
  fi
}

heldout=$([[ $variant == short ]] && echo 50 || echo 200)
echo "== data and tokenizer"
[[ -f $out/data/train.jsonl ]] || python3 "$here/prepare.py" "$data" "$out/data" "$heldout"
[[ -f $out/tokenizer.model ]] || oppo data tokenizer "$out/data/train.jsonl" "$out/data/pairs.jsonl" \
  --out "$out/tokenizer.model" --vocab-size 2048
stage sft sft sft.yaml
stage rm rm rm.yaml
stage train ppo ppo.yaml

python3 - "$out/ppo/summary.json" <<'PYTHON'
import json, sys
summary = json.load(open(sys.argv[1], encoding="utf-8"))
print("reward {reward_first:.3f} -> {reward_last:.3f} over {steps} steps, {step_s:.2f} s a step, "
      "{scoring_hidden:.0%} of the scoring hidden; deferred: {deferred}".format(**summary))
PYTHON
echo "policy: $out/ppo/weights/actor"
