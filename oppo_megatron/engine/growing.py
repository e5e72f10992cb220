"""Growing sequences of a decode micro-batch, and their draws.

Legend: R rows (running sequences of a micro-batch).
"""

from __future__ import annotations

from oppo_megatron.chunks import ChunkRow
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.records import Rollout

Drawn = list[list[float]]
"""[DRAWN][R]: token, log-prob and sampling log-prob of each row.  Of steps on the device, which nothing has looked at, a fourth
row: a number that is finite where there was a distribution."""


class Growing:
    """A running sequence within a round."""

    def __init__(self, rollout: Rollout, limit: int, version: int):
        self.seq_id, self.limit, self.num_prompt_tokens = rollout.seq_id, limit, len(rollout.prompt.tokens)
        self.tokens = [*rollout.prompt.tokens, *rollout.tokens]
        self.response = list(rollout.tokens)
        self.row = ChunkRow(rollout.seq_id, len(rollout.tokens), [], [], [], version)

    @property
    def position(self) -> int:
        """Response position of the next token."""
        return self.row.offset + len(self.row.tokens)

    def append(self, token: int, logprob: float, sampling_logprob: float, stopping: Stopping, start: int) -> bool:
        """Take a drawn token; whether it is the last.  The round began at clock `start`."""
        self.tokens.append(token)
        self.response.append(token)
        self.row.tokens.append(token)
        self.row.logprobs.append(logprob)
        self.row.sampling_logprobs.append(sampling_logprob)
        self.row.finish_reason = stopping.reason(self.response, self.limit)
        if self.row.finish_reason is not None:
            self.row.finish_clock = start + len(self.row.tokens)
        return self.row.finish_reason is not None
