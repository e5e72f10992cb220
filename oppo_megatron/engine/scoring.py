"""Scorers on one rank: reward, reference and critic prefill by chunks while the actor decodes.

Log-prob and value V(s_t) of response token t come from position P + t - 1 (P: prompt tokens), the reward from the last.
Legend: T tokens of a response, R output rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from oppo_megatron.engine.round_state import CacheWorker, TakenUp
from oppo_megatron.mcore.device import memory_for, on_device, too_many_tokens
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.planning.book import ReplicaWork
from oppo_megatron.schedule.rounds import Batch

ScorerRole = Literal["reward", "reference", "critic"]


@dataclass
class _ScoringRound:
    sequences: Mapping[int, list[int]] = field(default_factory=dict)
    batches: Sequence[Batch] = ()
    done: Sequence[int] = ()
    taken: TakenUp | None = None
    hidden: Tensor | None = None


class ScoringWorker(CacheWorker):
    def __init__(self, role: ScorerRole, model: RoleModel, cache: SequenceCache, *, temperature: float):
        super().__init__(model, cache)
        self.role, self.temperature = role, temperature
        self._round = _ScoringRound()
        self._outputs: dict[int, list[Tensor]] = {}

    def reset(self) -> None:
        self._outputs.clear()
        for seq_id in self.cache.seq_ids:
            self.cache.close(seq_id)

    def forget(self, seq_id: int) -> None:
        self._outputs.pop(seq_id, None)

    def give_up(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.forget(seq_id)
            if seq_id in self.cache:
                self.cache.close(seq_id)

    def cut(self, seq_id: int, cached: int, outputs: int) -> None:
        """Keep `cached` tokens (if there is a cache) and `outputs` of a sequence."""
        if seq_id in self.cache:
            self.cache.truncate(seq_id, cached)
        if parts := self._outputs.pop(seq_id, None):
            self._outputs[seq_id] = [torch.cat(parts)[:outputs]]

    def outputs(self) -> dict[int, Tensor]:
        return {seq_id: torch.cat(parts) for seq_id, parts in self._outputs.items()}

    def resume(self, stored: Mapping[int, Tensor], outputs: Mapping[int, Tensor]) -> None:
        self.restore(stored)
        self._outputs = {seq_id: [values.to(self.cache.device)] for seq_id, values in outputs.items()}

    def collect(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return the outputs of finished rollouts, one after the other; last stage only."""
        parts = [part for r in rollouts for part in self._outputs[r.seq_id]]
        return torch.cat(parts) if parts else torch.empty(0, device=self.cache.device)

    def begin(self, work: ReplicaWork, rollouts: Sequence[Rollout]) -> None:
        taken = TakenUp(self.cache, work)
        wanted = {g.seq_id for batch in work.prefill for g in batch}
        sequences = {r.seq_id: [*r.prompt.tokens, *r.tokens] for r in rollouts if r.seq_id in wanted}
        self._round = _ScoringRound(sequences, [self.in_slot_order(batch) for batch in work.prefill], work.done, taken)

    def end(self) -> None:
        for seq_id in self._round.done:
            self.cache.close(seq_id)

    def live(self, action: Action) -> bool:
        return True

    def compute(self, action: Action) -> int:
        batch = self._round.batches[action.micro_batch]
        with memory_for(lambda: too_many_tokens(f"the {self.role} model's prefill", [growth.new for growth in batch])):
            return self._score(batch) if action.op is Op.SCORE else self._prefill(batch)

    def outbox(self, action: Action) -> Sequence[Tensor]:
        assert self._round.hidden is not None
        return [self._round.hidden.contiguous()]

    def inbox(self, action: Action) -> Iterator[Tensor]:
        hidden = self.new_hidden(sum(g.new for g in self._round.batches[action.micro_batch]))
        yield hidden
        self._round.hidden = hidden

    def _prefill(self, batch: Batch) -> int:
        self._round.hidden = self.append(batch, self._round.sequences, self._round.hidden, self._round.taken)
        return sum(g.new for g in batch)

    def _score(self, batch: Batch) -> int:
        assert self._round.hidden is not None
        outputs_R = self._round.hidden
        if self.role == "reference":  # the log-probs of the next tokens
            ends = [g.past + g.new for g in batch]
            targets = [self._round.sequences[g.seq_id][e - g.rows + 1 : e + 1] for g, e in zip(batch, ends, strict=True)]
            targets_R = on_device([t for part in targets for t in part], outputs_R.device)
            with torch.inference_mode():
                outputs_R = self.model.output_rows(outputs_R).figures(targets_R, self.temperature).logp_R
        for growth, part in zip(batch, outputs_R.split([g.rows for g in batch]), strict=True):
            self._outputs.setdefault(growth.seq_id, []).append(part)
        self._round.hidden = None
        return sum(g.rows for g in batch)
