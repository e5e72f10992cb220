"""The task of `oppo plan search`: a configuration without its ranks and layouts, and a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oppo_megatron.cli.lengths import even_lengths, forced_lengths, prompt_tokens

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.sim.clusters.cluster import Cluster
    from oppo_megatron.sim.search.planning import Task

ROLES = ("actor", "critic", "reference", "reward")


def load_task(args: argparse.Namespace) -> Task:
    """Read the configuration and the cluster.  Raises ConfigError."""
    from oppo_megatron.preflight.settings import check_train
    from oppo_megatron.sim.clusters.reading import read_cluster
    from oppo_megatron.sim.search.planning import Task, layout_problems

    cluster = read_cluster(args.cluster)
    config = _without_layouts(args, cluster)
    check_lengths(config)

    def check(planned: TrainConfig) -> list[str]:
        """Check without tokenizers and weights: no plan depends on them, and they take seconds to read."""
        return [*check_train(planned, inputs=False, models=False), *layout_problems(planned)]

    lengths, tokens = even_lengths(config), prompt_tokens(args, config)
    return Task(config, cluster, lengths, args.margin, forced_limits(config), tokens, check)


def given_settings(args: argparse.Namespace, cluster: Cluster) -> list[str]:
    """Return the overrides of the command line and of --trace or --lognormal, and the cluster's default dtype."""
    from oppo_megatron.config.load import read_tree

    given = [*args.overrides, *forced_lengths(args)]
    runtime = read_tree(args.config, given).get("runtime")
    if not isinstance(runtime, Mapping) or runtime.get("dtype") is None:
        given.append(f"runtime.dtype={'float32' if cluster.gpu.on_cpu else 'bfloat16'}")
    return given


def forced_limits(config: TrainConfig) -> Callable[[int], int] | None:
    """Return the length limit of each response as a run forces it; None if all have the maximum length."""
    from oppo_megatron.config.debug import ForcedLimits
    from oppo_megatron.data.length_trace import forced_quantile

    forced, most = config.debug.lengths, config.rollout.max_response_tokens
    return None if forced is None else ForcedLimits.of(forced, most, config.seed, forced_quantile(forced, most))


def check_lengths(config: TrainConfig) -> None:
    """Raise ConfigError if most responses would be truncated."""
    from oppo_megatron.errors import ConfigError

    most, forced = config.rollout.max_response_tokens, config.debug.lengths
    if forced is not None and forced.median is not None and forced.median > most:
        raise ConfigError(
            f"half of the responses have more than {forced.median:g} tokens, but rollout.max_response_tokens is {most}, which "
            "would cut them; raise it, or lower the median"
        )


def _without_layouts(args: argparse.Namespace, cluster: Cluster) -> TrainConfig:
    from oppo_megatron.cli.measure import AUTO
    from oppo_megatron.cli.run import load_settings
    from oppo_megatron.config.load import read_tree
    from oppo_megatron.config.model import PlacementConfig
    from oppo_megatron.config.run import TrainSettings

    given: Sequence[str] = given_settings(args, cluster)
    overrides = [*given, *AUTO, *_unlaid(read_tree(args.config, given))]
    settings = load_settings("train", args.config, overrides, inputs=False)
    assert isinstance(settings, TrainSettings), "`train` was asked for"
    return settings.with_placement(PlacementConfig(mode="single"))


def _unlaid(tree: Mapping[Any, Any]) -> Iterator[str]:
    """Yield overrides that remove the roles' own ranks and layouts."""
    for name in ROLES:
        role = tree.get(name)
        if not isinstance(role, Mapping):
            continue
        yield from (f"{name}.{key}=null" for key in ("ranks", "parallel") if role.get(key) is not None)
        train = role.get("train")
        if isinstance(train, Mapping):
            yield from (f"{name}.train.{key}=null" for key in ("tp", "pp", "dp") if train.get(key) is not None)
            yield from (f"{name}.train.vpp=1" for key in ("vpp",) if key in train)
