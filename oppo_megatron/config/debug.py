"""What benchmarks and development ask for, and training does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from oppo_megatron.config.base import Section, Unit


@dataclass(frozen=True)
class ForcedLengths:
    """Where responses end, in place of EOS: log-normal lengths (`median`, `sigma`), or those of a file of requests (`trace`).

    `column` is the trace's column of tokens, of a histogram its kind; None: the usual one.  `scale` is the factor of a
    trace's lengths; auto: what makes its 99th percentile `rollout.max_response_tokens`.
    """

    median: float | None = None
    sigma: float = 1.0
    trace: Path | None = None
    column: str | None = None
    scale: float | Literal["auto"] = "auto"


class DebugConfig(Section):
    """For benchmarks and development; none of it is for training.

    Forced lengths do not depend on what the policy says, so that runs do the same work. They are drawn by (seed, sequence
    id), at least 1 and at most `rollout.max_response_tokens`; EOS is ignored. A trace is a CSV file with one row a request
    and a column of tokens, or a histogram with the columns `kind`, `tokens`, `requests`; its lengths are scaled so that
    their 99th percentile is `rollout.max_response_tokens`.
    """

    forced_lengths: Annotated[list[float] | Path | None, Unit("tokens, nats")] = Field(
        None,
        description="where responses end, in place of EOS: [median, sigma] of log-normal lengths, in tokens, and the standard "
        "deviation of their logarithm (0: all equal); or a CSV file of recorded lengths",
    )
    trace_column: str | None = Field(
        None,
        description="of such a file, the column of tokens (null: `GeneratedTokens`); of a histogram, the kind (null: `output`)",
    )
    actions: bool = Field(
        False, description="trace every action of every round, and write the rounds' schedules to schedules.txt"
    )
    wait_for: list[Literal["critic", "scores"]] = Field(
        default=[],
        description="with `overlap.intra`, what a step waits for although it need not, to the same result: `critic`: the next "
        "step begins behind the critic's update, which else runs while the actor decodes; `scores`: the actor's update begins "
        "behind the last scores, without which else it runs the forward pass of its first micro-batch",
    )

    @field_validator("forced_lengths")
    @classmethod
    def _median_and_sigma(cls, value: list[float] | Path | None) -> list[float] | Path | None:
        if isinstance(value, list) and not (len(value) == 2 and value[0] > 0 and value[1] >= 0):
            raise ValueError("[median, sigma] with a median above 0 and a sigma of at least 0, or a CSV file")
        return value

    @property
    def lengths(self) -> ForcedLengths | None:
        """The forced lengths; None: responses end by themselves."""
        given = self.forced_lengths
        if given is None:
            return None
        if isinstance(given, Path):
            return ForcedLengths(trace=given, column=self.trace_column)
        return ForcedLengths(median=given[0], sigma=given[1])
