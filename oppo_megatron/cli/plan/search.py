"""`oppo plan search`: search ranks and layouts of the roles on a described cluster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from oppo_megatron.cli import lengths
from oppo_megatron.cli.load import load_settings
from oppo_megatron.cli.measure import AUTO
from oppo_megatron.cli.parser import add_config_arguments, count
from oppo_megatron.clock import to_stderr, while_silent
from oppo_megatron.config.load import dump_config, read_tree
from oppo_megatron.config.model import PlacementConfig
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.preflight.validate import check_train
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.schedule.weaving.costs import costs_tree
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.search.blocks import TRAINERS
from oppo_megatron.sim.search.planning import MOST_NODES, Fullest, Shortage, Task, find_plans, find_shortage, layout_problems
from oppo_megatron.sim.search.playing import Played, play_config, play_plans, task_costs, to_record

HELP = "search the fastest ranks and layouts on a cluster that a file describes"
OUT = Path("runs/plan")
MARGIN = 0.1
PLANS = {
    "": "number", "roles on ranks": "name", "actor": "actor", "trained": "trained", "step": "step_s", "decode": "decode_s",
    "exp. scoring": "score_exposed_s", "update": "update_s", "exp. critic": "critic_exposed_s", "weights": "reallocate_s",
    "idle": "idle_s", "fullest GB": "fullest_gb", "free GB": "free_gb", "slower": "slower",
}  # fmt: skip
ROLE_COLUMNS = {
    "role": "role", "ranks": "ranks", "decodes, scores": "layout", "s": "serving_s", "trained": "training",
    "recompute": "recompute", "s ": "update_s", "weights s": "weights_s",
}  # fmt: skip
ROLES = ("actor", "critic", "reference", "reward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, help="its ranks and layouts are ignored")
    parser.add_argument("--cluster", type=Path, required=True, metavar="cluster.yaml", help="docs/planner.md has an example")
    lengths.add_length_arguments(parser)
    lengths.add_prompt_argument(parser)
    parser.add_argument("--top", type=count, default=5, metavar="N", help="plans to print (default 5)")
    parser.add_argument(
        "--margin", type=share, default=MARGIN, metavar="X", help="share of a rank's memory to leave free (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"default {OUT}")


def run(args: argparse.Namespace) -> int:
    with progress("reading the configuration") as doing:
        task = load_task(args)
        doing[0] = f"searching plans for {task.cluster.num_ranks} ranks"
        found, places = find_plans(task)
        plans = play_plans(task, found, args.top, lambda line: doing.__setitem__(0, line))
        if not plans:
            doing[0] = "nothing fits; counting what is missing"
            raise ConfigError(_nothing_fits(task, find_shortage(task)))
        record = to_record(task, plans, places)
        doing[0] = "playing the configuration's own placement"
        record["as_configured"] = _as_configured(args, task, plans[0])
        if task.config.overlap.continuous is not None:
            doing[0] = "searching the best plan of the synchronous loop"
            record["synchronous"] = _synchronous(task, plans[0])
        costs = costs_tree(task_costs(task, plans[0].config).actions)
    print(*_describe(record), sep="\n")
    args.out.mkdir(parents=True, exist_ok=True)
    dump_config(plans[0].config, args.out / "plan.yaml")
    write_json(args.out / "plan.json", record)
    write_json(args.out / "costs.json", costs)
    print(f"{args.out / 'plan.yaml'}, plan.json, costs.json")
    return 0


def load_task(args: argparse.Namespace) -> Task:
    """Read the cluster, and the configuration without its placement. Raises ConfigError."""
    cluster = read_cluster(args.cluster)
    given = given_settings(args, cluster)
    overrides = [*given, *AUTO, *_unlaid(read_tree(args.config, given))]
    settings = load_settings("train", args.config, overrides, inputs=False)
    assert isinstance(settings, TrainSettings), "`train` was asked for"
    config = settings.with_placement(PlacementConfig(mode="single"))
    lengths.check_lengths(config)

    def check(planned: TrainConfig) -> list[str]:
        """Check without tokenizers and weights: no plan depends on them, and reading them takes seconds."""
        return [*check_train(planned, inputs=False, models=False), *layout_problems(planned)]

    even, limits = lengths.even_lengths(config), lengths.forced_limits(config)
    return Task(config, cluster, even, args.margin, limits, lengths.prompt_tokens(args, config), check)


def given_settings(args: argparse.Namespace, cluster: Cluster) -> list[str]:
    """Overrides of the command line, and the cluster's default dtype."""
    given = [*args.overrides, *lengths.forced_lengths(args)]
    runtime = read_tree(args.config, given).get("runtime")
    if not isinstance(runtime, Mapping) or runtime.get("dtype") is None:
        given.append(f"runtime.dtype={'float32' if cluster.gpu.on_cpu else 'bfloat16'}")
    return given


def _unlaid(tree: Mapping[Any, Any]) -> Iterator[str]:
    """Yield overrides that remove the roles' own ranks and layouts."""
    for name in ROLES:
        role = role if isinstance(role := tree.get(name), Mapping) else {}
        train = train if isinstance(train := role.get("train"), Mapping) else {}
        yield from (f"{name}.{key}=null" for key in ("ranks", "parallel") if role.get(key) is not None)
        yield from (f"{name}.train.{key}=null" for key in ("tp", "pp", "dp", "ranks") if train.get(key) is not None)
        yield from (f"{name}.train.{key}=1" for key in ("vpp", "cp", "ep") if key in train)


@contextmanager
def progress(doing: str) -> Iterator[list[str]]:
    """Print the activity to stderr every few seconds; the caller may replace the list's only item."""
    now = [doing]
    with while_silent(lambda: now[0], to_stderr):
        yield now


def _nothing_fits(task: Task, shortage: Shortage | None) -> str:
    cluster = task.cluster
    where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name} of {cluster.gpu.memory_bytes / 1e9:g} GB"
    if shortage is None:
        return (
            f"no layout of {', '.join(named_roles(task.config))} over any ranks of {where} passes the checks; "
            "`oppo validate` explains it for one layout: heads, layers and batch must divide among the ranks, and a cache must "
            "hold a sequence"
        )
    nodes = f"{shortage.nodes} such nodes would do" if shortage.nodes else f"not even {MOST_NODES} such nodes would do"
    missing = shortage.fullest.describe(shortage.budget)
    return f"no plan fits {where} (margin {task.margin:g}): the one that lacks least needs {missing}; {nodes}"


def _synchronous(task: Task, best: Played) -> str:
    """Describe the fastest plan without continuous generation, with delta up to the same limit."""
    other = replace(task, config=task.config.with_values({"overlap.continuous": None}))
    plans = play_plans(other, find_plans(other)[0], 1)
    if not plans:
        return "no plan fits"
    return f"{_compared(plans[0].step_s, best)} (delta {plans[0].config.overlap.delta.initial})"


def _compared(seconds: float, best: Played) -> str:
    slower = seconds / best.step_s - 1
    return f"{seconds:.3g} s per step, {abs(slower):.1%} {'more' if slower >= 0 else 'less'} than the first plan"


def _as_configured(args: argparse.Namespace, task: Task, best: Played) -> str:
    try:
        settings = load_settings("train", args.config, given_settings(args, task.cluster), inputs=False)
    except ConfigError as error:
        return f"refused: {error.problems[0]}"
    assert isinstance(settings, TrainSettings), "`train` was asked for"
    config = settings.resolved()
    if config is None:
        return "placement.mode is auto"
    if (ranks := world_size(config)) > task.cluster.num_ranks:
        return f"refused: {ranks} ranks, and the cluster has {task.cluster.num_ranks}"
    fullest, budget = Fullest.of(config, on_cpu=task.on_cpu), task.budget(task.cluster_of(ranks))
    if fullest.held > budget:
        return f"refused, because it needs {fullest.describe(budget)}"
    return f"{_compared(play_config(task, config).total, best)}; its fullest rank holds {fullest.held / 1e9:.1f} GB"


def _describe(record: Mapping[str, Any]) -> list[str]:
    plans, cluster, work, first = record["plans"], record["cluster"], record["work"], record["plans"][0]
    rows = []
    for number, plan in enumerate(plans, start=1):
        actor, slower = plan["roles"]["actor"], plan["step_s"] / first["step_s"] - 1
        trained = plan["roles"].get(TRAINERS, actor)["training"]
        shown = {"actor": _short(actor["layout"]), "trained": _short(trained), "slower": f"{slower:.1%}"}
        rows.append({**plan, "number": number, **shown})
    return [
        f"{cluster['nodes']} x {cluster['gpus_per_node']} {cluster['gpu']}; {work['responses']} responses of "
        f"{work['mean_tokens']:.0f} tokens on average, {work['longest']} at most, to prompts of {work['prompt_tokens']}; "
        + ("scoring streamed during decoding" if work["overlapped"] else "phases one after the other")
        + (", which continues during updates" if "synchronous" in record else ""),
        "",
        "seconds per step, predicted:",
        format_table(PLANS, rows),
        "",
        "the first plan:",
        format_table(ROLE_COLUMNS, [{"role": role, **own} for role, own in first["roles"].items()]),
        "",
        f"micro-batches of {first['micro_batch_tokens']} tokens, chunks of {first['chunk']}, delta {first['delta']}",
        f"{record['reason']}.",
        f"{record['placements']} placements compared by price, the best played in virtual time; the first has a price of "
        f"{first['price_s']:.3g} s; a margin of {cluster['margin']:.0%} of {cluster['memory_gb']:g} GB stays free",
        f"the configuration with its own placement: {record['as_configured']}",
        *([f"the best plan of the synchronous loop: {record['synchronous']}"] if "synchronous" in record else []),
        *record["notes"],
        *(f"{name}: {source}" for name, source in record["constants"].items()),
    ]


def _short(layout: str) -> str:
    """A layout without its sizes of 1: `tp 4 dp 2`."""
    parts = [part for part in layout.replace(" with ", " x ").split(" x ") if not part.endswith(" 1")]
    return " ".join(parts) or "1"


def share(text: str) -> float:
    try:
        if 0 <= (value := float(text)) < 1:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to below 1")
