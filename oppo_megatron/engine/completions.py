"""Decodes whole responses on one model's ranks: held-out evaluation, `oppo generate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.engine.device_decode import SYNC_STEPS
from oppo_megatron.engine.executor import Links
from oppo_megatron.engine.round_runner import Decoding, RoundRunner, decoder
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.records import Prompt, Rollout

ROUND_STEPS = 64


class PromptDecoder:
    def __init__(
        self, model: RoleModel, links: Links, runtime: RuntimeConfig, *, num_slots: int, sampling: Sampling,
        stopping: Stopping, round_steps: int = ROUND_STEPS, activity: Activity | None = None,
    ):  # fmt: skip
        """`num_slots` per replica, if `runtime.kv_cache_mb` holds them; ended responses leave every `round_steps`."""
        self._model, self._links, self._runtime, self._activity = model, links, runtime, activity
        self._num_slots = num_slots
        self.sampling, self.stopping, self.round_steps = sampling, stopping, round_steps
        self._rounds: RoundRunner | None = None
        self._clock = 0

    def decode(self, prompts: Iterable[Prompt]) -> Iterator[Rollout]:
        """Yield responses as they end.  Raises CapacityError."""
        for rollouts in self.rounds(prompts):
            yield from sorted((r for r in rollouts if r.finished), key=lambda r: (r.finish_clock, r.seq_id))

    def rounds(self, prompts: Iterable[Prompt]) -> Iterator[list[Rollout]]:
        """Yield growing rollouts per round; stopping abandons them."""
        rounds, waiting = self._rounds, iter(prompts)
        if rounds is None:
            runtime = self._runtime
            cache = self._model.new_cache(self._num_slots, runtime.kv_budget_bytes, runtime.kv_layout)
            rounds = decoder(
                self._model, cache, sampling=self.sampling, stopping=self.stopping, links=self._links,
                micro_batch_tokens=runtime.micro_batch_tokens, timeout_s=runtime.timeout_s,
                sync_steps=SYNC_STEPS[cache.device.type], activity=self._activity,
            )  # fmt: skip
        assert rounds.decode is not None
        self._rounds = None  # these caches and books hold the abandoned sequences
        places = rounds.decode.cache.num_slots * self._model.groups.dp
        active: list[Rollout] = []
        while True:
            active = [r for r in active if not r.finished]
            active += [Rollout(prompt, admission=0) for prompt in islice(waiting, places - len(active))]
            if not active:
                break
            decoding = Decoding(self._clock, 0, partial(_AllEnded, active))
            chunk = rounds.run(active, [], self.round_steps, decoding)
            assert chunk is not None
            self._clock, by_id = chunk.clock, {r.seq_id: r for r in active}
            for row in chunk.rows:
                by_id[row.seq_id].extend(row)
            rounds.recorded(active)
            yield active
        rounds.executor.drain()
        self._rounds = rounds


class _AllEnded:
    def __init__(self, active: Sequence[Rollout]):
        self._going_on = {r.seq_id for r in active}

    @property
    def ready(self) -> bool:
        return not self._going_on

    def finish(self, *seq_ids: int) -> None:
        assert self._going_on.issuperset(seq_ids)
        self._going_on.difference_update(seq_ids)
