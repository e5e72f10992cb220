"""Responses that end early: decoding stops once no continuation can change their rewards.

Rewards are asked between two rounds, at every multiple of a period of decode steps, so batches do not depend on seconds, chunk
sizes or placements.  A response with a settled prefix ends with the token that settled it.  Groups of an audit are decoded to
their ends all the same, and their rewards then have to equal the settled ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Rollout


@dataclass(frozen=True)
class Prefix:
    """The value of each part for every continuation (NaN if it may vary), and the tokens that settle all parts (0: none do)."""

    parts: tuple[float, ...]
    num_tokens: int = 0


@dataclass(frozen=True)
class Clock:
    """Rewards are asked every `period` decode steps.  One group of `audit` (0: none) is not cut; the `seed` says which."""

    period: int
    audit: int = 0
    seed: int = 0

    def left(self, clock: int) -> int:
        return self.period - clock % self.period

    def audits(self, group: int) -> bool:
        return bool(self.audit) and (group + self.seed) % self.audit == 0


@dataclass
class Audited:
    """Responses that were settled but decoded to their ends, and their tokens after the settling one."""

    rows: int = 0
    tokens: int = 0


class Settler:
    """Settled rewards of the responses in the buffer, the same on every rank.  `labels`: the parts of the reward."""

    def __init__(self, buffer: RolloutBuffer, clock: Clock, labels: Sequence[str]):
        self.buffer, self.clock, self.labels = buffer, clock, tuple(labels)
        self.notes: dict[int, Prefix] = {}
        self.audited = Audited()
        self.num_cut = 0

    def begin_step(self) -> None:
        self.num_cut = 0

    @property
    def due(self) -> bool:
        return self.buffer.clock % self.clock.period == 0

    def asked(self) -> list[Rollout]:
        return [r for r in self.buffer.active if r.num_response_tokens and r.seq_id not in self.notes]

    def take(self, asked: Sequence[Rollout], prefixes: Sequence[Prefix]) -> list[Rollout]:
        """Apply the rewards of the asked responses.  Returns the responses that end with it."""
        found = {r.seq_id: prefix for r, prefix in zip(asked, prefixes, strict=True) if prefix.num_tokens}
        self.notes |= found
        cut = {seq_id: prefix.num_tokens for seq_id, prefix in found.items() if not self._is_audited(seq_id)}
        self.num_cut += len(cut)
        return self.buffer.cut(cut) if cut else []

    def foreseen(self, asked: Sequence[Rollout], prefixes: Sequence[Prefix]) -> dict[int, Prefix]:
        """Return the known rewards of responses that continue and are not in an audit's groups."""
        pairs = zip(asked, prefixes, strict=True)
        return {r.seq_id: p for r, p in pairs if not r.finished and not self._is_audited(r.seq_id)}

    def retire(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            note = self.notes.pop(rollout.seq_id, None)
            if note is not None and rollout.finished and rollout.finish_reason != "settled":
                self.audited.rows += 1
                self.audited.tokens += len(rollout.tokens) - note.num_tokens

    def figures(self) -> dict[str, float | None]:
        """Metrics of the step; `settled_tokens` is estimated from the extra tokens of audited responses so far."""
        rows, tokens = self.audited.rows, self.audited.tokens
        saved = self.num_cut * tokens / rows if rows else None
        return {
            "settled_rows": self.num_cut,
            "settled_tokens": saved,
            "audited_rows": rows,
            "audited_tokens": tokens,
        }

    def state_dict(self) -> dict[str, Any]:
        notes = [[seq_id, note.num_tokens, list(note.parts)] for seq_id, note in self.notes.items()]
        audited = [self.audited.rows, self.audited.tokens]
        return {"labels": list(self.labels), "notes": notes, "audited": audited, "cut": self.num_cut}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state`; rewards settled for other parts are forgotten."""
        if state is None:
            return
        self.audited, self.num_cut = Audited(*state["audited"]), state["cut"]
        if state["labels"] == list(self.labels):
            self.notes = {seq_id: Prefix(tuple(parts), num_tokens) for seq_id, num_tokens, parts in state["notes"]}

    def _is_audited(self, seq_id: int) -> bool:
        return self.clock.audits(seq_id // self.buffer.group_size)


def known(prefix: Prefix, labels: Sequence[str], of: Sequence[str]) -> list[float] | None:
    """Return the parts `of` a prefix, in their order, or None unless all are settled; `labels` name `prefix.parts`."""
    values = [prefix.parts[labels.index(label)] for label in of]
    return None if any(map(math.isnan, values)) else values
