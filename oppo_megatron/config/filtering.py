"""Sections of what DAPO (arXiv 2503.14476) adds beside its loss: groups that teach nothing, and responses that are too long."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.evaluation import REWARD


class FilterConfig(Section):
    """Dynamic sampling: groups whose responses are all equally good are dropped, and others sampled in their place.

    Needs `overlap.backfill`: a batch is complete at its multiples of decode steps, at which all that ended before has been
    judged.  See docs/algorithm.md.
    """

    metric: str = Field(
        REWARD,
        description="what a group is judged by: `reward`, the whole sum, or the label of one part of `rewards` (a verifier's "
        "name, say), before its weight; a group is dropped where it is the same for all its responses",
    )

class OverlongConfig(Section):
    """Responses near the limit of `rollout.max_response_tokens`, and those cut there."""

    buffer: Annotated[int | None, Unit("tokens")] = Field(
        None,
        ge=1,
        description="the penalty of a response grows over so many tokens before the limit (arXiv 2503.14476, eq. 13); null: "
        "there is none",
    )
    penalty: Annotated[float, Unit("reward")] = Field(
        1.0, gt=0, description="with `buffer`: subtracted from the score of a response at the limit"
    )
    mask: bool = Field(
        False,
        description="responses cut at the limit leave the actor's loss; they still count in baselines and scales of their groups",
    )
