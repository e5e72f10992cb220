"""Tests how staleness changes learning: GRPO on arithmetic, several seeds, each batch as old as the bound permits.

    python -m benchmarks.staleness --seeds 1,2,3,4,5

A run is `oppo demo --algorithm grpo`'s with `overlap.continuous`, in one process.  With `lag_steps` above the longest response,
all admitted responses end before new weights are installed, so each batch is `max_staleness` versions old: the worst case that
the bound permits.  `redraw` carries one and two batches of prompts in the synchronous loop.  Finished runs are reused.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import run_script
from benchmarks.seeds import difference, reward_half
from oppo_megatron.bench.figures import describe_machine
from oppo_megatron.bench.suite import BenchError
from oppo_megatron.cli import demo
from oppo_megatron.cli.parser import counts
from oppo_megatron.nesting import read_json
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

OUT = Path("runs/bench/staleness")
CORRECTIONS = ("behaviour", "decoupled", "icepop")
SYNCHRONOUS = "synchronous"
COLUMNS = {
    "run": "run", "mean age": "age", "reward, second half": "reward_half", "sd": "reward_sd", "held-out": "accuracy",
    "sd ": "accuracy_sd", "minus synchronous": "difference_mean", "sd  ": "difference_sd", "p": "p", "seeds": "seeds",
}  # fmt: skip


def cases(ages: Sequence[int], groups: int) -> Iterator[tuple[str, list[str]]]:
    """Yield each run's name and overrides.  `groups`: of a batch."""
    yield SYNCHRONOUS, ["overlap.inter=false"]
    for age in ages:
        ahead = [f"overlap.max_staleness={age}", f"overlap.delta={{rule: fixed, initial: {age * groups}, max: {age * groups}}}"]
        for correction in CORRECTIONS:
            yield f"{correction} {age}", [*ahead, "overlap.continuous={lag_steps: 1000}", f"ppo.staleness={correction}"]
    for batches in (1, 2):
        delta = batches * groups
        fixed = f"overlap.delta={{rule: fixed, initial: {delta}, max: {delta}}}"
        yield f"redraw, delta {delta}", ["overlap.carry=redraw", f"overlap.max_staleness={2 * batches}", fixed]


def prepare(out: Path, seed: int) -> list[str]:
    """Make data, tokenizer and warm start; return the overrides that name them."""
    for stage in demo.plan(out, demo.find_configs(None, "grpo"), seed, quick=False, algorithm="grpo")[:-2]:
        if not stage.finished and stage.run():
            raise BenchError(f"{stage.title} of seed {seed} has failed; its message is above")
    data = out / "data"
    return [
        f"seed={seed}", f"tokenizer.path={out / 'tokenizer' / 'tokenizer.model'}", f"data.path={data / 'prompts.jsonl'}",
        f"evaluation.data.path={data / 'heldout.jsonl'}", f"actor.checkpoint={out / 'sft' / 'weights'}", "placement.mode=single",
    ]  # fmt: skip


def figures(run: RunDirectory, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a run's figures; it is made unless it is finished."""
    if not run.summary.is_file():
        config = demo.find_configs(None, "grpo") / "grpo.yaml"
        command = [sys.executable, "-m", "oppo_megatron", "train", str(config), f"run_dir={run.path}", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines, summary = read_metrics(run.metrics), read_json(run.summary.read_text(encoding="utf-8"))
    deferred = {int(times): count for times, count in summary["deferred"].items()}
    age = sum(times * count for times, count in deferred.items()) / sum(deferred.values())
    return {"reward_half": reward_half(lines), "accuracy": summary["accuracy_after"], "age": age}


def rows(found: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a line per run: mean and standard deviation over seeds, and the accuracy's difference from the synchronous run."""
    for name, runs in found.items():
        reward, accuracy = ([run[key] for run in runs] for key in ("reward_half", "accuracy"))
        line = {
            "run": name, "seeds": len(runs), "age": mean(run["age"] for run in runs), "reward_half": mean(reward),
            "reward_sd": stdev(reward), "accuracy": mean(accuracy), "accuracy_sd": stdev(accuracy),
        }  # fmt: skip
        yield line | difference([run["accuracy"] for run in found[SYNCHRONOUS]][: len(runs)], accuracy)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=counts, default=[1, 2, 3, 4, 5], metavar="N,N", help="default 1,2,3,4,5")
    parser.add_argument("--ages", type=counts, default=[1, 2, 4, 8], metavar="N,N", help="max_staleness; default 1,2,4,8")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="default %(default)s")


def measure(args: argparse.Namespace) -> int:
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in args.seeds:
        folder = args.out / f"seed-{seed}"
        start = prepare(folder, seed)
        for name, overrides in cases(args.ages, 8):
            run = RunDirectory(folder / name.replace(", ", "-").replace(" ", "-"))
            found.setdefault(name, []).append(figures(run, [*start, *overrides]))
            print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    results = list(rows(found))
    write_json(args.out / "staleness.json", {"machine": describe_machine(), "results": results, "runs": found})
    print(format_table(COLUMNS, results), f"figures: {args.out / 'staleness.json'}", sep="\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.staleness", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
