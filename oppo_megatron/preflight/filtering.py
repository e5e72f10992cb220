"""Rules of the filter of groups, and of long responses."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

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
