"""Decode steps that the host only starts; after `sync_steps` it reads the tokens.  Padding lets steps be captured.

Legend: B rows of a step, M cache slots, K steps of a window, R rows before padding, E ids that end a response.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from oppo_megatron.engine.round_state import Growing
from oppo_megatron.engine.sampler import Sampling, draw_at, uniforms_at
from oppo_megatron.mcore.device import StepRunner, on_device
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.uniforms import row_state

SMALL_BATCHES = (1, 2, 4, 8, 16, 24, 32)
LARGE_BATCH = 16

SYNC_STEPS = {"cpu": 1, "cuda": 16}
"""Decode steps between two checks for ended responses: CUDA graphs for which the host never waits."""


class DeviceLane:
    def __init__(
        self, model: RoleModel, cache: SequenceCache, run: StepRunner, *, sampling: Sampling, eos_ids: Sequence[int],
        sync_steps: int, name: int,
    ):  # fmt: skip
        self._model, self._cache, self._run, self._name = model, cache, run, name
        self._sampling, self._eos_ids = sampling, sorted(eos_ids)
        self._places = cache.step_rows()
        device, most = cache.device, cache.num_slots
        self._state_6M = torch.zeros(6, most, dtype=torch.int64, device=device)
        self._ended_M = torch.zeros(most, dtype=torch.bool, device=device)
        self._drawn_4KM = torch.zeros(4, sync_steps, most, dtype=torch.float64, device=device)
        self._eos_E1 = on_device(self._eos_ids, device)[:, None]
        self._step_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._sync_steps = sync_steps
        self._rows: Sequence[Growing] = ()
        self._done = self._window = 0

    @property
    def loaded(self) -> bool:
        return self._done < self._window

    def load(self, rows: Sequence[Growing], steps: int) -> None:
        """Load rows in neighbouring slots."""
        cache = self._cache
        self._rows, self._done = list(rows), 0
        self._window = min(self._sync_steps, steps, max(row.limit - row.position for row in rows))
        past = [cache.length(row.seq_id) for row in rows]
        for row, length in zip(rows, past, strict=True):
            # The last token of a response is not cached, so a running sequence never attends to the last position.
            assert length + row.limit - row.position < cache.max_length, (row, length, cache.max_length)
            cache.reserve(row.seq_id, min(self._window + 1, cache.max_length - length))
        slots = [cache.slot(row.seq_id) for row in rows]
        assert slots == list(range(slots[0], slots[0] + len(slots))), "a micro-batch keeps neighbouring slots"
        self._size = min(batch_bucket(len(rows)), cache.num_slots - slots[0])
        self._reach = self._places.reach(max(past) + self._window)
        filled = self._size - len(rows)
        # Padding rows write to a position of the first row that this window does not reach.
        aside = min(past[0] + self._window, cache.max_length - 1)
        self._places.load([*slots, *[slots[0]] * filled])
        state = [self._state(row, length) for row, length in zip(rows, past, strict=True)]
        state += [(0, aside, 0, 0, 0, 0)] * filled
        table_6B = np.array(state, dtype=np.uint64).view(np.int64).T
        self._state_6M[:, : self._size] = on_device(torch.from_numpy(table_6B), cache.device)
        self._ended_M[: len(rows)] = False
        self._ended_M[len(rows) : self._size] = True
        self._step_1.zero_()

    def step(self) -> None:
        assert self.loaded
        with torch.inference_mode():
            self._run((self._name, self._size, self._reach, self._places.key), self._advance)
        self._done += 1

    def read(self) -> list[list[list[float]]]:
        """Return `Drawn` of each step, meaningless past a row's end."""
        assert self._done and not self.loaded
        drawn_K4R: list[list[list[float]]]
        drawn_K4R = self._drawn_4KM[:, : self._done, : len(self._rows)].permute(1, 0, 2).tolist()
        return drawn_K4R

    def _state(self, row: Growing, length: int) -> tuple[int, ...]:
        chain, greedy = row_state(self._sampling.seed, row.seq_id), self._sampling.members.is_greedy(row.seq_id)
        return row.tokens[-1], length, row.position, row.limit, chain, int(greedy)

    def _advance(self) -> None:
        size = self._size
        token_B, cached_B, position_B, limit_B, chain_B, greedy_B = self._state_6M[:, :size].unbind(0)
        ended_B = self._ended_M[:size]
        logits_BV = self._model(token_B, self._places.plan(cached_B, self._reach))
        mixed_B = greedy_B.bool() if self._sampling.members.greedy else None
        drawn = draw_at(logits_BV, self._sampling, uniforms_at(chain_B, position_B), self._model.vocab, mixed_B)
        self._drawn_4KM[:, :, :size].index_copy_(1, self._step_1, drawn.table().unsqueeze(1))
        self._step_1 += 1
        going_on_B = ~ended_B
        token_B.copy_(torch.where(going_on_B, drawn.tokens, token_B))
        cached_B += going_on_B
        position_B += going_on_B
        ended_B |= position_B >= limit_B
        if self._eos_ids:
            is_eos_EB = token_B == self._eos_E1
            ended_B |= is_eos_EB[0] if len(self._eos_ids) == 1 else is_eos_EB.any(0)


def batch_bucket(rows: int) -> int:
    for size in SMALL_BATCHES:
        if rows <= size:
            return size
    return -(-rows // LARGE_BATCH) * LARGE_BATCH
