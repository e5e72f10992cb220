"""`oppo bench seeds`: the demo by several seeds, to see whether the overlaps change the trained policy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.cli.lengths import counts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

HELP = "reward and held-out accuracy, sequential and with the overlaps, by several seeds"
ABOUT = """Runs `oppo demo` once for each seed (its own data, tokenizer and warm start, for ppo a reward model, then the
algorithm without and with the overlaps) and compares reward, held-out accuracy and reward per second. A demo that is
finished is reused, so the same command goes on where it was stopped, and adds seeds to those that are there."""


OUT = Path("runs/bench/seeds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from oppo_megatron.config.algorithm import PRESETS

    parser.add_argument("--seeds", type=counts, default=[1, 2, 3, 4, 5], metavar="N,N", help="default 1,2,3,4,5")
    parser.add_argument(
        "--algorithm", choices=PRESETS, default="ppo", metavar="NAME", help="as of `oppo demo`; default ppo"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default {OUT}, with --algorithm {OUT}-NAME")
    parser.add_argument(
        "--quick", action="store_true", help="the demo's tiny version: everything runs, little is learned"
    )
    parser.add_argument("--configs", type=Path, metavar="DIR", help="as of `oppo demo`")
    parser.set_defaults(measure=_seeds)


def _seeds(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.peaks import describe_machine
    from oppo_megatron.bench.pictures import draw_seeds
    from oppo_megatron.bench.seeds import COLUMNS, compare, remarks
    from oppo_megatron.cli.demo import beside
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.rundir.directory import write_json

    if len(set(args.seeds)) < 2:
        raise ConfigError(
            f"--seeds is {args.seeds}, but a spread needs at least two different ones; give --seeds 1,2,3"
        )
    folder = beside(OUT, args.algorithm) if args.out is None else args.out
    demos: dict[int, Mapping[str, Any]] = {}
    for seed in args.seeds:
        print(f"--- seed {seed} ({len(demos) + 1} of {len(args.seeds)})", flush=True)
        demos[seed] = _demo(args, folder / f"seed-{seed}", seed)
    result = compare(demos)
    about = {"bench": "seeds", "algorithm": args.algorithm, "machine": describe_machine()}
    write_json(folder / "seeds.json", {**about, **result})
    print(format_table(COLUMNS, result["results"]))
    print(*remarks(result), sep="\n")
    draw_seeds(result["results"], folder / "seeds.png")
    print(f"figures: {folder / 'seeds.json'}, {folder / 'seeds.png'}")
    return 0


def _demo(args: argparse.Namespace, out: Path, seed: int) -> dict[str, Any]:
    """The figures of both runs of a seed's demo, which is made unless it is there."""
    from oppo_megatron.bench.outcomes import BenchError, BenchStopped
    from oppo_megatron.bench.seeds import reward_half
    from oppo_megatron.cli import demo
    from oppo_megatron.errors import EXIT_INTERRUPTED, EXIT_REQUEUE
    from oppo_megatron.rundir.directory import RunDirectory
    from oppo_megatron.rundir.metrics_log import read_metrics

    asked = {"algorithm": args.algorithm, "quick": args.quick, "configs": args.configs}
    code = demo.run(argparse.Namespace(**asked, out=out, seed=seed, fresh=False))
    if code == EXIT_REQUEUE:
        raise BenchStopped(f"told to stop in the demo of seed {seed}; the same command goes on with it")
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise BenchError(f"the demo of seed {seed} ended with exit code {code}; what it says is above")
    found = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    return {
        name: {**found[name], "reward_half": reward_half(read_metrics(RunDirectory(out / name).metrics))}
        for name in demo.RUNS
    }
