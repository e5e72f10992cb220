"""The growth of a step's cost with ranks, with the models' size, with the response limit, and with the batch.

One axis at a time varies from the configuration, in plain PPO and with both overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.bench.figures import figures
from oppo_megatron.bench.limit import run_with_limits
from oppo_megatron.bench.overlap import placed
from oppo_megatron.bench.pictures import draw_scaling
from oppo_megatron.bench.suite import Runs, Suite, all_lines, require_same_work, work_figures, work_lines
from oppo_megatron.config.derived import max_context
from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.modes import switched
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.memory import stage_parameters
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.layout.shape import num_kv_heads
from oppo_megatron.modeldir.headers import read_hf_config

MODES = ("sequential", "full")
COLUMNS = {
    "axis": "axis", "value": "value", "M params": "million_parameters", "ranks": "ranks", "tokens/step": "tokens_per_step",
    "sequential s/step": "sequential_step_s", "full s/step": "full_step_s", "x": "speedup", "growth seq": "sequential_growth",
    "growth full": "full_growth",
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """`at(config, value)` is the configuration at a place of the axis, whose `values` these are."""

    label: str
    values: Sequence[float]
    at: Callable[[TrainConfig, float], TrainConfig]


def bench_scaling(
    suite: Suite, config: TrainConfig, axes: Mapping[str, Axis], limit_cores: int | None = None
) -> dict[str, Any]:
    """Run both modes at every place of every axis; the configuration itself, which axes have in common, once.

    Writes scaling.json and scaling.png.  `limit_cores`: add the least time that the work can take on so many cores; None: no
    limit.
    """
    places: dict[tuple[str, float], str] = {}
    configs: dict[str, TrainConfig] = {}
    for name, axis in axes.items():
        for value in axis.values:
            there = axis.at(config, value)
            place = places[name, value] = "base" if there == config else f"{name}/{value:g}"
            configs |= {f"{place}-{mode}": switched(there, mode) for mode in MODES}
    runs, limits = run_with_limits(suite, configs, limit_cores)
    rows = [row(name, value, place, configs, runs) for (name, value), place in places.items()]
    for name in axes:
        add_growth([each for each in rows if each["axis"] == name])
    result = {"results": rows, **limits}
    suite.write("scaling", config, result, runs)
    draw_scaling({name: axis.label for name, axis in axes.items()}, rows, suite.out / "scaling.png")
    for each in rows:
        require_same_work(config, each)
    return result


def make_axes(
    config: TrainConfig, names: Sequence[str], ranks: Sequence[int], factors: Sequence[float]
) -> dict[str, Axis]:
    """The named axes: `ranks` over these numbers of ranks, the others over these factors of the configured value."""
    limit, batch = config.rollout.max_response_tokens, config.rollout.batch_size
    unit = config.ppo.minibatches * config.rollout.group_size
    known = {
        "ranks": Axis("ranks", list(ranks), with_ranks),
        "model": Axis("factor of width and depth", list(factors), with_model),
        "limit": Axis("response limit", _multiples(limit, factors, 1), with_limit),
        "batch": Axis("batch size", _multiples(batch, factors, unit), with_batch),
    }
    return {name: known[name] for name in names}


def _multiples(number: int, factors: Sequence[float], unit: int) -> list[float]:
    """Whole multiples of `unit`."""
    return sorted({unit * max(1, round(number * factor / unit)) for factor in factors})


def with_ranks(config: TrainConfig, value: float) -> TrainConfig:
    """The same work on `value` ranks of one thread: disaggregated with one rank for the scorers, if there are any, and the
    others replicas of the actor (one rank: a single process), else as replicas of all roles."""
    ranks = round(value)
    alone = placed(config, "replicas", ranks)
    if config.placement.mode != "disaggregated" or ranks == 1 or len(named_roles(config)) == 1:
        return alone
    placement = config.placement.model_copy(
        update={"mode": "disaggregated", "actor": ParallelConfig(dp=ranks - 1), "scorer": ParallelConfig()}
    )
    return alone.model_copy(update={"placement": placement})


def with_model(config: TrainConfig, value: float) -> TrainConfig:
    """All roles `value` times as wide and as deep.  Raises ConfigError for weights, which cannot be scaled."""
    if value == 1:
        return config
    changes: dict[str, Any] = {}
    for name in ("actor", "critic", "reward", "reference"):
        role = getattr(config, name)
        if role is None:
            continue
        if role.init is None:
            raise ConfigError(
                f"{name}.checkpoint is given, but only a random initialisation can be scaled; give {name}.init instead, "
                "or leave out the axis `model`"
            )
        changes[name] = role.model_copy(update={"init": scaled_shape(read_hf_config(role), value)})
    return config.model_copy(update=changes)


def scaled_shape(shape: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A config.json `factor` times as wide (heads of the same size, so hidden and FFN follow) and as deep, rounded."""
    heads = shape["num_attention_heads"]
    scaled_heads = max(1, round(heads * factor))
    most = max(1, round(num_kv_heads(shape) * factor))
    ratio = scaled_heads / heads
    return {
        **shape,
        "num_attention_heads": scaled_heads,
        "num_key_value_heads": max(n for n in range(1, most + 1) if scaled_heads % n == 0),
        "hidden_size": shape["hidden_size"] * scaled_heads // heads,
        "intermediate_size": max(1, round(shape["intermediate_size"] * ratio)),
        "num_hidden_layers": max(1, round(shape["num_hidden_layers"] * factor)),
    }


def with_limit(config: TrainConfig, value: float) -> TrainConfig:
    """Responses of at most `value` tokens.  Log-normal forced lengths and the micro-batch grow alike; so do the positions
    of models that are initialised at random."""
    before, limit = config.rollout.max_response_tokens, round(value)
    if limit == before:
        return config
    factor = limit / before
    rollout = {"max_response_tokens": limit}
    debug, forced = config.debug, config.debug.lengths
    if forced is not None and forced.median is not None:
        debug = debug.model_copy(update={"forced_lengths": [forced.median * factor, forced.sigma]})
    changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout), "debug": debug})
    context = max_context(changed)
    tokens = max(config.runtime.micro_batch_tokens, context)
    return _with_positions(changed, context).model_copy(
        update={"runtime": config.runtime.model_copy(update={"micro_batch_tokens": tokens})}
    )


def _with_positions(config: TrainConfig, context: int) -> TrainConfig:
    changes: dict[str, Any] = {}
    for name in ("actor", "critic", "reward", "reference"):
        role = getattr(config, name)
        if role is None or role.init is None:
            continue
        shape = dict(read_hf_config(role))
        if (positions := shape.get("max_position_embeddings")) is not None:
            shape["max_position_embeddings"] = max(positions, context)
        changes[name] = role.model_copy(update={"init": shape})
    return config.model_copy(update=changes)


def with_batch(config: TrainConfig, value: float) -> TrainConfig:
    """Batches of `value` rollouts; delta, which counts groups, keeps its share of them."""
    before, size = config.rollout.batch_size, round(value)
    delta, most = config.overlap.delta, size // config.rollout.group_size
    scaled = {name: min(most, round(getattr(delta, name) * size / before)) for name in ("initial", "max")}
    overlap = config.overlap.model_copy(update={"delta": delta.model_copy(update=scaled)})
    rollout = config.rollout.model_copy(update={"batch_size": size})
    return config.model_copy(update={"rollout": rollout, "overlap": overlap})


def row(axis: str, value: float, place: str, configs: Mapping[str, TrainConfig], runs: Runs) -> dict[str, Any]:
    """The figures of one place of an axis, whose runs are named by `place`."""
    found = {mode: figures(all_lines(runs[f"{place}-{mode}"])) for mode in MODES}
    config = configs[f"{place}-{MODES[0]}"]
    steps = sum(len(run.lines) for run in runs[f"{place}-{MODES[0]}"])
    shape = read_hf_config(config.actor)
    return {
        "axis": axis,
        "value": value,
        "million_parameters": stage_parameters(shape, 1, 1, 0, scalar=False) / 1e6,
        "ranks": world_size(config),
        "tokens_per_step": sum(found[MODES[0]]["tokens"]) / steps,
        **{
            f"{mode}_{name}": each[name]
            for mode, each in found.items()
            for name in ("step_s", "total_s", "tokens_per_s")
        },
        "speedup": found["sequential"]["total_s"] / found["full"]["total_s"],
        **work_figures({mode: runs[f"{place}-{mode}"] for mode in MODES}),
    }


def remarks(result: Mapping[str, Any]) -> list[str]:
    """The lines below the table about places at which the modes did different work."""
    rows = [row for row in result["results"] if not row["same_work"]]
    return [f"{row['axis']} {row['value']:g}: {line}" for row in rows for line in work_lines(row)]


def add_growth(rows: Sequence[dict[str, Any]]) -> None:
    """From each place to the next, the power of the value (of the parameters, for models) by which the step's seconds grow."""
    for before, after in zip(rows, rows[1:], strict=False):
        key = "million_parameters" if after["axis"] == "model" else "value"
        if after[key] == before[key]:
            continue
        for mode in MODES:
            times = after[f"{mode}_step_s"] / before[f"{mode}_step_s"]
            after[f"{mode}_growth"] = math.log(times) / math.log(after[key] / before[key])
