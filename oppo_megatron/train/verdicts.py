"""Rewards before a response has ended or its batch is complete: the filter of groups, and prefixes that fix a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oppo_megatron.config.derived import most_judged, settle_period, verdict_lag
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import RewardError
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.filter import GroupFilter, Rule, Scores, VerdictClock
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.overcommit.settling import Clock, Prefix, Settler
from oppo_megatron.rewards.functions import RewardSum
from oppo_megatron.rewards.protocol import ScoreItem
from oppo_megatron.token_text import INCOMPLETE, Decode


def verdict_clock(config: TrainConfig) -> VerdictClock | None:
    """When a response that has ended is judged; None if groups are not filtered."""
    if config.filter is None:
        return None
    period = config.overlap.admission_period
    assert period is not None, "a filter asks for backfill"
    return VerdictClock(period, verdict_lag(config, config.filter.metric))


def build_filter(config: TrainConfig, scheduler: OvercommitScheduler, rewards: RewardSum) -> GroupFilter | None:
    clock = verdict_clock(config)
    if config.filter is None or clock is None:
        return None
    metric = config.filter.metric
    labels = tuple(summand.label for summand in rewards.summands if metric in (REWARD, summand.label))

    def total(scores: Scores) -> float:
        return rewards.total(dict(zip(labels, scores, strict=True)))

    def part(scores: Scores) -> float:
        return scores[0]

    return GroupFilter(scheduler, clock, Rule(labels, total if metric == REWARD else part, most_judged(config)))


SHOWN_CHARACTERS = 500


def build_settler(config: TrainConfig, buffer: RolloutBuffer, rewards: RewardSum) -> Settler | None:
    period = settle_period(config)
    if period is None:
        return None
    labels = [summand.label for summand in rewards.summands]
    return Settler(buffer, Clock(period, config.settle.audit, config.seed), labels)


def read_prefix(rewards: RewardSum, item: ScoreItem, tokens: Sequence[int], decode: Decode, place: str) -> Prefix:
    """Return the parts of the reward that the response so far (`tokens`) fixes, and the shortest prefix that fixes all.

    A fixed part stays fixed, so that prefix is found by bisection.  An incomplete character at a prefix's end is left out.
    """

    def settled(num_tokens: int) -> dict[str, float]:
        text = item.response if num_tokens == len(tokens) else decode(tokens[:num_tokens])
        return rewards.settled(replace(item, response=text.rstrip(INCOMPLETE)), place)

    found, low, high = settled(len(tokens)), 1, len(tokens)
    if len(found) < len(rewards.summands):
        return Prefix(tuple(found.get(summand.label, math.nan) for summand in rewards.summands))
    while low < high:
        middle = (low + high) // 2
        sooner = settled(middle)
        if len(sooner) == len(found):
            found, high = sooner, middle
        else:
            low = middle + 1
    return Prefix(tuple(found[summand.label] for summand in rewards.summands), high)


def require_as_settled(
    parts: Mapping[str, float], note: Prefix, labels: Sequence[str], item: ScoreItem, place: str, beginning: str
) -> None:
    """Raises RewardError if a part of a response's reward differs from the value fixed early, with the response's `beginning`."""
    for label, early in zip(labels, note.parts, strict=True):
        if label in parts and parts[label] != early:
            raise RewardError(
                f"sequence {item.seq_id} (of {place}): reward part {label!r} was settled as {early:g} by the first "
                f"{note.num_tokens} tokens, but gives {parts[label]:g} for the response; its `settled` must speak only where "
                "every continuation gets the same: correct it, or set settle.mode to off. "
                f"Settled at: {_shown(beginning)}; the response: {_shown(item.response)}"
            )


def _shown(text: str) -> str:
    cut = text[-SHOWN_CHARACTERS:]
    return repr(cut) if len(cut) == len(text) else f"...{cut!r} ({len(text)} characters)"
