"""The scorers: reward, reference and critic, each prefilling the sequences chunk by chunk while the actor decodes them.

Legend: T tokens of a response, P tokens of its prompt, R rows of a call.

Response token t (0-based) stands at position P + t.  Its reference log-prob and its value V(s_t) come from position
P + t - 1, so reference and critic never need the last token; the reward model reads all and scores at the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from oppo_megatron.records import Rollout
from oppo_megatron.runtime.mcore.kv_cache import KVCache
from oppo_megatron.runtime.mcore.model import RoleModel
from oppo_megatron.runtime.mcore.vocab_parallel import token_logprobs
from oppo_megatron.runtime.pipeline import StageCall, StageRunner
from oppo_megatron.schedule.packing import pack_by_tokens

ScorerRole = Literal["reward", "reference", "critic"]


class Scorer:
    """One scoring role on this rank, with its KV cache and the outputs that it has so far.

    Consumes rollouts as they grow; produces, on the last stage, one output a response token (reference, critic) or one a
    response (reward).  A sequence's slot is freed as soon as its outputs are complete.  With too few slots a finished
    sequence takes the place of the youngest unfinished one, which is prefilled again later; its outputs stay valid.
    """

    def __init__(self, role: ScorerRole, model: RoleModel, cache: KVCache, *, prefill_tokens: int, temperature: float):
        self.role, self.model, self.cache = role, model, cache
        self.prefill_tokens, self.temperature = prefill_tokens, temperature
        self.runner = StageRunner(model, cache)
        self._outputs: dict[int, list[Tensor]] = {}
        self._counts: dict[int, int] = {}

    def reset(self) -> None:
        """The weights changed: forget all outputs and all that is cached."""
        for seq_id in list(self._counts):
            self.forget(seq_id)

    def forget(self, seq_id: int) -> None:
        """The sequence has been trained, or is to be scored anew."""
        self._counts.pop(seq_id, None)
        self._outputs.pop(seq_id, None)
        if seq_id in self.cache:
            self.cache.close(seq_id)

    def advance(self, rollouts: Sequence[Rollout]) -> None:
        """Prefill what is new of each rollout; a finished one is then complete."""
        left = [r for r in rollouts if self._missing(r)]
        while left:
            wave = self._seat(left)
            self._prefill(wave)
            for rollout in wave:
                if rollout.finished:
                    self.cache.close(rollout.seq_id)
            seated = {r.seq_id for r in wave}
            left = [r for r in left if r.seq_id not in seated and r.finished]

    def collect(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Outputs of finished rollouts, concatenated in their order; last stage only."""
        return torch.cat([piece for r in rollouts for piece in self._outputs[r.seq_id]])

    def num_outputs(self, rollouts: Sequence[Rollout]) -> int:
        """Length of what `collect` returns, known on every rank."""
        return len(rollouts) if self.role == "reward" else sum(len(r.tokens) for r in rollouts)

    def _target(self, rollout: Rollout) -> int:
        """Tokens of the sequence that this role has use for now."""
        return rollout.num_tokens - (self.role != "reward")

    def _missing(self, rollout: Rollout) -> bool:
        """Whether the rollout has tokens that this role has not read."""
        if rollout.finished:
            return self._counts.get(rollout.seq_id, 0) < (1 if self.role == "reward" else len(rollout.tokens))
        known = self.cache.length(rollout.seq_id) if rollout.seq_id in self.cache else 0
        return known < self._target(rollout)

    def _seat(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Those of the rollouts that have a slot or get one now.  A finished one may take that of an unfinished one."""
        finished = {r.seq_id for r in rollouts if r.finished}
        for rollout in sorted(rollouts, key=lambda r: not r.finished):
            if rollout.seq_id in self.cache:
                continue
            if not self.cache.num_free and rollout.finished:
                self._evict(finished)
            if self.cache.num_free:
                self.cache.open(rollout.seq_id)
                self._counts.setdefault(rollout.seq_id, 0)
                self._outputs.setdefault(rollout.seq_id, [])
        return [r for r in rollouts if r.seq_id in self.cache]

    def _evict(self, finished: set[int]) -> None:
        """Close the youngest open sequence that is unfinished, if there is one."""
        unfinished = [seq_id for seq_id in self.cache.seq_ids if seq_id not in finished]
        if unfinished:
            self.cache.close(max(unfinished))

    def _prefill(self, rollouts: list[Rollout]) -> None:
        rollouts = sorted(rollouts, key=lambda r: self.cache.slot(r.seq_id))
        new = [self._target(r) - self.cache.length(r.seq_id) for r in rollouts]
        bins = [[rollouts[i] for i in sorted(members)] for members in pack_by_tokens(new, self.prefill_tokens)]
        plans = [self._call(members) for members in bins]
        outputs = self.runner.run([call for call, _, _ in plans])
        for members, (_, wanted, targets), out in zip(bins, plans, outputs, strict=False):  # none before the last stage
            if self.role == "reference":
                targets_R = torch.tensor(targets, dtype=torch.int64, device=out.device)
                with torch.inference_mode():
                    out, _ = token_logprobs(out, targets_R, self.model.groups.collection.tp, self.temperature)
            for rollout, piece in zip(members, out.split(wanted), strict=True):
                self._outputs[rollout.seq_id].append(piece)

    def _call(self, rollouts: list[Rollout]) -> tuple[StageCall, list[int], list[int]]:
        """The unit step for these rollouts, how many rows each is to give, and the token that each row predicts."""
        call = StageCall([r.seq_id for r in rollouts], [], [], [])
        assert call.rows is not None
        wanted, targets = [], []
        for rollout in rollouts:
            known, target = self.cache.length(rollout.seq_id), self._target(rollout)
            sequence = [*rollout.prompt.tokens, *rollout.tokens]
            first = self._first_row(rollout)
            rows = range(max(first, known), target)
            call.rows += [len(call.tokens) + position - known for position in rows]
            call.tokens += sequence[known:target]
            call.lens.append(target - known)
            wanted.append(len(rows))
            targets += [sequence[position + 1] for position in rows] if self.role == "reference" else []
            self._counts[rollout.seq_id] += len(rows)
        return call, wanted, targets

    def _first_row(self, rollout: Rollout) -> int:
        """Position of the first output still owed for the sequence."""
        if self.role == "reward":
            return rollout.num_tokens - 1 if rollout.finished else rollout.num_tokens
        return len(rollout.prompt.tokens) - 1 + self._counts[rollout.seq_id]
