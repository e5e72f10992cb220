"""Decode steps that the host only starts, in windows: it reads one window's tokens while the device computes the next.

Legend: B rows of a step (padded, so that steps can be captured), M cache slots, K steps, X columns of a draw, E ids that end a
response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from oppo_megatron.engine.round_state import Drawn, Growing
from oppo_megatron.engine.sampler import Sampling, draw_at, uniforms_at
from oppo_megatron.engine.stream import DRAWN
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.device import WARM_UPS, StepRunner, on_device
from oppo_megatron.mcore.experts import Routing, route_words
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.uniforms import row_state

SYNC_STEPS = {"cpu": 1, "cuda": 16}
"""Decode steps of a window, after which the host looks for ended responses."""


@dataclass
class Window:
    """`drawn` [K, X, M], on the host after `arrived`."""

    rows: list[Growing]
    last_step: int
    drawn: Tensor
    arrived: torch.cuda.Event | None


class DeviceLane:
    def __init__(
        self, model: RoleModel, cache: SequenceCache, run: StepRunner, *, sampling: Sampling, eos_ids: Sequence[int],
        sync_steps: int, name: int, routed: ModelShape | None = None, width: int = DRAWN,
    ):  # fmt: skip
        """`routed`: of a model whose routes are kept; `width`: numbers of a draw without its mass."""
        self._model, self._cache, self._run, self._name = model, cache, run, name
        self._sampling, self._eos_ids, self._routed = sampling, sorted(eos_ids), routed
        self._places = cache.step_rows()
        device, most = cache.device, cache.num_slots
        self._state_6M = torch.zeros(6, most, dtype=torch.int64, device=device)
        self._ended_M = torch.ones(most, dtype=torch.bool, device=device)
        self._drawn_KXM = torch.zeros(2 * sync_steps, width + 1, most, dtype=torch.float64, device=device)  # of two windows
        blank_KXM, on_gpu = torch.zeros(sync_steps, width + 1, most, dtype=torch.float64), device.type == "cuda"
        self._arriving = [blank_KXM.pin_memory() for _ in range(2)] if on_gpu else None
        self._eos_E1 = on_device(self._eos_ids, device)[:, None]
        self._step_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._sync_steps = sync_steps
        self._rows: list[Growing] = []
        self._windows: deque[Window] = deque()  # started and not read
        self._turn = self._next = self._end = 0

    @property
    def started(self) -> bool:
        return bool(self._windows)

    @property
    def last_step(self) -> int:
        """Last step of the window that is read next."""
        return self._windows[0].last_step

    def prepare(self) -> None:
        """Run each shape until it is captured, the largest first: later captures reuse its memory.  The cache is empty."""
        most, longest = self._cache.num_slots, self._cache.max_length
        sizes = {min(batch_bucket(rows), most) for rows in range(1, most + 1)}
        reaches = {self._places.reach(length) for length in range(1, longest + 1)}
        for self._size, self._reach in sorted(product(sizes, reaches), reverse=True):
            for _ in range(WARM_UPS + 1):
                self._step_1.zero_()
                self.step()

    def drop(self) -> None:
        """Forget windows that the ended round did not need."""
        self._windows.clear()

    def load(self, rows: Sequence[Growing], step: int, end: int) -> None:
        """Take rows for the steps from `step` to before `end`."""
        self._rows, self._next, self._end = list(rows), step, end
        state = [self._state(row, self._cache.length(row.seq_id)) for row in rows]
        table_6B = np.array(state, dtype=np.uint64).view(np.int64).T
        self._state_6M[:, : len(rows)] = on_device(torch.from_numpy(table_6B), self._cache.device)
        self._ended_M[: len(rows)] = False

    def start(self, rows: Sequence[Growing]) -> None:
        """Start a window for `rows` (loaded, still running, in neighbouring slots), if any token is left to draw."""
        cache, unread = self._cache, sum(len(window.drawn) for window in self._windows)
        rooms = [max(0, row.room - unread) for row in rows]
        steps = min(self._sync_steps, self._end - self._next, max(rooms, default=0))
        if steps < 1:
            return
        past, own = [cache.length(row.seq_id) for row in rows], [min(steps, room) for room in rooms]
        for row, new in zip(rows, own, strict=True):
            cache.reserve(row.seq_id, new + 1)  # the last token of a response is not cached: there is always one more
            cache.advance(row.seq_id, new)
        self._keep(rows)
        slots = [cache.slot(row.seq_id) for row in rows]
        assert slots == list(range(slots[0], slots[0] + len(slots))), "a micro-batch keeps neighbouring slots"
        self._size = min(batch_bucket(len(rows)), cache.num_slots - slots[0])
        self._reach = self._places.reach(max(past) + steps)
        self._places.load([*slots, *[slots[0]] * (self._size - len(rows))])
        if self._size > len(rows):  # padding rows write to a position of the first row that this window does not reach
            self._state_6M[1, len(rows) : self._size] = past[0] + own[0]
            self._ended_M[len(rows) : self._size] = True
        first = self._turn * self._sync_steps
        self._step_1.fill_(first)
        for _ in range(steps):
            self.step()
        drawn, arrived = self._drawn_KXM[first : first + steps], None
        if self._arriving is not None:
            drawn, arrived = self._arriving[self._turn][:steps].copy_(drawn, non_blocking=True), torch.cuda.Event()
            arrived.record()
        self._next, self._turn = self._next + steps, 1 - self._turn
        self._windows.append(Window(list(rows), self._next - 1, drawn, arrived))

    def step(self) -> None:
        self._run((self._name, self._size, self._reach, self._places.key), self._advance)

    def read(self) -> tuple[list[Growing], Drawn]:
        """Return the oldest window's rows and draws, which are arbitrary past a row's end."""
        window = self._windows.popleft()
        if window.arrived is not None:
            window.arrived.synchronize()
        return window.rows, window.drawn.numpy()[:, :, : len(window.rows)]

    def _keep(self, rows: Sequence[Growing]) -> None:
        if self._rows == rows:
            return
        places = {row.seq_id: place for place, row in enumerate(self._rows)}
        place_B = on_device([places[row.seq_id] for row in rows], self._cache.device)
        self._state_6M[:, : len(rows)] = self._state_6M[:, place_B]
        self._ended_M[: len(rows)] = self._ended_M[place_B]
        self._rows = list(rows)

    def _state(self, row: Growing, length: int) -> tuple[int, ...]:
        chain, greedy = row_state(self._sampling.seed, row.seq_id), self._sampling.members.is_greedy(row.seq_id)
        return row.tokens[-1], length, row.position, row.limit, chain, int(greedy)

    @torch.inference_mode()
    def _advance(self) -> None:
        size = self._size
        token_B, cached_B, position_B, limit_B, chain_B, greedy_B = self._state_6M[:, :size].unbind(0)
        ended_B = self._ended_M[:size]
        plan, routing = self._places.plan(cached_B, self._reach, ended_B), Routing(taken=[])
        plan.routing = None if self._routed is None else routing
        logits_BV = self._model.logits(self._model(token_B, plan))
        mixed_B = greedy_B.bool() if self._sampling.members.greedy else None
        drawn = draw_at(logits_BV, self._sampling, uniforms_at(chain_B, position_B), self._model.vocab, mixed_B)
        table = drawn.table()
        if self._routed is not None and routing.taken is not None:
            table = with_routes(table, torch.cat(routing.taken, 1), self._routed)
        self._drawn_KXM[:, :, :size].index_copy_(0, self._step_1, table.unsqueeze(0))
        self._step_1 += 1
        going_on_B = ~ended_B
        token_B.copy_(torch.where(going_on_B, drawn.tokens, token_B))
        cached_B += going_on_B
        position_B += going_on_B
        ended_B |= position_B >= limit_B
        if self._eos_ids:
            is_eos_EB = token_B == self._eos_E1
            ended_B |= is_eos_EB[0] if len(self._eos_ids) == 1 else is_eos_EB.any(0)


def with_routes(table_XB: Tensor, routes_BI: Tensor, shape: ModelShape) -> Tensor:
    return torch.cat([table_XB[:DRAWN], route_words(routes_BI, shape), table_XB[DRAWN:]])


def batch_bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
