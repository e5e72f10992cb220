"""Compares continuous generation with the synchronous loop in virtual time (`oppo plan simulate`), by split of the ranks.

    python -m benchmarks.continuous examples/planner/ppo.yaml --cluster CLUSTER.yaml [a.b=c ...] --ranks 24 --splits 1:1,2:1,3:1 \
        --lengths 300,0.5 --lengths 300,1.0 --lengths trace.csv

The synchronous run has both overlaps on all ranks, with the best of `--deltas`.  `idle`: share of a step that generators wait.
`bound`: a step's seconds over the larger of generation and training.  `pause`: additional seconds of a step with `install:
pause`, and the closed form of the same move of weights.  Steps count from the seventh on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import add_out, run_script, whole_numbers, write_figures
from oppo_megatron.bench.suite import BenchError
from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.main import main as oppo
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.metrics_log import read_metrics

STEPS, SETTLED = 16, 6
COLUMNS = ("lengths", "split", "step_s", "gain", "idle", "bound", "pause_s", "closed_form_s")


def played(args: argparse.Namespace, lengths: str, name: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settled steps of a simulated run, which is made unless it is there."""
    path, _, column = lengths.partition(":")
    run = RunDirectory(args.out / f"{Path(path).name}-{name}")
    if not run.summary.is_file():
        given = (
            ["--trace", path, *(["--trace-column", column] if column else [])] if Path(path).is_file() else ["--lognormal", path]
        )
        command = [args.config, "--cluster", args.cluster, *given, "--steps", str(STEPS), "--out", str(run.path)]
        if oppo(["plan", "simulate", *command, *args.overrides, *overrides]):
            raise BenchError(f"{run.path.name} could not be played; the message is above")
    return read_metrics(run.metrics)[SETTLED:]


def seconds(lines: Sequence[dict[str, Any]]) -> float:
    return fmean(line["step_s"] for line in lines)


def split_of(args: argparse.Namespace, ratio: str) -> tuple[int, int]:
    decoding, _, training = ratio.partition(":")
    parts = int(decoding) + int(training)
    if args.ranks % parts:
        raise BenchError(f"--splits {ratio}: {args.ranks} ranks cannot be divided so; give --ranks a multiple of {parts}")
    return args.ranks * int(decoding) // parts, args.ranks * int(training) // parts


def fixed(delta: int) -> str:
    return f"overlap.delta={{rule: fixed, initial: {delta}, max: {delta}}}"


def apart(args: argparse.Namespace, decoding: int, install: str) -> list[str]:
    config = load_train(Path(args.config), args.overrides, inputs=False)
    ahead = args.staleness * config.rollout.batch_size // config.rollout.group_size
    return [
        fixed(ahead),
        f"placement={{mode: colocated, actor: {{dp: {decoding}}}}}",
        f"actor.train={{ranks: {decoding}-{args.ranks - 1}, tp: {args.train_tp}}}",
        f"overlap.continuous={{install: {install}}}", f"overlap.max_staleness={args.staleness}",
    ]  # fmt: skip


def rows(args: argparse.Namespace, lengths: str) -> list[dict[str, Any]]:
    together = [f"placement={{mode: colocated, actor: {{dp: {args.ranks}}}}}"]
    runs = {delta: seconds(played(args, lengths, f"delta-{delta}", [*together, fixed(delta)])) for delta in args.deltas}
    best = min(runs, key=runs.__getitem__)
    found = [{"lengths": lengths, "split": f"together, delta {best}", "step_s": runs[best], "gain": 1.0}]
    for ratio in args.splits:
        decoding, training = split_of(args, ratio)
        lines = played(args, lengths, f"{decoding}-{training}", apart(args, decoding, "staged"))
        paused = played(args, lengths, f"{decoding}-{training}-pause", apart(args, decoding, "pause"))
        longer = [max(line["decode_s"], line["train_s"]) for line in lines]
        found.append({
            "lengths": lengths, "split": f"{decoding} + {training}", "step_s": seconds(lines),
            "gain": runs[best] / seconds(lines),
            "idle": sum(line["idle_s"]["actor"] for line in lines) / sum(line["step_s"] for line in lines),
            "bound": seconds(lines) / fmean(longer), "pause_s": seconds(paused) - seconds(lines),
            "closed_form_s": lines[-1]["reallocate_s"],
        })  # fmt: skip
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--cluster", required=True, metavar="CLUSTER.yaml")
    parser.add_argument("--lengths", action="append", required=True, metavar="MEDIAN,SIGMA|FILE[:COLUMN]", help="repeatable")
    parser.add_argument("--ranks", type=int, default=24, metavar="N", help="default %(default)s")
    parser.add_argument("--splits", type=lambda text: text.split(","), default=["1:1", "2:1", "3:1"], metavar="N:M,N:M")
    parser.add_argument("--train-tp", type=int, default=2, metavar="N", help="of the ranks that train; default %(default)s")
    parser.add_argument("--staleness", type=int, default=2, metavar="N", help="overlap.max_staleness; default %(default)s")
    parser.add_argument("--deltas", type=whole_numbers, default=[16, 32, 64], metavar="N,N", help="of the synchronous run")
    add_out(parser, "continuous")


def measure(args: argparse.Namespace) -> int:
    found = [row for lengths in args.lengths for row in rows(args, lengths)]
    for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *found]:
        cells = (row.get(name, "") for name in COLUMNS)
        print("| " + " | ".join(f"{cell:.4g}" if isinstance(cell, float) else cell for cell in cells) + " |")
    write_figures(args.out, "continuous", {"results": found})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.continuous", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
