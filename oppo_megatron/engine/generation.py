"""The actor's decoding on one rank; the last stage draws tokens, identically on its tensor ranks.

A *micro-step* decodes one token for each running sequence of a micro-batch.  All ranks skip *void* ones: no sequence runs, or the
batch was complete before.  Legend: R rows (running sequences of a micro-batch), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from oppo_megatron.chunks import UNFINISHED, Chunk, ChunkRows, Orders, StopSignal, split_routes
from oppo_megatron.engine.device_decode import DeviceLane, with_routes
from oppo_megatron.engine.round_state import CacheWorker, DecodeRound, Drawn, Growing, TakenUp
from oppo_megatron.engine.sampler import Sampling, draw, draw_at, draw_numbers, no_distribution
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.engine.stream import DRAWN, ChunkOutlet, gather_rows
from oppo_megatron.mcore.batch import MicroBatch, join_rows, pack_responses
from oppo_megatron.mcore.device import CapturedSteps, memory_for, on_device, run_eagerly, too_many_sequences, too_many_tokens
from oppo_megatron.mcore.experts import BYTES, Routing, replay, route_bytes, route_content
from oppo_megatron.mcore.kv.sequence_cache import SequenceCache
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.mcore.vocab import OutputRows
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.planning.book import ReplicaWork


class DecodeWorker(CacheWorker):
    def __init__(
        self, model: RoleModel, cache: SequenceCache, *, sampling: Sampling, stopping: Stopping,
        outlet: ChunkOutlet | None = None, sync_steps: int = 1, keep_routes: bool = False,
    ):  # fmt: skip
        """With one pipeline stage the host reads drawn tokens only every `sync_steps` steps."""
        super().__init__(model, cache)
        self.outlet, self.sampling, self.stopping = outlet, sampling, stopping
        self._sync_steps = sync_steps if model.groups.pp == 1 else 1
        self._resident: dict[int, DeviceLane] = {}  # by micro-batch
        self._begun: DecodeRound | None = None
        self._routed = model.shape if keep_routes and model.shape.experts is not None else None
        self._width = DRAWN + (0 if self._routed is None else route_bytes(self._routed) // BYTES)  # numbers of a drawn token
        captures = self._sync_steps > 1 and cache.device.type == "cuda"
        self.captured = CapturedSteps(cache.device, model.parameters) if captures else None
        if self.captured is not None:
            self.captured.renew()
            with memory_for(lambda: too_many_sequences("a decode step", cache.num_slots, cache.num_bytes)):
                self._lane(0).prepare()

    def order(self, seq_ids: Sequence[int]) -> list[int]:
        """Sort by cache slot; sequences without a slot come last."""
        return sorted(seq_ids, key=lambda i: self.cache.slot(i) if i in self.cache else self.cache.num_slots)

    def invalidate(self) -> None:
        for seq_id in self.cache.seq_ids:
            self.cache.truncate(seq_id, 0)

    def drawn_again(self, rollouts: Sequence[Rollout], budget: int) -> Tensor | None:
        """Draw every response token again, given those before it, by the present weights: [T, 3] on the last stage.

        Columns: tokens, log-probs, sampling log-probs.  Packs at most `budget` tokens.  Raises NumericsError.
        """
        prompts, responses = [r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts]
        micros = pack_responses(prompts, responses, budget, self.cache.device)

        def drawn(micro: MicroBatch, output: OutputRows) -> Tensor:
            seq_ids = [rollouts[i].seq_id for i in micro.index for _ in responses[i]]
            positions = [position for i in micro.index for position in range(len(responses[i]))]
            numbers = draw_numbers(self.sampling, seq_ids, positions, self.cache.device)

            def read(logits_BV: Tensor, u_B: Tensor, *greedy: Tensor) -> Tensor:
                return draw_at(logits_BV.float(), self.sampling, u_B, self.model.vocab, *greedy).table().T

            return output.by_rows(read, *numbers)

        if not (outputs := forward_rows(self.model, micros, drawn)):
            return None
        found_T4 = join_rows(outputs, list(map(len, responses)), micros)
        for place in (~found_T4[:, DRAWN].isfinite()).nonzero().flatten()[:1].tolist():
            rollout, position = [(r, position) for r in rollouts for position in range(len(r.tokens))][place]
            raise no_distribution(self.sampling, rollout.seq_id, position)
        return found_T4[:, :DRAWN]

    def leave(self, *seq_ids: int) -> None:
        """Close sequences that have ended outside of a round."""
        for seq_id in seq_ids:
            if seq_id in self.cache:
                self.cache.close(seq_id)

    def begin(
        self, work: ReplicaWork, rollouts: Sequence[Rollout], readiness: Callable[[], StopSignal], *, index: int,
        clock: int, version: int, orders: Orders = Orders.NONE, outlived: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Begin a round.  A token's version is `version` minus the updates that its sequence's cache has `outlived`."""
        taken = TakenUp(self.cache, work)
        running = {g.seq_id for batch in work.decode for g in batch}
        held = {r.seq_id: r for r in rollouts if r.seq_id in running}
        growing = {i: Growing(r, self.stopping.limit(i), version - outlived.get(i, 0)) for i, r in held.items()}
        self._begun = DecodeRound(work, taken, growing, index, clock, orders, local=readiness(), stop=readiness())
        for lane in self._resident.values():
            lane.drop()
        if self.captured is not None:
            self.captured.renew()

    @property
    def _round(self) -> DecodeRound:
        assert self._begun is not None, "no round has begun"
        return self._begun

    def live(self, action: Action) -> bool:
        return self._round.live(action)

    def compute(self, action: Action) -> int:
        if action.op is Op.GATHER:
            self._round.rows = gather_rows(ChunkRows.of(self._round.rows), self.model.groups.collection.dp)
            return 0

        def describe() -> tuple[str, str]:
            if action.op is Op.PREFILL:
                batch = self._round.work.prefill[action.micro_batch]
                return too_many_tokens("the actor's prefill", [growth.new for growth in batch])
            return too_many_sequences("a decode step", self._round.num_tokens(action), self.cache.num_bytes)

        with memory_for(describe):
            if action.op is Op.PREFILL:
                return self._prefill(action.micro_batch)
            if action.op is Op.DECODE:
                return self._decode(action) if self._sync_steps == 1 else self._start_step(action)
            return self._sample(action) if self._sync_steps == 1 else self._read(action)

    def outbox(self, action: Action) -> Sequence[Tensor]:
        if action.payload is Payload.CHUNK:
            assert self.outlet is not None
            return self.outlet.message(self._round.merge())
        if action.payload is Payload.TOKENS:
            return [on_device(torch.from_numpy(self._round.drawn[action.micro_batch]), self.cache.device)]
        hidden = self._round.hidden[action.micro_batch].contiguous()
        is_step = action.step is not None and self._routed is not None
        return [hidden, self._round.routes[action.micro_batch]] if is_step else [hidden]

    def inbox(self, action: Action) -> Iterator[Tensor]:
        if action.payload is Payload.TOKENS:
            lane = self._round.lanes[action.micro_batch]
            table_XR = torch.empty(self._width, len(lane), dtype=torch.float64, device=self.cache.device)
            yield table_XR
            self._absorb(action, np.array(table_XR.tolist())[None], lane)
        else:
            hidden = self.new_hidden(self._round.num_tokens(action))
            yield hidden
            self._round.hidden[action.micro_batch] = hidden
            if action.step is not None and self._routed is not None:
                assert self._routed.experts is not None
                before = len(self.model.decoder.layers) * self.model.stage * self._routed.experts.active
                routes_RI = hidden.new_empty(len(hidden), before, dtype=torch.uint8)
                yield routes_RI
                self._round.routes[action.micro_batch] = routes_RI

    def end(self) -> Chunk:
        """Return the merged chunk of all replicas; drop finished sequences, and tokens decoded beyond it, from this cache."""
        chunk = self._round.merge()
        rows, finished = chunk.rows, []
        lengths, ended = (rows.offsets + rows.counts).tolist(), (rows.finish_clocks != UNFINISHED).tolist()
        for seq_id, length, end in zip(rows.seq_ids.tolist(), lengths, ended, strict=True):
            growing = self._round.growing.get(seq_id)
            if growing is None:
                continue
            if end:
                finished.append(seq_id)
            else:
                cached = growing.num_prompt_tokens + length - 1
                self.cache.truncate(seq_id, min(cached, self.cache.length(seq_id)))
        for seq_id in sorted(finished, key=self.cache.slot, reverse=True):
            self.cache.close(seq_id)
        return chunk

    def _prefill(self, micro_batch: int) -> int:
        batch, hidden = self.in_slot_order(self._round.work.prefill[micro_batch]), self._round.hidden
        growing, routing = self._round.growing, None
        sequences = {g.seq_id: growing[g.seq_id].tokens for g in batch}
        if self._routed is not None:  # tokens that are cached again take their experts again, as in training
            routes = [route for g in batch for route in growing[g.seq_id].routes[g.past : g.past + g.new]]
            if any(routes):
                routing = replay(routes, torch.arange(len(routes), device=self.cache.device), len(routes), self._routed)
        hidden[micro_batch] = self.append(batch, sequences, hidden.get(micro_batch), self._round.taken, routing)
        return sum(g.new for g in batch)

    def _decode(self, action: Action) -> int:
        lane, hidden = self._round.lanes[action.micro_batch], self._round.hidden
        is_first = self.model.pre_process
        inputs = on_device([g.tokens[-1] for g in lane], self.cache.device) if is_first else hidden[action.micro_batch]
        routing = Routing(taken=[] if self._routed is not None else None)
        seq_ids = [g.seq_id for g in lane]
        hidden[action.micro_batch] = step(self.model, self.cache, seq_ids, [1] * len(lane), inputs, routing=routing)
        if routing.taken is not None:
            before = () if is_first else (self._round.routes[action.micro_batch],)
            self._round.routes[action.micro_batch] = torch.cat([*before, *(taken.to(torch.uint8) for taken in routing.taken)], 1)
        return len(lane)

    def _sample(self, action: Action) -> int:
        lane, hidden_RH = self._round.lanes[action.micro_batch], self._round.hidden[action.micro_batch]
        seq_ids, positions = [g.seq_id for g in lane], [g.position for g in lane]
        table = draw(self.model.logits(hidden_RH), self.sampling, seq_ids, positions, self.model.vocab).table()
        if self._routed is not None:
            table = with_routes(table, self._round.routes[action.micro_batch], self._routed)
        drawn = np.array(table.tolist())
        self._round.drawn[action.micro_batch] = drawn[: self._width]
        return self._absorb(action, drawn[None], lane)

    def _lane(self, micro_batch: int) -> DeviceLane:
        if micro_batch not in self._resident:
            self._resident[micro_batch] = DeviceLane(
                self.model, self.cache, self._run_step, sampling=self.sampling,
                eos_ids=self.stopping.eos_ids, sync_steps=self._sync_steps, name=micro_batch, routed=self._routed,
                width=self._width,
            )  # fmt: skip
        return self._resident[micro_batch]

    def _run_step(self, key: Hashable, step: Callable[[], None]) -> None:
        (self.captured or run_eagerly)(key, step)

    def _start_step(self, action: Action) -> int:
        assert action.step is not None
        lane, resident = self._round.lanes[action.micro_batch], self._lane(action.micro_batch)
        if not resident.started:
            resident.load(lane, action.step, self._round.steps[action.micro_batch])
            resident.start(lane)
        return len(lane)

    def _read(self, action: Action) -> int:
        lane, resident = self._round.lanes[action.micro_batch], self._resident[action.micro_batch]
        if action.step != resident.last_step:
            return len(lane)
        resident.start(lane)  # the device computes the next window while this one is booked
        rows, drawn = resident.read()
        return self._absorb(action, drawn, rows)

    def _absorb(self, action: Action, drawn_KXR: Drawn, rows: Sequence[Growing]) -> int:
        """Append drawn tokens.  Ended sequences leave the micro-batch, but keep their slots until the round ends."""
        assert action.step is not None
        lane, first = self._round.lanes[action.micro_batch], action.step + 1 - len(drawn_KXR)
        going = {place: room for place, growing in enumerate(rows) if (room := growing.room)}
        rows, drawn_XRK = [rows[place] for place in going], drawn_KXR.transpose(1, 2, 0)[:, list(going)]
        tokens_RK = drawn_XRK[0].astype(np.int64)
        responses = [g.tokens[g.num_prompt_tokens :] for g in rows] if self.stopping.text is not None else ()
        counts, reasons = self.stopping.ends(tokens_RK, list(going.values()), responses)
        masses_XRK = drawn_XRK[self._width :]
        for mass_RK in () if np.isfinite(masses_XRK).all() else masses_XRK:
            taken_RK = np.arange(mass_RK.shape[1]) < np.array(counts, dtype=np.int64)[:, None]
            for step_, place in np.argwhere((taken_RK & ~np.isfinite(mass_RK)).T):
                raise no_distribution(self.sampling, rows[place].seq_id, rows[place].position + int(step_))
        start, columns = self._round.start, (tokens_RK.tolist(), *drawn_XRK[1:DRAWN].tolist())
        words_RWK = drawn_XRK[DRAWN : self._width].transpose(1, 0, 2)
        found = zip(rows, words_RWK, counts, reasons, *columns, strict=True)
        for growing, words_WK, count, reason, tokens, logprobs, sampling in found:
            routes = [] if self._routed is None else split_routes(route_content(words_WK[:, :count]), count)
            growing.append(tokens[:count], logprobs[:count], sampling[:count], routes, reason, start)
        ended = zip(rows, counts, reasons, strict=True)
        self._leave(action.micro_batch, {g.seq_id: first + count - 1 for g, count, reason in ended if reason is not None})
        here = (action.step, action.micro_batch)
        if not lane or (self._round.ready is not None and self._round.ready <= here):
            self._round.ended[action.micro_batch] = action.step + 1
        return len(rows)

    def _leave(self, micro_batch: int, ends: Mapping[int, int]) -> None:
        """Remove ended sequences (`ends`: id -> last micro-step) from the micro-batch, until the batch is complete."""
        lane = self._round.lanes[micro_batch]
        for step_ in sorted(set(ends.values())):
            if self._round.ready is not None and self._round.ready <= (step_ - 1, micro_batch):
                return
            for growing in [g for g in lane if ends.get(g.seq_id) == step_]:
                last = lane[-1]
                lane[lane.index(growing)] = last
                lane.pop()
                self.cache.exchange(growing.seq_id, last.seq_id)  # so that the micro-batch keeps neighbouring slots
                if self.model.groups.dp == 1:  # with several, one replica cannot know when the batch is complete
                    self._round.local.finish(growing.seq_id)
                    if self._round.local.ready and self._round.ready is None:
                        self._round.ready = step_, micro_batch
