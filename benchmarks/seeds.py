"""Tests if the overlaps change the trained policy: `oppo demo` with several seeds, sequential against both overlaps.

    python -m benchmarks.seeds --seeds 1,2,3,4,5 --algorithm grpo

Each seed has its own data, tokenizer and warm start (for ppo a reward model), then the algorithm without and with the overlaps.
Finished demos are reused, so the same command continues after an interruption, and adds seeds.  Writes seeds.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import run_script
from oppo_megatron.bench.figures import Lines, describe_machine
from oppo_megatron.bench.suite import BenchError, BenchStopped
from oppo_megatron.cli import demo
from oppo_megatron.cli.parser import counts
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, ConfigError
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

Figures = Mapping[str, Any]
"""`step_s`, `reward_last`, `accuracy_before` and `accuracy_after` of a run, as in `demo.json`, and `reward_half`."""

OUT = Path("runs/bench/seeds")
COLUMNS = {
    "seed": "seed", "s/step seq.": "sequential.step_s", "s/step OPPO": "oppo.step_s", "ratio": "speedup",
    "reward seq.": "sequential.reward_half", "reward OPPO": "oppo.reward_half",
    "accuracy before": "sequential.accuracy_before", "after, seq.": "sequential.accuracy_after",
    "after, OPPO": "oppo.accuracy_after", "reward/s ratio": "reward_per_second",
}  # fmt: skip
COMPARED = {
    "reward, second half of the steps": "reward_half",
    "reward, last tenth": "reward_last",
    "held-out accuracy": "accuracy_after",
    "reward per second": "reward_rate",
}


def reward_half(lines: Lines) -> float:
    """Return the mean reward over the second half of a run's steps.

    The last steps of an overcommitting run train the long, hard rollouts that were carried; alone they would say more about the
    end of the prompts than about the policy.
    """
    return mean(line["reward_mean"] for line in lines[len(lines) // 2 :])


def compare(demos: Mapping[int, Mapping[str, Figures]]) -> dict[str, Any]:
    """Return a row per seed, and for each compared figure means, spread and a test of the difference."""
    rows = [_row(seed, demo) for seed, demo in demos.items()]
    tests = {
        label: difference([row[f"sequential.{key}"] for row in rows], [row[f"oppo.{key}"] for row in rows])
        for label, key in COMPARED.items()
    }
    return {"results": rows, "tests": tests}


def difference(base: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Compare two samples paired by seed: mean and standard deviation of each and of `other` - `base`, and a p-value.

    The p-value is from the exact sign-flip test (Fisher 1935, section 21): the share of all swaps within pairs whose mean
    difference is at least as far from 0.  With n pairs it is at least 2^(1-n).
    """
    assert len(base) == len(other) >= 2, (len(base), len(other))
    differences = [b - a for a, b in zip(base, other, strict=True)]
    found = abs(sum(differences))
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return {
        "base_mean": mean(base), "base_sd": stdev(base), "other_mean": mean(other), "other_sd": stdev(other),
        "difference_mean": mean(differences), "difference_sd": stdev(differences),
        "p": mean(flip >= found - 1e-12 for flip in flips),
    }  # fmt: skip


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table."""
    lines = []
    for label, test in result["tests"].items():
        lines.append(
            f"{label}: sequential {test['base_mean']:.3f} (sd {test['base_sd']:.3f}), OPPO {test['other_mean']:.3f} "
            f"(sd {test['other_sd']:.3f}); difference {test['difference_mean']:+.3f} (sd {test['difference_sd']:.3f}), "
            f"sign-flip test over {len(result['results'])} seeds p = {test['p']:.2f}"
        )
    faster = f"OPPO's steps are {mean(row['speedup'] for row in result['results']):.2f} times as fast"
    gains = [row["reward_per_second"] for row in result["results"]]
    if None in gains:
        return [*lines, f"{faster}; reward per second is not compared, since a sequential run had no reward"]
    return [*lines, f"{faster}; reward per second is {mean(gains):.2f} times as much"]


def _row(seed: int, demo: Mapping[str, Figures]) -> dict[str, Any]:
    sequential, oppo = demo["sequential"], demo["oppo"]
    keys = ("step_s", "reward_half", "reward_last", "accuracy_before", "accuracy_after")
    speedup = sequential["step_s"] / oppo["step_s"]
    named = {f"{name}.{key}": demo[name][key] for name in ("sequential", "oppo") for key in keys}
    rates = {name: demo[name]["reward_half"] / demo[name]["step_s"] for name in ("sequential", "oppo")}
    named |= {f"{name}.reward_rate": rate for name, rate in rates.items()}
    gain = rates["oppo"] / rates["sequential"] if rates["sequential"] else None  # nothing was solved
    return {"seed": seed, "speedup": speedup, "reward_per_second": gain, **named}


def demo_figures(args: argparse.Namespace, out: Path, seed: int) -> dict[str, Figures]:
    """Return the figures of both runs of a seed's demo, which is made unless it is finished."""
    asked = {"algorithm": args.algorithm, "quick": args.quick, "configs": args.configs}
    code = demo.run(argparse.Namespace(**asked, out=out, seed=seed, fresh=False))
    if code == EXIT_REQUEUE:
        raise BenchStopped(f"stopped in the demo of seed {seed}; the same command continues with it")
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise BenchError(f"the demo of seed {seed} ended with exit code {code}; its message is above")
    found = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    return {
        name: {**found[name], "reward_half": reward_half(read_metrics(RunDirectory(out / name).metrics))} for name in demo.RUNS
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=counts, default=[1, 2, 3, 4, 5], metavar="N,N", help="default 1,2,3,4,5")
    parser.add_argument("--algorithm", choices=PRESETS, default="ppo", metavar="NAME", help="a preset; default ppo")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default {OUT}, with --algorithm {OUT}-NAME")
    parser.add_argument("--quick", action="store_true", help="the demo's tiny version, which learns little")
    parser.add_argument("--configs", type=Path, metavar="DIR", help="as in `oppo demo`")


def measure(args: argparse.Namespace) -> int:
    if len(set(args.seeds)) < 2:
        raise ConfigError(f"--seeds is {args.seeds}, but a spread needs two different seeds; give --seeds 1,2,3")
    folder = args.out or demo.folder_of(OUT, args.algorithm)
    demos: dict[int, Mapping[str, Figures]] = {}
    for seed in args.seeds:
        print(f"--- seed {seed} ({len(demos) + 1} of {len(args.seeds)})", flush=True)
        demos[seed] = demo_figures(args, folder / f"seed-{seed}", seed)
    result = compare(demos)
    about = {"bench": "seeds", "algorithm": args.algorithm, "machine": describe_machine()}
    write_json(folder / "seeds.json", {**about, **result})
    print(format_table(COLUMNS, result["results"]))
    print(*remarks(result), f"figures: {folder / 'seeds.json'}", sep="\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.seeds", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
