"""`oppo bench prices`: what each role and phase of a configuration would take on a cluster that is described."""

from __future__ import annotations

import argparse
from pathlib import Path

from oppo_megatron.cli.bench.common import refuse_figures
from oppo_megatron.cli.lengths import add_length_arguments, add_prompt_argument, forced_lengths, prompt_tokens
from oppo_megatron.cli.parser import add_config_arguments

HELP = "seconds of each role and phase of a configuration on a cluster, by the cost laws"
ABOUT = """Predicts a step of a configuration on the cluster that a cluster.yaml describes: seconds of each role and phase, one
after the other, and what the fullest rank holds. Needs neither the cluster nor the weights. --costs writes the laws as the
lines that `oppo plan schedule --costs` reads."""
COLUMNS = {"role": "role", "phase": "phase", "layout": "layout", "seconds": "seconds", "% of a step": "percent"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument(
        "--cluster", type=Path, required=True, metavar="cluster.yaml", help="docs/planner.md has an example"
    )
    parser.add_argument(
        "--costs", type=Path, metavar="FILE.json", help="write the cost lines of decoding and prefill there"
    )
    add_length_arguments(parser)
    add_prompt_argument(parser)
    parser.set_defaults(measure=_prices)


def _prices(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.cli.lengths import even_lengths
    from oppo_megatron.cli.run import load_train
    from oppo_megatron.rundir.directory import write_json
    from oppo_megatron.schedule.weaving.costs_file import costs_tree
    from oppo_megatron.sim.clusters.reading import read_cluster
    from oppo_megatron.sim.pricing.decoding import Decoding
    from oppo_megatron.sim.pricing.prices import Prices, seen_by, total_s

    if args.costs is not None:
        refuse_figures(args.costs)
    config = load_train(args.config, [*args.overrides, *forced_lengths(args)], inputs=False)
    cluster, lengths = seen_by(config, read_cluster(args.cluster)), even_lengths(config)
    prices = Prices(config, cluster, Decoding(prompt_tokens(args, config), lengths))
    rows = list(prices.rows())
    total = total_s(rows)
    print(format_table(COLUMNS, [{**vars(row), "percent": 100 * row.seconds / total} for row in rows]))
    print(f"a step without any overlap: {total:.3g} s, of {len(lengths)} responses, {sum(lengths) / len(lengths):.0f} tokens on "
          f"average, {max(lengths)} at most, to prompts of {prices.decoding.prompt_tokens}")  # fmt: skip
    room = cluster.gpu.memory_bytes / 1e9
    print(f"the fullest rank holds {prices.fullest_gb():.1f} of {room:g} GB")
    for constant, source in cluster.sources():
        print(f"{constant}: {source}")
    if args.costs is not None:
        write_json(args.costs, costs_tree(prices.costs()))
        print(f"cost lines: {args.costs}")
    return 0
