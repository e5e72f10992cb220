"""`oppo simulate`: how a run would unfold, step by step, in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oppo_megatron.cli.lengths import add_length_arguments, add_prompt_argument, forced_lengths, prompt_tokens
from oppo_megatron.cli.parser import add_config_arguments

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.rundir.trace import Span
    from oppo_megatron.sim.runs.step_costs import StepCosts
    from oppo_megatron.sim.runs.variants import Variant

TRACED_STEPS = 3
COLUMNS = {
    "run": "run", "s/step": "step_s", "decode": "decode_s", "exp. scoring": "score_exposed_s", "update": "update_s",
    "exp. critic": "critic_exposed_s", "move": "reallocate_s", "idle": "idle_s", "delta": "delta", "chunk": "chunk_tokens",
    "deferrals": "deferrals", "decode steps": "decode_steps", "tokens/s": "tokens_per_s", "x first": "speedup",
}  # fmt: skip


class Simulated(NamedTuple):
    """A variant as it went: its row in the table, its metrics lines, its trace, and what its seconds rest on."""

    variant: Variant
    config: TrainConfig
    row: dict[str, Any]
    lines: list[dict[str, Any]]
    spans: Sequence[Span]
    about: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="how many steps to play")
    seconds = parser.add_mutually_exclusive_group()
    seconds.add_argument("--cluster", type=Path, metavar="cluster.yaml", help="seconds by the laws of this cluster")
    seconds.add_argument("--calibrate", type=Path, metavar="RUN", help="seconds as this run has measured them")
    parser.add_argument(
        "--costs", type=Path, metavar="COSTS.json", help="seconds of the actions, as `oppo schedule` reads"
    )
    add_length_arguments(parser)
    add_prompt_argument(parser)
    parser.add_argument(
        "--fidelity",
        choices=("laps", "actions"),
        default="laps",
        help="laps: for any number of ranks; actions: every action of every rank, up to some hundred ranks",
    )
    parser.add_argument("--modes", metavar="MODE,...", help="sequential, intra, inter, full, padded, ...: a run each")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="a.b=V,...",
        help="a run with each value; may be given several times",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write what runs write there, and pictures of a sweep")


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.report.comparison import format_table
    from oppo_megatron.rundir.directory import RunDirectory
    from oppo_megatron.sim.runs.variants import variants

    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: a run has 1 step or more; give that many")
    if args.costs is not None and args.cluster is not None:
        raise ConfigError("--costs and --cluster both give the seconds of the actions; give one of them")
    chosen = variants(args.modes, args.sweep)
    configs = [_configured(args, variant) for variant in chosen]  # all of them are checked before the first is played
    costs = [_costs(args, config) for config in configs]
    folders = [args.out if len(chosen) == 1 else args.out / each.folder for each in chosen] if args.out else []
    for folder in folders:
        RunDirectory(folder).require_unfinished()
    found = [_simulated(args, *each) for each in zip(chosen, configs, costs, strict=True)]
    for each in found:
        each.row["speedup"] = found[0].row["step_s"] / each.row["step_s"]
    print(format_table(COLUMNS, [each.row for each in found]))
    print("\n".join(dict.fromkeys(line for each in found for line in each.about)))
    if args.out is not None:
        _write(args.out, folders, found)
    return 0


def _configured(args: argparse.Namespace, variant: Variant) -> TrainConfig:
    """The configuration of a variant, checked.  Raises ConfigError."""
    from oppo_megatron.cli.run import load_train
    from oppo_megatron.config.modes import switched
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.sim.runs.variants import PADDED

    config = load_train(args.config, [*args.overrides, *forced_lengths(args), *variant.overrides], inputs=False)
    prompt_tokens(args, config)
    forced = config.debug.lengths
    if forced is None:
        raise ConfigError(
            "nothing says how long responses are: a simulation has no model to end them; give --lognormal MEDIAN,SIGMA, "
            "--trace FILE, or debug.forced_lengths"
        )
    most = config.rollout.max_response_tokens
    if forced.median is not None and forced.median > most:
        raise ConfigError(
            f"the median length is {forced.median:g} tokens, beyond rollout.max_response_tokens = {most}, which would cut most "
            "responses; give a smaller median, or raise the limit"
        )
    if variant.mode is None:
        return config
    return switched(config, "sequential" if variant.mode == PADDED else variant.mode)


def _costs(args: argparse.Namespace, config: TrainConfig) -> StepCosts:
    from oppo_megatron.sim.clusters.reading import read_cluster
    from oppo_megatron.sim.pricing.prices import seen_by
    from oppo_megatron.sim.runs.sources import built_in_costs, cluster_costs, file_costs, run_costs

    tokens = prompt_tokens(args, config)
    if args.cluster is not None:
        limits = _limits(config)
        lengths = [limits(seq_id) for seq_id in range(config.rollout.batch_size)]
        return cluster_costs(config, seen_by(config, read_cluster(args.cluster)), tokens, lengths)
    if args.calibrate is not None:
        return run_costs(config, args.calibrate, tokens, args.costs)
    return built_in_costs(config, tokens) if args.costs is None else file_costs(config, args.costs, tokens)


def _limits(config: TrainConfig) -> Any:
    """The length of each response."""
    from oppo_megatron.config.forced_limits import ForcedLimits
    from oppo_megatron.data.length_trace import forced_quantile

    forced, most = config.debug.lengths, config.rollout.max_response_tokens
    assert forced is not None, "checked before"
    return ForcedLimits.of(forced, most, config.seed, forced_quantile(forced, most))


def _simulated(args: argparse.Namespace, variant: Variant, config: TrainConfig, costs: StepCosts) -> Simulated:
    from itertools import islice

    from oppo_megatron.config.derived import batch_rows
    from oppo_megatron.sim.runs.lines import metrics_lines
    from oppo_megatron.sim.runs.padding import ABOUT, Padding
    from oppo_megatron.sim.runs.sources import describe, run_signals
    from oppo_megatron.sim.runs.variants import PADDED
    from oppo_megatron.sim.runs.virtual import VirtualRun

    endless = config.steps is None or args.steps > config.steps
    signals = None if args.calibrate is None else run_signals(args.calibrate)
    tokens, traced = prompt_tokens(args, config), TRACED_STEPS if args.out is not None else 0
    padding = Padding(_limits(config), batch_rows(config)) if variant.mode == PADDED else None
    played = VirtualRun(
        config, costs, padding.padded if padding else _limits(config), args.fidelity,
        prompt_tokens=tokens, signals=signals, endless=endless, traced_steps=min(traced, args.steps),
    )  # fmt: skip
    steps = list(played.steps(args.steps + 1))
    if padding:
        steps = [padding.unpadded(step) for step in steps]
    lines = list(islice(metrics_lines(config, steps), args.steps))
    row = _row(variant.name, [vars(step.parts) | vars(step) for step in steps[: args.steps]])
    about = [f"prompts of {tokens} tokens, {args.fidelity}", *describe(config, costs), *([ABOUT] if padding else [])]
    if endless:
        about.append(f"the run has {config.steps} steps; as more are asked for, its prompts do not end")
    return Simulated(variant, config, row, lines, played.spans, about)


def _row(name: str, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the steps."""
    from statistics import fmean

    keys = set(COLUMNS.values()) - {"run", "deferrals", "tokens_per_s", "speedup"}
    deferrals = [float(times) for step in steps for times in step["deferrals"]]
    seconds = sum(step["step_s"] for step in steps)
    return {
        "run": name,
        **{key: fmean(float(step[key]) for step in steps) for key in keys},
        "deferrals": fmean(deferrals),
        "tokens_per_s": sum(step["tokens"] for step in steps) / seconds,
    }


def _write(out: Path, folders: Sequence[Path], found: Sequence[Simulated]) -> None:
    from oppo_megatron.report.comparison import draw_deferrals, draw_steps, draw_utilization
    from oppo_megatron.report.utilization import utilization
    from oppo_megatron.rundir.directory import write_json
    from oppo_megatron.rundir.metrics_log import summarise
    from oppo_megatron.sim.runs.lines import write_run

    for folder, each in zip(folders, found, strict=True):
        write_run(each.config, folder, each.lines, each.spans, each.about)
    if len(found) > 1:
        names, summaries = [each.variant.name for each in found], [summarise(each.lines) for each in found]
        rows = [{**each, "placement": "virtual", "mode": name} for name, each in zip(names, summaries, strict=True)]
        draw_steps(rows, out / "sweep.png")
        deferred = {name: each["deferred"] for name, each in zip(names, summaries, strict=True)}
        draw_deferrals(deferred, out / "deferral.png")
        draw_utilization(
            {name: utilization([folder]) for name, folder in zip(names, folders, strict=True)}, out / "utilization.png"
        )
        write_json(out / "sweep.json", {"runs": [each.row | {"folder": each.variant.folder} for each in found]})
    print(
        f"written to {out}: "
        + ("oppo report draws it" if len(found) == 1 else "a run directory each, sweep.json, pictures")
    )
