"""`oppo bench seeds`: the demo by several seeds, to see whether the overlaps change the trained policy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.cli.bench.common import counts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

HELP = "reward and held-out accuracy of sequential PPO and of OPPO by several seeds"
ABOUT = """Runs `oppo demo` once for each seed (its own data, tokenizer, warm start and reward model, then PPO without and with
the overlaps) and compares reward, held-out accuracy and reward per second. A demo that is finished is reused, so the same
command goes on where it was stopped, and adds seeds to those that are there."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=counts, default=[1, 2, 3, 4, 5], metavar="N,N", help="default 1,2,3,4,5")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/seeds"), metavar="DIR", help="default runs/bench/seeds"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the demo's tiny version: everything runs, little is learned"
    )
    parser.add_argument("--configs", type=Path, metavar="DIR", help="as of `oppo demo`")
    parser.set_defaults(measure=_seeds)


def _seeds(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.bench.outcomes import BenchError, BenchStopped
    from oppo_megatron.bench.peaks import describe_machine
    from oppo_megatron.bench.pictures import draw_seeds
    from oppo_megatron.bench.seeds import COLUMNS, compare, remarks, reward_half
    from oppo_megatron.cli import demo
    from oppo_megatron.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, ConfigError
    from oppo_megatron.rundir.directory import RunDirectory, write_json
    from oppo_megatron.rundir.metrics_log import read_metrics

    if len(set(args.seeds)) < 2:
        raise ConfigError(
            f"--seeds is {args.seeds}, but a spread needs at least two different ones; give --seeds 1,2,3"
        )
    demos: dict[int, Mapping[str, Any]] = {}
    for seed in args.seeds:
        print(f"--- seed {seed} ({len(demos) + 1} of {len(args.seeds)})", flush=True)
        out = args.out / f"seed-{seed}"
        settings = argparse.Namespace(out=out, seed=seed, quick=args.quick, fresh=False, configs=args.configs)
        code = demo.run(settings)
        if code == EXIT_REQUEUE:
            raise BenchStopped(f"told to stop in the demo of seed {seed}; the same command goes on with it")
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise BenchError(f"the demo of seed {seed} ended with exit code {code}; what it says is above")
        found = json.loads((out / "demo.json").read_text(encoding="utf-8"))
        demos[seed] = {
            name: {**found[name], "reward_half": reward_half(read_metrics(RunDirectory(out / name).metrics))}
            for name in demo.RUNS
        }
    result = compare(demos)
    write_json(args.out / "seeds.json", {"bench": "seeds", "machine": describe_machine(), **result})
    print(format_table(COLUMNS, result["results"]))
    print(*remarks(result), sep="\n")
    draw_seeds(result["results"], args.out / "seeds.png")
    print(f"figures: {args.out / 'seeds.json'}, {args.out / 'seeds.png'}")
    return 0
