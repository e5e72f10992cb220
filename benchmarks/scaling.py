"""The sweep `scaling` of `benchmarks.sweeps`: configurations along an axis, and how a step's seconds grow along it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from oppo_megatron.bench.figures import figures
from oppo_megatron.bench.suite import Runs, all_lines, placed, work_figures, work_lines
from oppo_megatron.cli.bench import load_base
from oppo_megatron.config.derived import max_context, switched
from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import usable_cores
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.memory import stage_parameters
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.layout.shape import num_kv_heads
from oppo_megatron.modeldir.headers import read_hf_config

Args = argparse.Namespace
Configs = dict[str, TrainConfig]
ROLES = ("actor", "critic", "reward", "reference")
SCALED_MODES = ("sequential", "full")
AXES = ("ranks", "model", "limit", "batch")


def updated(config: TrainConfig, section: str, **changes: Any) -> TrainConfig:
    """Return the configuration with some settings of a section replaced."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def scaling_configs(args: Args) -> Configs:
    config = load_base(args)
    cores = usable_cores()
    ranks = sorted(set(args.ranks or [2**power for power in range(cores.bit_length())]))
    configs: Configs = {}
    for axis in AXES if args.axis == "all" else [args.axis]:
        for value, there in places(config, axis, ranks, sorted(set(args.factors))).items():
            configs |= {f"{axis}/{value:g}/{mode}": switched(there, mode) for mode in SCALED_MODES}
    return configs


def places(config: TrainConfig, axis: str, ranks: Sequence[int], factors: Sequence[float]) -> dict[float, TrainConfig]:
    """Return the configurations along an axis by their value: ranks as given, else factors of the configured value."""
    if axis == "ranks":
        return {float(number): with_ranks(config, number) for number in ranks}
    if axis == "model":
        return {factor: with_model(config, factor) for factor in factors}
    if axis == "limit":
        limit = config.rollout.max_response_tokens
        return {float(n): with_limit(config, n) for n in sorted({max(1, round(limit * f)) for f in factors})}
    unit, batch = config.ppo.minibatches * config.rollout.group_size, config.rollout.batch_size
    sizes = sorted({unit * max(1, round(batch * factor / unit)) for factor in factors})
    return {float(size): with_batch(config, size) for size in sizes}


def with_ranks(config: TrainConfig, ranks: int) -> TrainConfig:
    """Return the same work on `ranks` ranks of one thread.

    Disaggregated: one rank for the scorers and the others replicas of the actor (one rank: a single process); else replicas of
    all roles.
    """
    alone = placed(config, "replicas", ranks)
    if config.placement.mode != "disaggregated" or ranks == 1 or len(named_roles(config)) == 1:
        return alone
    pools = {"mode": "disaggregated", "actor": ParallelConfig(dp=ranks - 1), "scorer": ParallelConfig()}
    return alone.model_copy(update={"placement": config.placement.model_copy(update=pools)})


def with_model(config: TrainConfig, factor: float) -> TrainConfig:
    """Return all roles `factor` times as wide and as deep.  Raises ConfigError for weights, which cannot be scaled."""
    changes: dict[str, Any] = {}
    for name in ROLES:
        role = getattr(config, name)
        if role is None or factor == 1:
            continue
        if role.init is None:
            raise ConfigError(
                f"{name}.checkpoint is given, but only a random initialisation can be scaled; give {name}.init instead, "
                "or leave out the axis `model`"
            )
        changes[name] = role.model_copy(update={"init": scaled_shape(read_hf_config(role), factor)})
    return config.model_copy(update=changes)


def scaled_shape(shape: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a config.json `factor` times as wide and as deep, rounded; heads keep their size, hidden and FFN sizes follow."""
    heads = shape["num_attention_heads"]
    scaled_heads = max(1, round(heads * factor))
    most = max(1, round(num_kv_heads(shape) * factor))
    return {
        **shape,
        "num_attention_heads": scaled_heads,
        "num_key_value_heads": max(n for n in range(1, most + 1) if scaled_heads % n == 0),
        "hidden_size": shape["hidden_size"] * scaled_heads // heads,
        "intermediate_size": max(1, round(shape["intermediate_size"] * scaled_heads / heads)),
        "num_hidden_layers": max(1, round(shape["num_hidden_layers"] * factor)),
    }


def with_limit(config: TrainConfig, limit: int) -> TrainConfig:
    """Return responses of at most `limit` tokens; log-normal lengths, micro-batches and random models' positions follow."""
    before, forced = config.rollout.max_response_tokens, config.rollout.lengths
    if limit == before:
        return config
    changed = updated(config, "rollout", max_response_tokens=limit)
    if forced is not None and forced.median is not None:
        changed = updated(changed, "rollout", forced_lengths=[forced.median * limit / before, forced.sigma])
    context = max_context(changed)
    changes: dict[str, Any] = {}
    for name in ROLES:
        role = getattr(config, name)
        if role is not None and role.init is not None:
            shape = dict(read_hf_config(role))
            if (positions := shape.get("max_position_embeddings")) is not None:
                shape["max_position_embeddings"] = max(positions, context)
            changes[name] = role.model_copy(update={"init": shape})
    tokens = max(config.runtime.micro_batch_tokens, context)
    return updated(changed.model_copy(update=changes), "runtime", micro_batch_tokens=tokens)


def with_batch(config: TrainConfig, size: int) -> TrainConfig:
    """Return batches of `size` rollouts; delta, in groups, keeps its share of them."""
    before, delta = config.rollout.batch_size, config.overlap.delta
    most = size // config.rollout.group_size
    scaled = {name: min(most, round(getattr(delta, name) * size / before)) for name in ("initial", "max")}
    overlapped = updated(config, "overlap", delta=delta.model_copy(update=scaled))
    return updated(overlapped, "rollout", batch_size=size)


def scaling_result(configs: Configs, runs: Runs) -> tuple[dict[str, Any], list[str]]:
    rows = [_scaling_row(place, configs, runs) for place in dict.fromkeys(name.rpartition("/")[0] for name in runs)]
    for axis in AXES:
        add_growth([row for row in rows if row["axis"] == axis])
    unequal = [f"{row['axis']} {row['value']:g}: {line}" for row in rows if not row["same_work"] for line in work_lines(row)]
    work = {"same_work": not unequal, "decoded_tokens": work_figures(runs)["decoded_tokens"]}
    return {"results": rows, **work}, unequal


def _scaling_row(place: str, configs: Configs, runs: Runs) -> dict[str, Any]:
    own = {mode: runs[f"{place}/{mode}"] for mode in SCALED_MODES}
    found = {mode: figures(all_lines(turns)) for mode, turns in own.items()}
    config, (axis, value) = configs[f"{place}/{SCALED_MODES[0]}"], place.split("/")
    steps = sum(len(run.lines) for run in own["sequential"])
    return {
        "axis": axis, "value": float(value), "ranks": world_size(config),
        "million_parameters": stage_parameters(read_hf_config(config.actor), 1, 1, 0, scalar=False) / 1e6,
        "tokens_per_step": sum(found["sequential"]["tokens"]) / steps,
        **{f"{mode}_{name}": each[name] for mode, each in found.items() for name in ("step_s", "total_s", "tokens_per_s")},
        "speedup": found["sequential"]["total_s"] / found["full"]["total_s"], **work_figures(own),
    }  # fmt: skip


def add_growth(rows: Sequence[dict[str, Any]]) -> None:
    """Add `growth`: a step's seconds grow from the row before as this power of the value (for models: of the parameters)."""
    for before, after in zip(rows, rows[1:], strict=False):
        key = "million_parameters" if after["axis"] == "model" else "value"
        if after[key] != before[key]:
            for mode in SCALED_MODES:
                times = after[f"{mode}_step_s"] / before[f"{mode}_step_s"]
                after[f"{mode}_growth"] = math.log(times) / math.log(after[key] / before[key])
