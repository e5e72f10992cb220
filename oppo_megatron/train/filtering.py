"""The filter of groups that a configuration asks for."""

from __future__ import annotations

from oppo_megatron.config.derived import most_judged
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.overcommit.filter import GroupFilter, Rule, Scores, VerdictClock
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.rewards.functions import RewardSum


def build_filter(config: TrainConfig, scheduler: OvercommitScheduler, rewards: RewardSum) -> GroupFilter | None:
    """None where groups are not filtered.

    A reward model reads the last chunk of a response while the next one is decoded, so its verdicts are due a period later than
    those of verifiers, functions and services; also where nothing is streamed, so that streaming changes no batch.
    """
    if config.filter is None:
        return None
    period, metric = config.overlap.admission_period, config.filter.metric
    assert period is not None, "a filter asks for backfill"
    labels = tuple(summand.label for summand in rewards.summands if metric in (REWARD, summand.label))

    def total(scores: Scores) -> float:
        return rewards.total(dict(zip(labels, scores, strict=True)))

    def part(scores: Scores) -> float:
        return scores[0]

    rule = Rule(labels, total if metric == REWARD else part, most_judged(config))
    return GroupFilter(scheduler, VerdictClock(period, lag=int(rewards.reads_model(labels))), rule)
