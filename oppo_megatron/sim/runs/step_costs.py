from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

from oppo_megatron.config.derived import minibatch_rows, row_tokens
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.placements import layout_tree, role_placements, round_placements, training_placements, trains_apart
from oppo_megatron.records import StepSignals
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.schedule.plan import round_generator
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import Costs, Linear, at_stage, read_costs
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.pricing.model import Decoding, line_through
from oppo_megatron.sim.pricing.prices import Prices


@dataclass(frozen=True)
class StepCosts:
    """`updates`: a role's update by response tokens, without `moves` of weights. `round_s`, `step_s`: extra time."""

    actions: Costs = Costs()
    updates: Mapping[str, Linear] = field(default_factory=dict)
    moves: Mapping[str, float] = field(default_factory=dict)
    round_s: float = 0.0
    step_s: float = 0.0
    sources: tuple[str, ...] = ()

    def update_s(self, role: str, tokens: int) -> float:
        return self.updates[role](tokens) if role in self.updates else 0.0


Lines = Sequence[Mapping[str, Any]]

FORWARDS = 3
"""Forward passes per trained token: a forward, and a backward of two."""


def built_in_costs(config: TrainConfig, prompt_tokens: int) -> StepCosts:
    costs = StepCosts(Costs(), sources=("actions: built-in lines, of no machine",))
    return _with_assumed_updates(costs, config, prompt_tokens)


def file_costs(config: TrainConfig, path: Path, prompt_tokens: int) -> StepCosts:
    placements = round_placements(config)
    actions = read_costs(path, placements)
    stray = sorted(set(actions.prefill) - set(placements))
    lacks = actions.default_prefill == Costs().default_prefill
    missing = sorted(set(placements) - set(actions.prefill)) if lacks else []
    problems = [f"{path}: prefill of {role}, a role that the configuration does not have" for role in stray]
    problems += [f"{path}: no prefill of {role}, a role of the configuration" for role in missing]
    if problems:
        raise ConfigError([f"{each}; give costs that were measured in this layout" for each in problems])
    return _with_assumed_updates(StepCosts(actions, sources=(f"actions: {path}",)), config, prompt_tokens)


def cluster_costs(
    config: TrainConfig, cluster: Cluster, prompt_tokens: int, lengths: Sequence[int], *, captured: bool = True
) -> StepCosts:
    """`captured`: decode steps are CUDA graphs. Raises ConfigError if the cluster is too small."""
    halves = [max(1, length // 2) for length in lengths]
    prices = [Prices(config, cluster, Decoding(prompt_tokens, own, captured)) for own in (halves, lengths)]
    few, many = (each.updates() for each in prices)
    updates = {r: line_through(sum(halves), few[r, "update"], sum(lengths), many[r, "update"]) for r in config.trained}
    moves = {role: many[role, "weights"] for role in config.trained if (role, "weights") in many}
    sources = [f"actions, updates and moves: the laws of {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"]
    if assumed := [f"{name} ({source.where})" for name, source in cluster.sources() if source.kind == "assumed"]:
        sources.append(f"assumed: {', '.join(assumed)}")
    return StepCosts(prices[1].costs(), updates, moves, sources=tuple(sources))


def run_costs(config: TrainConfig, path: Path, prompt_tokens: int, actions: Path | None = None) -> StepCosts:
    """Costs from a run's costs.json (or `actions`) and metrics.jsonl."""
    run = RunDirectory(path)
    lines = _steady(run)
    theirs = load_config(TrainConfig, run.config) if run.config.exists() else None
    if theirs is not None and layout_tree(theirs) != layout_tree(config):
        raise ConfigError(
            f"--calibrate {path}: the run has another layout ({layout_tree(theirs)}) than the configuration "
            f"({layout_tree(config)}); calibrate with a run of this layout"
        )
    measured = actions or run.costs
    if not measured.exists():
        raise ConfigError(
            f"--calibrate {path}: there is no {measured.name}, which a run writes at its end; let it end, or name a file of "
            "costs by --costs"
        )
    costs = file_costs(config, measured, prompt_tokens)
    updates = {role: _update_line(config, lines, role) for role in config.trained}
    moves, planning = {"actor": fmean(float(line.get("reallocate_s") or 0.0) for line in lines)}, []
    for line in lines:  # seconds per round: one per chunk, and one that scores
        steps = line["tokens"] / line["running_mean"] if line.get("running_mean") else 0
        planning.append(float(line.get("planning_s") or 0.0) / (ceil(steps / line["chunk_tokens"]) + 1))
    named = f"actions: {measured}", f"updates, moves and planning: {len(lines)} steps of {path}"
    return replace(costs, updates=updates, moves=moves, round_s=float(median(planning)), sources=named)


def run_prompt_tokens(path: Path) -> int | None:
    metrics = RunDirectory(path).metrics
    lines = read_metrics(metrics) if metrics.exists() else []
    lengths = [float(line["prompt_len_mean"]) for line in lines if "prompt_len_mean" in line]
    return round(fmean(lengths)) if lengths else None


def run_signals(path: Path) -> Callable[[int, StepSignals], StepSignals]:
    """Rewards and effective sample sizes for delta's controller; constant after the last step."""
    lines = read_metrics(RunDirectory(path).metrics)

    def signals(step: int, seen: StepSignals) -> StepSignals:
        own, before = lines[min(step, len(lines)) - 1], lines[min(step - 1, len(lines)) - 1] if step > 1 else {}
        return replace(seen, reward_mean=own.get("reward_mean") or 0.0, ess=before.get("ess") or 1.0)

    return signals


def describe(config: TrainConfig, costs: StepCosts) -> list[str]:
    site = Site(round_placements(config))
    own = set(site.placements["actor"].ranks)
    shared = sorted(n for n, placement in site.placements.items() if n != "actor" and own & set(placement.ranks))
    serial = "follow each other, but for what woven rounds hide in the gaps of the decode pipeline"
    lines = [*costs.sources]
    if shared:
        lines.append(
            f"{', '.join(shared)} share ranks with the actor: scoring and decoding there {serial} "
            f"({round_generator(config.overlap, site)} rounds); contention is not measured"
        )
    return [*lines, *not_counted(config)]


def not_counted(config: TrainConfig) -> Iterator[str]:
    if config.filter is not None:
        yield "the filter is not played: its verdicts need rewards; every group is trained"
    if config.overlap.continuous is not None and not trains_apart(config):
        yield "continuous generation is not played: steps are the synchronous loop's, whose actor ranks wait for the update"
    if config.overlap.carry == "redraw":
        yield "overlap.carry redraw is played as recompute: how many tokens are kept depends on the weights"
    if others := sorted({part.kind for part in config.rewards if part.kind in ("python", "http")}):
        yield f"rewards of kind {', '.join(others)} take no time here, as the time of functions and services is unknown"


def _with_assumed_updates(costs: StepCosts, config: TrainConfig, prompt_tokens: int) -> StepCosts:
    batch, ppo, serving, training = config.rollout.batch_size, config.ppo, role_placements(config), training_placements(config)
    most, source = batch * config.rollout.max_response_tokens, f"updates: assumed, {FORWARDS} forward passes by the prefill lines"

    def seconds(role: str, tokens: int) -> float:
        each = row_tokens(config, prompt_tokens, tokens / batch) * minibatch_rows(config) / training[role].copies
        count = max(1, ceil(each * training[role].cp / config.runtime.micro_batch_tokens))
        lines = [at_stage(costs.actions.prefill_of(role), stage) for stage in range(serving[role].pp)]
        if training[role].layout != serving[role].layout:  # products divided evenly over the stages and tensor ranks that train
            pp, tp = training[role].pp, training[role].tp / serving[role].tp
            fixed_s, per_token_s = sum(line.fixed_s for line in lines), sum(line.per_token_s for line in lines)
            lines = [Linear(fixed_s / pp, per_token_s / pp / tp)] * pp
        own = [count * line.fixed_s + each * line.per_token_s for line in lines]
        return FORWARDS * ppo.epochs * ppo.minibatches * (max(own) + (sum(own) - max(own)) / count)

    updates = {role: line_through(most // 2, seconds(role, most // 2), most, seconds(role, most)) for role in config.trained}
    return replace(costs, updates=updates, sources=(*costs.sources, source))


def _steady(run: RunDirectory) -> Lines:
    if not run.metrics.exists():
        raise ConfigError(f"--calibrate {run.path}: metrics.jsonl is missing; give the run_dir of a run")
    lines = [line for line in read_metrics(run.metrics) if line.get("skipped") is None and not line.get("incomplete")]
    if not lines:
        raise ConfigError(f"--calibrate {run.path}: no step of the run was trained; give a run with a few steps")
    return lines[1:] or lines


def _update_line(config: TrainConfig, lines: Lines, role: str) -> Linear:
    """Least-squares line through updates; a constant, or through 0, if a coefficient would be negative."""
    key = "train_s" if role == "actor" else "critic_update_s"
    moved = [float(line.get("reallocate_s") or 0.0) if role == "actor" else 0.0 for line in lines]
    tokens = [config.rollout.batch_size * float(line["trained_len_mean"]) for line in lines]
    seconds = [float(line.get(key) or 0.0) - move for line, move in zip(lines, moved, strict=True)]
    slope, fixed = linear_regression(tokens, seconds) if len(set(tokens)) > 1 else (0.0, 0.0)
    if slope <= 0:
        return Linear(fmean(seconds), 0.0)
    return Linear(fixed, slope) if fixed >= 0 else Linear(0.0, fmean(seconds) / fmean(tokens))
