"""What `oppo plan` is asked, as a task of the search."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_megatron.cli.lengths import forced_lengths, prompt_tokens

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.sim.clusters.cluster import Cluster
    from oppo_megatron.sim.search.planning import Planned, Task
    from oppo_megatron.sim.search.scales import Scales

MARGIN = 0.1
"""Of a rank's memory that stays free, unless --margin says otherwise."""
ROLES = ("actor", "critic", "reference", "reward")


def load_task(args: argparse.Namespace) -> Task:
    """The configuration without its ranks and layouts, and what they are to be chosen by.  Raises ConfigError."""
    task = task_of(args.config, args.cluster, given_settings(args), margin=args.margin)
    task = replace(task, prompt=prompt_tokens(args, task.config))
    return replace(task, scales=_scales(args, task))


def given_settings(args: argparse.Namespace) -> list[str]:
    """Overrides of the command line, with what --trace or --lognormal stands for."""
    return [*args.overrides, *forced_lengths(args)]


def task_of(
    path: Path, cluster_path: Path, given: Sequence[str], cluster_given: Sequence[str] = (), margin: float = MARGIN
) -> Task:
    """A configuration and a cluster by file, with overrides of both.  Raises ConfigError."""
    from oppo_megatron.cli.lengths import even_lengths
    from oppo_megatron.preflight.settings import check_train
    from oppo_megatron.sim.clusters.reading import read_cluster
    from oppo_megatron.sim.search.planning import Task, layout_problems

    cluster = read_cluster(cluster_path, cluster_given)
    config = _without_layouts(path, given, cluster)
    _check_lengths(config)

    def check(planned: TrainConfig) -> list[str]:
        """Tokenizers and weights, which no plan changes, were checked with the configuration, and take seconds to read."""
        return [*check_train(planned, inputs=False, models=False), *layout_problems(planned)]

    return Task(config, cluster, even_lengths(config), margin, limits=_limits(config), check=check)


def _limits(config: TrainConfig) -> Callable[[int], int] | None:
    """The length of each response, as a run would force it; None where all are of full length."""
    from oppo_megatron.config.forced_limits import ForcedLimits
    from oppo_megatron.data.length_trace import forced_quantile

    forced, most = config.debug.lengths, config.rollout.max_response_tokens
    if forced is None:
        return None
    return ForcedLimits.of(forced, most, config.seed, forced_quantile(forced, most))


def _without_layouts(path: Path, given: Sequence[str], cluster: Cluster) -> TrainConfig:
    from oppo_megatron.cli.placement import AUTO
    from oppo_megatron.cli.run import load_settings
    from oppo_megatron.config.load import read_tree
    from oppo_megatron.config.model import PlacementConfig
    from oppo_megatron.config.run import TrainSettings

    tree = read_tree(path, given)
    overrides = [*given, *_dtype(tree, cluster), *AUTO, *_unlaid(tree)]
    settings = load_settings("train", path, overrides, inputs=False)
    assert isinstance(settings, TrainSettings), "`train` was asked for"
    return settings.with_placement(PlacementConfig(mode="single"))


def _dtype(tree: Mapping[Any, Any], cluster: Cluster) -> Iterator[str]:
    """The default type on the cluster, not on this machine."""
    runtime = tree.get("runtime")
    if not isinstance(runtime, Mapping) or runtime.get("dtype") is None:
        yield f"runtime.dtype={'float32' if cluster.gpu.on_cpu else 'bfloat16'}"


def _unlaid(tree: Mapping[Any, Any]) -> Iterator[str]:
    """Overrides that take out what roles say of their own ranks and layouts."""
    for name in ROLES:
        role = tree.get(name)
        if not isinstance(role, Mapping):
            continue
        yield from (f"{name}.{key}=null" for key in ("ranks", "parallel", "generate") if role.get(key) is not None)
        train = role.get("train")
        if isinstance(train, Mapping):
            yield from (f"{name}.train.{key}=null" for key in ("tp", "pp", "dp") if train.get(key) is not None)
            yield from (f"{name}.train.vpp=1" for key in ("vpp",) if key in train)


def as_configured(args: argparse.Namespace, planned: Planned) -> dict[str, Any]:
    """What becomes of the configuration with the ranks and layouts that it says itself."""
    from oppo_megatron.cli.run import load_settings
    from oppo_megatron.config.load import read_tree
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.sim.search.given import judged

    try:
        given = given_settings(args)
        overrides = [*given, *_dtype(read_tree(args.config, given), planned.task.cluster)]
        settings = load_settings("train", args.config, overrides, inputs=False)
    except ConfigError as error:
        return {"told": f"refused: {error.problems[0]}"}
    assert isinstance(settings, TrainSettings), "`train` was asked for"
    config = settings.settled()
    if config is None:
        return {"told": "placement.mode is auto"}
    return judged(planned, config)


def _check_lengths(config: TrainConfig) -> None:
    from oppo_megatron.errors import ConfigError

    most, forced = config.rollout.max_response_tokens, config.debug.lengths
    if forced is not None and forced.median is not None and forced.median > most:
        raise ConfigError(
            f"half of the responses have more than {forced.median:g} tokens, but rollout.max_response_tokens is {most}; raise "
            "it, or lower the median"
        )


def _scales(args: argparse.Namespace, task: Task) -> Scales:
    """What --costs or --calibrate has measured, as factors on the laws."""
    from oppo_megatron.sim.search.calibration import scales_of_costs, scales_of_run
    from oppo_megatron.sim.search.scales import Scales

    if args.costs is not None:
        return scales_of_costs(args.costs, _as_it_is(args), task.cluster, task.decoding)
    if args.calibrate is not None:
        return scales_of_run(*_measured_run(args.calibrate), task.cluster, task.prompt_tokens, str(args.calibrate))
    return Scales()


def _as_it_is(args: argparse.Namespace) -> TrainConfig:
    from oppo_megatron.cli.run import load_train

    return load_train(args.config, given_settings(args), inputs=False)


def _measured_run(run: Path) -> tuple[TrainConfig, list[dict[str, Any]]]:
    """The configuration of a run, and its lines of metrics.  Raises ConfigError."""
    from oppo_megatron.config.load import load_config
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.errors import ConfigError
    from oppo_megatron.rundir.directory import RunDirectory
    from oppo_megatron.rundir.metrics_log import read_metrics

    directory = RunDirectory(run)
    for path in (directory.config, directory.metrics):
        if not path.is_file():
            raise ConfigError(f"--calibrate {run}: there is no {path}; name the directory of a run of `oppo train`")
    return load_config(TrainConfig, directory.config), read_metrics(directory.metrics)
