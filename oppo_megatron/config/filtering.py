"""The filter of groups (dynamic sampling), and the treatment of long responses."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.evaluation import REWARD


class FilterConfig(Section):
    """Dynamic sampling: groups whose responses are all equally good are dropped, and other prompts sampled in their place.

    Needs `overlap.backfill`: a batch is complete only at multiples of its decode steps, when all responses that ended before
    have been judged.  See docs/algorithm.md.
    """

    metric: str = Field(
        REWARD,
        description="score by which a group is judged: `reward`, the whole sum, or the label of one part of `rewards` (a "
        "verifier's name, say), before its weight; a group is dropped if all its responses have the same score",
    )

    def rules(self, labels: Sequence[str], *, backfill: bool, alone: bool) -> Iterator[str]:
        """Yield a sentence for each broken rule.  `labels`: the parts of the reward; `alone`: groups have one response."""
        if not backfill:
            yield (
                "filter is set, but overlap.backfill is false, and nothing would take the places of groups that are dropped; set "
                "overlap.backfill to true, or filter to null"
            )
        if alone:
            yield (
                "filter is set, but rollout.group_size is 1, and a response alone is always equally good: every group would be "
                "dropped; set rollout.group_size to 2 or more, or filter to null"
            )
        known = [REWARD, *labels]
        if self.metric not in known:
            near = difflib.get_close_matches(self.metric, known, n=1)
            remedy = f"did you mean `{near[0]}`?" if near else f"choose from {', '.join(known)}"
            yield f"filter.metric is {self.metric!r}, but no part of rewards has that name; {remedy}"


class OverlongConfig(Section):
    """Responses near the limit of `rollout.max_response_tokens`, and those cut there."""

    buffer: Annotated[int | None, Unit("tokens")] = Field(
        None,
        ge=1,
        description="length of the stretch before the limit over which the penalty grows (arXiv 2503.14476, eq. 13); null: "
        "no penalty",
    )
    penalty: Annotated[float, Unit("reward")] = Field(
        1.0, gt=0, description="with `buffer`: subtracted from the score of a response at the limit"
    )
    mask: bool = Field(
        False,
        description="leave responses cut at the limit out of the actor's loss; they still count in the baselines and scales of "
        "their groups",
    )

    def rules(self, longest: int) -> Iterator[str]:
        """Yield a sentence if the buffer is longer than the longest response."""
        if self.buffer is not None and self.buffer > longest:
            yield (
                f"overlong.buffer is {self.buffer}, but rollout.max_response_tokens is {longest}, and an empty response would be "
                "too long; lower it"
            )
