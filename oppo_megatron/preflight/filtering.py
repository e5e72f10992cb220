"""Rules of the filter of groups, and of long responses."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from oppo_megatron.config.derived import least_lag
from oppo_megatron.config.evaluation import REWARD, part_labels
from oppo_megatron.config.filtering import FilterConfig, OverlongConfig
from oppo_megatron.config.run import TrainConfig


def check_filtering(config: TrainConfig) -> list[str]:
    """Every broken rule of `filter` and `overlong`, a sentence each."""
    return [
        *(_check_filter(config, config.filter) if config.filter is not None else ()),
        *_check_overlong(config.overlong, config.rollout.max_response_tokens),
    ]


def _check_filter(config: TrainConfig, asked: FilterConfig) -> Iterator[str]:
    rollout, known = config.rollout, [REWARD, *part_labels(config.rewards)]
    if not config.overlap.backfill:
        yield (
            "filter is set, but overlap.backfill is false, and nothing would take the places of groups that are dropped; set "
            "overlap.backfill to true, or filter to null"
        )
    if rollout.group_size == 1 and not config.algorithm.greedy:
        yield (
            "filter is set, but rollout.group_size is 1, and a response alone is always equally good: every group would be "
            "dropped; set rollout.group_size to 2 or more, or filter to null"
        )
    if asked.metric not in known:
        near = difflib.get_close_matches(asked.metric, known, n=1)
        remedy = f"did you mean `{near[0]}`?" if near else f"choose from {', '.join(known)}"
        yield f"filter.metric is {asked.metric!r}, but no part of rewards has that name; {remedy}"
    elif asked.lag is not None and asked.lag < (least := least_lag(config, asked.metric)):
        yield (
            f"filter.lag is {asked.lag}, but filter.metric {asked.metric} needs the reward model, which reads the end of a "
            f"response a period later; set filter.lag to {least} or more, leave it out, or judge by a part that needs no model"
        )
    period = config.overlap.admission_period
    most = least_lag(config, REWARD) + -(-rollout.max_response_tokens // period) if period else 0
    if period and (asked.lag or 0) > most:
        yield (
            f"filter.lag is {asked.lag} periods of {period} decode steps, but rollout.max_response_tokens is "
            f"{rollout.max_response_tokens}: nothing would be left to decode long before a verdict, and every step would wait "
            f"for it; set filter.lag to {most} or less, or leave it out"
        )
    groups = rollout.batch_size // rollout.group_size
    if asked.max_groups is not None and asked.max_groups < groups:
        yield (
            f"filter.max_groups is {asked.max_groups}, but a batch alone has {groups} groups; raise it, or leave it out for ten "
            "times as many"
        )


def _check_overlong(overlong: OverlongConfig, longest: int) -> Iterator[str]:
    if overlong.buffer is None and overlong.penalty != OverlongConfig().penalty:
        yield (
            f"overlong.penalty is {overlong.penalty:g}, but overlong.buffer is null, and nothing reads it; remove it, or set "
            "overlong.buffer to the tokens over which it grows"
        )
    if overlong.buffer is not None and overlong.buffer > longest:
        yield (
            f"overlong.buffer is {overlong.buffer}, but rollout.max_response_tokens is {longest}, and an empty response would be "
            "too long; lower it"
        )
