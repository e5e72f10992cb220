"""Seconds of each role and phase of a configuration on a cluster that a cluster.yaml describes, by the planner's cost laws.

    python -m benchmarks.prices CONFIG.yaml --cluster cluster.yaml --lognormal 512,1.0 --costs costs.json

Phases follow one after the other.  Needs neither the cluster nor the weights.  --costs writes the laws as the cost lines that
`oppo plan schedule --costs` reads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import run_script
from oppo_megatron.cli.bench import refuse_figures
from oppo_megatron.cli.lengths import add_length_arguments, add_prompt_argument, even_lengths, forced_lengths, prompt_tokens
from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.placements import role_placements, training_placements
from oppo_megatron.layout.role_memory import planned_memory
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.schedule.weaving.costs import costs_tree
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.pricing.model import Decoding
from oppo_megatron.sim.pricing.prices import Prices, seen_by

COLUMNS = {"role": "role", "phase": "phase", "layout": "layout", "seconds": "seconds", "% of a step": "percent"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--cluster", type=Path, required=True, metavar="cluster.yaml", help="docs/planner.md has one")
    parser.add_argument("--costs", type=Path, metavar="FILE.json", help="write the cost lines there")
    add_length_arguments(parser)
    add_prompt_argument(parser)


def measure(args: argparse.Namespace) -> int:
    if args.costs is not None:
        refuse_figures(args.costs)
    config = load_train(args.config, [*args.overrides, *forced_lengths(args)], inputs=False)
    cluster, lengths = seen_by(config, read_cluster(args.cluster)), even_lengths(config)
    prices = Prices(config, cluster, Decoding(prompt_tokens(args, config), lengths))
    seconds, serving, training = prices.rows(), role_placements(config), training_placements(config)
    total, rows = sum(seconds.values()), list[dict[str, object]]()
    for (role, phase), own in seconds.items():
        layout = Sizes.of(training[role] if phase == "update" else serving[role])
        rows.append({"role": role, "phase": phase, "layout": str(layout), "seconds": own, "percent": 100 * own / total})
    print(format_table(COLUMNS, rows))
    mean = sum(lengths) / len(lengths)
    print(
        f"a step without overlap: {total:.3g} s for {len(lengths)} responses of {mean:.0f} tokens on average, {max(lengths)} at "
        f"most, to prompts of {prices.decoding.prompt_tokens}"
    )
    fullest_gb = max(planned_memory(config, on_cpu=cluster.gpu.on_cpu)) / 1e9
    print(f"the fullest rank holds {fullest_gb:.1f} of {cluster.gpu.memory_bytes / 1e9:g} GB")
    print(*(f"{constant}: {source}" for constant, source in cluster.sources()), sep="\n")
    if args.costs is not None:
        write_json(args.costs, costs_tree(prices.costs()))
        print(f"cost lines: {args.costs}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("benchmarks.prices", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
