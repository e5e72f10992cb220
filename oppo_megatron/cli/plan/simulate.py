"""`oppo plan simulate`: simulate a run's steps in virtual time, without models."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from oppo_megatron.cli import lengths
from oppo_megatron.cli.load import load_train
from oppo_megatron.cli.parser import add_config_arguments, count
from oppo_megatron.config.derived import MODES, switched
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.report.comparison import format_table
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.trace import Span
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.pricing.prices import seen_by
from oppo_megatron.sim.runs import step_costs
from oppo_megatron.sim.runs.continuous import run_of
from oppo_megatron.sim.runs.virtual import metrics_lines, write_run

HELP = "play the steps of a run in virtual time, without models"
TRACED_STEPS = 3
MOST_RUNS = 1000
COLUMNS = {
    "run": "run", "s/step": "step_s", "decode": "decode_s", "exp. scoring": "score_exposed_s", "update": "update_s",
    "exp. critic": "critic_exposed_s", "move": "reallocate_s", "idle": "idle_s", "delta": "delta", "chunk": "chunk_tokens",
    "deferrals": "deferrals", "decode steps": "decode_steps", "tokens/s": "tokens_per_s", "x first": "speedup",
}  # fmt: skip
MEANS = set(COLUMNS.values()) - {"run", "deferrals", "tokens_per_s", "speedup"}


class Variant(NamedTuple):
    """The configuration in `mode` (None: unchanged), with `overrides`."""

    mode: str | None
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join([*([self.mode] if self.mode else []), *self.overrides]) or "as configured"

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9.=+_-]+", "_", self.name)


class Simulated(NamedTuple):
    config: TrainConfig
    row: dict[str, Any]
    lines: list[dict[str, Any]]
    spans: Sequence[Span]
    about: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--steps", type=count, required=True, metavar="N", help="number of steps to play")
    seconds = parser.add_mutually_exclusive_group()
    seconds.add_argument("--cluster", type=Path, metavar="cluster.yaml", help="seconds by the laws of this cluster")
    seconds.add_argument("--calibrate", type=Path, metavar="RUN", help="seconds as this run has measured them")
    parser.add_argument("--costs", type=Path, metavar="COSTS.json", help="seconds of the actions, from a file")
    lengths.add_length_arguments(parser)
    lengths.add_prompt_argument(parser)
    parser.add_argument("--modes", metavar="MODE,...", help="sequential, intra, inter, full, ...: a run in each")
    parser.add_argument("--sweep", action="append", default=[], metavar="a.b=V,...", help="a run with each value; repeatable")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write run directories there, for `oppo report`")


def run(args: argparse.Namespace) -> int:
    if args.costs is not None and args.cluster is not None:
        raise ConfigError("--costs and --cluster both give the seconds of the actions; give one of them")
    chosen = variants(args.modes, args.sweep)
    configs = [_configured(args, variant) for variant in chosen]  # all are checked before the first is simulated
    costs = [_costs(args, config) for config in configs]
    folders = [args.out if len(chosen) == 1 else args.out / each.folder for each in chosen] if args.out else []
    for folder in folders:
        RunDirectory(folder).require_unfinished()
    found = [_simulated(args, *each) for each in zip(chosen, configs, costs, strict=True)]
    for each in found:
        each.row["speedup"] = found[0].row["step_s"] / each.row["step_s"]
    print(format_table(COLUMNS, [each.row for each in found]))
    print("\n".join(dict.fromkeys(line for each in found for line in each.about)))
    for folder, each in zip(folders, found, strict=args.out is not None):
        write_run(each.config, folder, each.lines, each.spans, each.about)
    if args.out is not None and len(found) > 1:
        rows = [each.row | {"folder": variant.folder} for each, variant in zip(found, chosen, strict=True)]
        write_json(args.out / "sweep.json", {"runs": rows})
    if args.out is not None:
        print(f"written to {args.out}; `oppo report` draws it")
    return 0


def variants(modes: str | None, sweeps: Sequence[str]) -> list[Variant]:
    """Combine every mode with every value of `sweeps` ("a.b=1,2"). Raises ConfigError."""
    names = [None] if modes is None else [name.strip() for name in modes.split(",")]
    unknown = [name for name in names if name is not None and name not in MODES]
    problems = [f"--modes {name}: not a mode; the modes are {', '.join(MODES)}" for name in unknown]
    axes, settings = [], [sweep.partition("=")[0].strip() for sweep in sweeps]
    for sweep, key in zip(sweeps, settings, strict=True):
        # Commas in brackets belong to a list.
        values = [part for part in re.split(r",(?![^\[{(]*[\]})])", sweep.partition("=")[2]) if part.strip()]
        if not key or not values:
            problems.append(f"--sweep {sweep}: give a setting and its values, as in overlap.delta.initial=0,4,8")
        axes.append([f"{key}={value}" for value in values])
    twice = {each for each in settings if settings.count(each) > 1}
    problems += [f"--sweep {each}: swept twice; give all its values at once" for each in sorted(twice)]
    made = [] if problems else [Variant(mode, values) for mode in names for values in product(*axes)]
    if len(made) > MOST_RUNS:
        problems.append(f"{len(made)} runs are asked for; ask for at most {MOST_RUNS}")
    if len({each.folder for each in made}) < len(made):
        problems.append("a mode or a value is given twice; give each once")
    if problems:
        raise ConfigError(problems)
    return made


def _configured(args: argparse.Namespace, variant: Variant) -> TrainConfig:
    config = load_train(args.config, [*args.overrides, *lengths.forced_lengths(args), *variant.overrides], inputs=False)
    lengths.prompt_tokens(args, config)
    if config.rollout.lengths is None:
        raise ConfigError(
            "the length of responses is not given, and a simulation has no model to end them; give --lognormal MEDIAN,SIGMA, "
            "--trace FILE, or rollout.forced_lengths"
        )
    lengths.check_lengths(config)
    return config if variant.mode is None else switched(config, variant.mode)


def _costs(args: argparse.Namespace, config: TrainConfig) -> step_costs.StepCosts:
    tokens, limits = lengths.prompt_tokens(args, config), lengths.forced_limits(config)
    if args.cluster is not None:
        assert limits is not None, "lengths are forced"
        forced = [limits(seq_id) for seq_id in range(config.rollout.batch_size)]
        return step_costs.cluster_costs(config, seen_by(config, read_cluster(args.cluster)), tokens, forced)
    if args.calibrate is not None:
        return step_costs.run_costs(config, args.calibrate, tokens, args.costs)
    if args.costs is not None:
        return step_costs.file_costs(config, args.costs, tokens)
    return step_costs.built_in_costs(config, tokens)


def _simulated(args: argparse.Namespace, variant: Variant, config: TrainConfig, costs: step_costs.StepCosts) -> Simulated:
    endless, limits = config.steps is None or args.steps > config.steps, lengths.forced_limits(config)
    assert limits is not None, "lengths are forced"
    signals = None if args.calibrate is None else step_costs.run_signals(args.calibrate)
    tokens, traced = lengths.prompt_tokens(args, config), TRACED_STEPS if args.out is not None else 0
    played = run_of(
        config, costs, limits,
        prompt_tokens=tokens, signals=signals, endless=endless, traced_steps=min(traced, args.steps),
    )  # fmt: skip
    steps = list(played.steps(args.steps + 1))
    lines = list(islice(metrics_lines(steps), args.steps))
    found = [step.parts._asdict() | vars(step) for step in steps[: args.steps]]
    row = {
        "run": variant.name,
        **{key: fmean(float(step[key]) for step in found) for key in MEANS},
        "deferrals": fmean(float(times) for step in found for times in step["deferrals"]),
        "tokens_per_s": sum(step["tokens"] for step in found) / sum(step["step_s"] for step in found),
    }
    about = [f"prompts of {tokens} tokens", *step_costs.describe(config, costs)]
    if endless:
        about.append(f"the run has {config.steps} steps; as more are asked for, its prompts do not end")
    return Simulated(config, row, lines, played.spans, about)
