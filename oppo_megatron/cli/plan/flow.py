"""`oppo plan flow`: search ranks and layouts for the calls of an algorithm that a file describes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from oppo_megatron.cli import lengths
from oppo_megatron.cli.parser import add_config_arguments, count
from oppo_megatron.cli.plan.search import MARGIN, progress, share
from oppo_megatron.config.load import dump_config, load_config
from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.preflight.validate import check_train
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.sim.clusters.cluster import threaded
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.flow.dataflow import Dataflow
from oppo_megatron.sim.flow.placing import TOLERANCE, FlowPlan, FlowSearch
from oppo_megatron.sim.flow.prices import FlowPrices
from oppo_megatron.sim.search.enumeration import Plan
from oppo_megatron.sim.search.planning import Task, find_plans, planned_config

HELP = "search ranks and layouts for the calls of an algorithm that a file describes"
OUT, SECONDS = Path("runs/flow"), 60
REMEDY = "add nodes, or lower batch, tokens, run.runtime.micro_batch_tokens or run.runtime.kv_cache_mb"
PLACED = ("ranks", *Sizes._fields, "recompute", "sequence_parallel")
WIDTH = 40
"""Characters of a step in the timeline."""
COLUMNS = {
    "call": "name", "model": "model", "kind": "kind", "ranks": "ranks", "layout": "layout", "recompute": "recompute",
    "GB": "gb", "begins": "start_s", "s": "seconds", "timeline": "timeline",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, help="models, calls and sizes (docs/planner.md)")
    parser.add_argument("--cluster", type=Path, required=True, metavar="cluster.yaml", help="docs/planner.md has an example")
    lengths.add_length_arguments(parser)
    parser.add_argument("--seconds", type=count, default=SECONDS, metavar="N", help="time limit (default %(default)s)")
    parser.add_argument(
        "--margin", type=share, default=MARGIN, metavar="X", help="share of a rank's memory to leave free (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"default {OUT}")


def run(args: argparse.Namespace) -> int:
    with progress("reading the dataflow") as doing:
        flow, cluster = load_config(Dataflow, args.config, args.overrides, check=Dataflow.problems), read_cluster(args.cluster)
        machine, roles, plans = threaded(cluster, cluster.num_ranks, 0), flow.roles(), list[Plan]()
        prices = FlowPrices(flow, machine, lengths.even_lengths, args.margin, lengths.length_settings(args) or {})
        config = None if isinstance(roles, str) else _run_config(prices, *roles)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "plan.yaml").unlink(missing_ok=True)  # another dataflow's
        end, doing[0] = time.monotonic() + args.seconds, "pricing layouts"
        tell = partial(doing.__setitem__, 0)
        if (plan := FlowSearch(prices, is_over=lambda: time.monotonic() > end, tell=tell).find()) is None:
            where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name} (margin {args.margin:g})"
            remedy = f"raise --seconds from {args.seconds}" if time.monotonic() > end else REMEDY
            raise ConfigError(f"no placement of all calls was found on {where}; {remedy}")
        if config is not None:
            doing[0] = "searching ranks and layouts of a run's roles"
            task = Task(config, cluster, lengths.even_lengths(config), args.margin, prompt=flow.prompt_tokens)
            plans, _ = find_plans(task, 1)
    record = _record(prices, plan)
    lower = f"the search was not completed; a step takes at least {plan.bound_ns / 1e9:.3g} s"
    searched = f"no placement takes {TOLERANCE:.0%} less" if plan.bound_ns >= plan.step_ns * (1 - TOLERANCE) else lower
    print(format_table(COLUMNS, record["events"]), f"{plan.step_ns / 1e9:.3g} s per step; {searched}", sep="\n")
    print(f"the fullest rank holds {plan.fullest_bytes / 1e9:.1f} GB; a margin of {args.margin:.0%} stays free")
    print(*(f"{name}: {source}" for name, source in record["constants"].items()), sep="\n")
    write_json(args.out / "flow.json", record)
    placement = {each["name"]: {key: each[key] for key in PLACED if key in each} for each in record["events"] if "model" in each}
    (args.out / "placement.yaml").write_text(yaml.safe_dump({"calls": placement}, sort_keys=False), encoding="utf-8")
    print(f"{args.out / 'placement.yaml'}, flow.json")
    if config is None or not plans:
        lacking = "nothing fits if each role also trains on its own ranks, as in a run"
        print(f"no plan.yaml for `oppo train`: {roles if config is None else lacking}")
        return 0
    dump_config(planned_config(config, plans[0]), args.out / "plan.yaml")
    print(
        f"{args.out / 'plan.yaml'}: a run of preset {roles[0]}, whose roles also train on their own ranks: "
        f"{plans[0].step_ns / 1e9:.3g} s per step without overlaps"
    )
    return 0


def _run_config(prices: FlowPrices, preset: str, roles: Mapping[str, str]) -> TrainConfig:
    """The configuration of a covered dataflow.  Raises ConfigError."""
    flow, models = prices.flow, {roles[call.name]: call.model for call in prices.flow.calls}
    rollout, update = (
        next(call for call in flow.calls if call.kind == "generate" and not call.greedy),
        flow.trainers[models["actor"]],
    )
    work = rollout.model_copy(update={"minibatches": update.minibatches})
    config = prices.run(work, models, {"algorithm": {"preset": preset}}, flow.run, group_size=rollout.samples, **prices.rollout)
    lengths.check_lengths(config)
    if problems := check_train(config, inputs=False, models=False):
        raise ConfigError([f"run: {problem}" for problem in problems])
    return config


def _record(prices: FlowPrices, plan: FlowPlan) -> dict[str, Any]:
    calls, events = {call.name: call for call in prices.flow.calls}, list[dict[str, Any]]()
    for name, ranks, start_ns, end_ns, choice in plan.events:
        begin, width = (round(WIDTH * each / plan.step_ns) for each in (start_ns, end_ns - start_ns))
        event: dict[str, Any] = {"name": name, "start_s": start_ns / 1e9, "seconds": (end_ns - start_ns) / 1e9}
        event |= {"ranks": format_ranks(ranks.tolist()), "timeline": (" " * begin + "#" * max(1, width)).ljust(WIDTH)}
        if choice is not None:
            event |= {"model": calls[name].model, "kind": calls[name].kind, "layout": str(choice.sizes), **choice.sizes._asdict()}
            event |= choice.train.model_dump(include={"recompute", "sequence_parallel"}) if choice.train else {}
            event["gb"] = choice.held.sum(axis=0).max() / 1e9
        events.append(event)
    found = {"step_s": plan.step_ns / 1e9, "bound_s": plan.bound_ns / 1e9, "fullest_gb": plan.fullest_bytes / 1e9}
    return {**found, "events": events, "constants": {name: str(source) for name, source in prices.cluster.sources()}}
