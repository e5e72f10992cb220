"""`oppo plan`: searches the execution plan of a configuration on a cluster that is described."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oppo_megatron.cli.lengths import add_length_arguments, add_prompt_argument, count
from oppo_megatron.cli.parser import add_config_arguments
from oppo_megatron.cli.plan.loading import MARGIN

if TYPE_CHECKING:
    from oppo_megatron.sim.search.planning import Planned, Task

OUT = Path("runs/plan")
PATIENCE = 5
"""Times --seconds for which a first plan is searched."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, nargs="?", help="its ranks and layouts are not looked at")
    parser.add_argument("--cluster", type=Path, metavar="cluster.yaml", help="docs/planner.md has an example")
    add_length_arguments(parser)
    add_prompt_argument(parser)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument(
        "--costs", type=Path, metavar="costs.json", help="cost lines that a run of CONFIG as it is has measured"
    )
    measured.add_argument(
        "--calibrate", type=Path, metavar="RUN", help="a run on such processors, whose times scale the laws"
    )
    parser.add_argument("--search", choices=("exact", "mcmc"), default="exact", help="default: exact")
    parser.add_argument("--seconds", type=_seconds, default=60.0, metavar="S", help="end the search then (default 60)")
    parser.add_argument("--top", type=count, default=5, metavar="N", help="plans to print (default 5)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of mcmc (default 1)")
    parser.add_argument(
        "--margin",
        type=_margin,
        default=MARGIN,
        metavar="X",
        help="share of a rank's memory to leave free (default %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"default {OUT}")
    parser.add_argument(
        "--again", type=Path, metavar="plan.json", help="print what an earlier search found, and search nothing"
    )


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.cli.plan.loading import as_configured, load_task
    from oppo_megatron.cli.plan.tables import print_record
    from oppo_megatron.cli.plan.writing import write_plan
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.sim.search.record import read_record, to_record

    if args.again is not None:
        if args.config is not None:
            raise ConfigError(
                f"--again prints {args.again}, and searches no plan for {args.config}; leave one of them out"
            )
        print_record(read_record(args.again), args.top)
        return 0
    if args.config is None or args.cluster is None:
        missing = "a configuration" if args.config is None else "--cluster cluster.yaml"
        raise ConfigError(f"`oppo plan` needs {missing}: oppo plan CONFIG.yaml --cluster cluster.yaml; docs/planner.md")
    task = load_task(args)
    planned = _search(task, args)
    record = to_record(planned, args.search, args.seed, args.seconds)
    record["as_configured"] = as_configured(args, planned)
    print_record(record, args.top)
    write_plan(planned, record, args.out)
    return 0


def _search(task: Task, args: argparse.Namespace) -> Planned:
    """Raises ConfigError where nothing fits, with what is missing."""
    from rich.console import Console

    from oppo_megatron.clock import by_time
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.sim.search.finalists import finished
    from oppo_megatron.sim.search.planning import make_plan
    from oppo_megatron.sim.search.shortage import find_shortage

    begun, progress = time.monotonic(), by_time()
    doing = f"searching plans for {task.cluster.num_ranks} ranks"

    def past(limit_s: float, doing: str = doing) -> bool:
        progress(doing)
        return time.monotonic() > limit_s

    with Console(stderr=True).status(doing):
        out_of_time, give_up, enough = (partial(past, begun + part * args.seconds) for part in (1, PATIENCE, 0.5))
        planned = make_plan(task, args.search, args.top, args.seed, out_of_time, give_up, enough)
        if planned.plans:
            searched = time.monotonic()
            later = max(begun + args.seconds, searched + (searched - begun))  # plans are played as long as they were searched
            return finished(planned, args.top, lambda: past(later, "playing the best plans"))
        if not planned.found.ended:
            raise ConfigError(
                f"no plan that fits was found in {PATIENCE * args.seconds:g} s; raise --seconds, or lower --margin"
            )
        later = time.monotonic() + args.seconds / 2
        shortage = find_shortage(planned.task, lambda: past(later, "nothing fits; counting what is missing"))
    raise ConfigError(_told(task, shortage, args.margin))


def _told(task: Task, shortage: object, margin: float) -> str:
    from oppo_megatron.layout.placements import named_roles
    from oppo_megatron.sim.search.shortage import MOST_NODES, Shortage

    cluster = task.cluster
    where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name} of {cluster.gpu.memory_bytes / 1e9:g} GB"
    if not isinstance(shortage, Shortage):
        return (
            f"no layout of {', '.join(named_roles(task.config))} over any ranks of {where} passes the checks; "
            "`oppo validate` says why of one layout: heads, layers and batch divide the ranks, and a cache holds a sequence"
        )
    nodes = f"no number of such nodes up to {MOST_NODES} was found to do in this time"
    if shortage.nodes:
        nodes = f"{shortage.nodes} such nodes would do"
    told = shortage.told()
    return f"no plan fits {where} (margin {margin:g}): the one that lacks least needs {told}; {nodes}"


def _seconds(text: str) -> float:
    return _number(text, "a positive number of seconds", 0.0, float("inf"))


def _margin(text: str) -> float:
    return _number(text, "a share from 0 to below 1", -1e-300, 1.0)


def _number(text: str, what: str, above: float, below: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not above < value < below:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value
