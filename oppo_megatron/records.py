"""Plain records that the pure half and the torch half share: prompts, rollouts and the chunks between them.

Legend: a *sequence* is prompt + response; *offset* counts response tokens; *clock* is the logical clock, the number of
decode steps that the actor has made since the run began (one decode step gives every running sequence one token).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["eos", "stop", "length"]
"""Why a response ended: with an id that ends responses, with a text that does, or at its limit."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenized prompt in the order in which the data iterator gives it.

    `seq_id` is unique over the run (the position in the stream of prompts, epochs counted on); `row` is the index of
    the row in the data set; `fields` keeps the row's other columns for verifiers (the expected answer, say); `place` is
    the row's file:line, for messages.
    """

    seq_id: int
    row: int
    text: str
    tokens: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)


@dataclass(slots=True)
class Rollout:
    """A prompt's response while it grows, with what each token was sampled under.

    `logprobs` are of the full distribution at the configured temperature (what PPO uses), `sampling_logprobs` of the
    distribution the token was drawn from (after top-k / top-p); `versions` is the policy version of each token: of the
    oldest weights in the cache that it was drawn over.
    """

    prompt: Prompt
    admission: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    deferrals: int = 0
    finish_clock: int | None = None
    finish_reason: FinishReason | None = None

    @property
    def seq_id(self) -> int:
        return self.prompt.seq_id

    @property
    def finished(self) -> bool:
        return self.finish_clock is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence, prompt included."""
        return len(self.prompt.tokens) + len(self.tokens)

    def extend(self, row: ChunkRow) -> None:
        """Append what follows."""
        self.tokens += row.tokens
        self.logprobs += row.logprobs
        self.sampling_logprobs += row.sampling_logprobs
        self.versions += [row.version] * len(row.tokens)
        self.finish_clock, self.finish_reason = row.finish_clock, row.finish_reason


@dataclass(slots=True)
class ChunkRow:
    """New response tokens of one sequence: positions offset .. offset + len(tokens) of the response."""

    seq_id: int
    offset: int
    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    version: int
    finish_clock: int | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Chunk:
    """What one round of decoding produced.  `clock` is the logical clock after the round.

    `halt`: the run was told to stop; every rank does after this chunk.
    """

    index: int
    clock: int
    rows: list[ChunkRow] = field(default_factory=list)
    halt: bool = False


@dataclass(frozen=True, slots=True)
class StepSignals:
    """What a step has shown, the same number on every rank: what delta is controlled by.

    `reward_mean` is of the batch's scores, as they are trained on.  `tail_waste` is the share of the decode batch that ran
    empty: 1 - tokens / (decode steps x the most sequences that ran at once).  `ess` is the effective sample size that the
    actor last measured, as a share of its tokens (of the step before; 1 in the first step, where nothing is stale).
    `length_gap` is the share by which the batch's responses are shorter than all that were submitted (below 0: longer).
    """

    reward_mean: float
    tail_waste: float
    ess: float
    length_gap: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What a controller decided after a step: the new value, why (with the figures), and whether it has changed."""

    value: int
    reason: str
    changed: bool
