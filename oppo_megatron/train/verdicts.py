"""The filter of groups, built from the configuration."""

from __future__ import annotations

from oppo_megatron.config.derived import most_judged, verdict_lag
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.overcommit.filter import GroupFilter, Rule, Scores, VerdictClock
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.rewards.functions import RewardSum


def verdict_clock(config: TrainConfig) -> VerdictClock | None:
    """When a response that has ended is judged; None where groups are not filtered."""
    if config.filter is None:
        return None
    period = config.overlap.admission_period
    assert period is not None, "a filter asks for backfill"
    return VerdictClock(period, verdict_lag(config, config.filter))


def build_filter(config: TrainConfig, scheduler: OvercommitScheduler, rewards: RewardSum) -> GroupFilter | None:
    """None where groups are not filtered."""
    clock = verdict_clock(config)
    if config.filter is None or clock is None:
        return None
    metric = config.filter
    labels = tuple(summand.label for summand in rewards.summands if metric in (REWARD, summand.label))

    def total(scores: Scores) -> float:
        return rewards.total(dict(zip(labels, scores, strict=True)))

    def part(scores: Scores) -> float:
        return scores[0]

    return GroupFilter(scheduler, clock, Rule(labels, total if metric == REWARD else part, most_judged(config)))
