"""Measured seconds of a run, in its own layouts, over those of the laws: the factors with which other layouts are priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.costs_file import read_costs
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.pricing.prices import Prices, seen_by
from oppo_megatron.sim.search.scales import Scales

Lines = Sequence[Mapping[str, Any]]


def scales_of_costs(path: Path, config: TrainConfig, cluster: Cluster, decoding: Decoding) -> Scales:
    """From the cost lines that a run of this configuration, in its layouts, has measured.

    Decoding is compared with the batch of a replica, reading with a full micro-batch.  An update takes as its role's reading
    does: lines have no updates.  Raises ConfigError.
    """
    placements = role_placements(config)
    measured = read_costs(path, placements)
    if stray := sorted(set(measured.prefill) - set(placements)):
        raise ConfigError(
            f"{path}: prefill of {', '.join(stray)}, which the configuration does not have; give costs that were measured in it"
        )
    laws = Prices(config, seen_by(config, cluster), decoding).costs()
    sequences = ceil(len(decoding.lengths) / placements["actor"].dp)
    reading = {
        role: _prefill_s(measured, role, placement.pp, config) / _prefill_s(laws, role, placement.pp, config)
        for role, placement in placements.items()
        if role in measured.prefill
    }
    pp = placements["actor"].pp
    decoding_scale = _decode_s(measured, pp, sequences) / _decode_s(laws, pp, sequences)
    return Scales(reading | {"actor": decoding_scale}, reading, source=f"measured: {path}")


def scales_of_run(config: TrainConfig, lines: Lines, cluster: Cluster, prompt_tokens: int, run: str) -> Scales:
    """From the medians of a run's steps after the first.  Raises ConfigError where a run has no finished step."""
    steady = [line for line in lines if line.get("step_s") is not None]
    steady = steady[1:] or steady
    if not steady:
        raise ConfigError(f"--calibrate {run}: its metrics.jsonl has no finished step; let the run make two or more")
    length = max(1, round(_median(steady, "trained_len_mean") or config.rollout.max_response_tokens))
    decoding = Decoding(prompt_tokens, [length] * config.rollout.batch_size)
    laws: dict[tuple[str, str], float] = {}
    for price in Prices(config, seen_by(config, cluster), decoding).rows():
        laws[price.role, price.phase] = price.seconds
    update = {
        role: seconds / (laws[role, "update"] + laws.get((role, "weights"), 0.0))
        for role, field in (("actor", "train_s"), ("critic", "critic_update_s"))
        if (role, "update") in laws and (seconds := _median(steady, field))
    }
    serving = _scoring(config, steady, laws)
    decode_s, own = _median(steady, "decode_s"), _on_the_actor(config, steady)
    if decode_s is not None and decode_s > own:
        serving["actor"] = (decode_s - own) / (laws["actor", "prompts"] + laws["actor", "decode"])
    return Scales(serving, update, source=f"measured: {run}, {len(steady)} steps")


def _scoring(config: TrainConfig, lines: Lines, laws: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """One factor for the roles that score, by what the critic's first rank does for all of its roles."""
    placements = role_placements(config)
    seconds = _median(lines, "score_busy_s")
    speaker = placements.get("critic") or placements.get("reward") or placements.get("reference")
    if not seconds or speaker is None:
        return {}
    there = [role for role, place in placements.items() if role != "actor" and speaker.ranks[0] in place.ranks]
    factor = seconds / sum(laws[role, "score"] for role in there)
    return {role: factor for role in placements if role != "actor"}


def _on_the_actor(config: TrainConfig, lines: Lines) -> float:
    """Seconds of scoring within `decode_s`: where the critic's first rank also decodes."""
    placements = role_placements(config)
    speaker = placements.get("critic") or placements.get("reward") or placements.get("reference")
    shared = speaker is not None and speaker.ranks[0] in placements["actor"].ranks
    return (_median(lines, "score_busy_s") or 0.0) if shared else 0.0


def _median(lines: Lines, field: str) -> float | None:
    values = [float(line[field]) for line in lines if line.get(field) is not None]
    return median(values) if values else None


def _decode_s(costs: Costs, pp: int, sequences: int) -> float:
    return sum(costs.decode_at(stage)(sequences) for stage in range(pp)) + costs.sample(sequences)


def _prefill_s(costs: Costs, role: str, pp: int, config: TrainConfig) -> float:
    tokens = config.runtime.micro_batch_tokens
    return sum(costs.prefill_at(role, stage)(tokens) for stage in range(pp))
