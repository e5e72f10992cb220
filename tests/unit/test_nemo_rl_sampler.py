"""The sampler for NeMo-RL under pumps and buffers like its controllers' of August and since (docs/nemo_rl.md: how tested)."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import pytest

from oppo_megatron.errors import ConfigError
from oppo_megatron.integrations.nemo_rl.sampler import OvercommitSampler
from tests.support import virtual_loop

B = 8


@dataclass(frozen=True)
class Meta:
    """Rows of groups, as NeMo-RL's `KVBatchMeta` joins them."""

    groups: tuple[int, ...]
    extra_info: dict[str, Any] | None = None

    def concat(self, *others: Meta) -> Meta:
        return Meta(sum((other.groups for other in others), self.groups), dict(self.extra_info or {}))


@dataclass
class Buffer:
    """Places of groups that were begun and not taken, as in NeMo-RL's `TQReplayBuffer`: parallel lists, oldest first."""

    names: list[int] = field(default_factory=list)
    meta_list: list[Meta | None] = field(default_factory=list)
    start_weight_list: list[int] = field(default_factory=list)
    ready_list: list[bool] = field(default_factory=list)

    def reserve(self, name: int, version: int) -> None:
        self.names.append(name)
        self.meta_list.append(None)
        self.start_weight_list.append(version)
        self.ready_list.append(False)

    def commit(self, name: int) -> None:
        place = self.names.index(name)
        self.meta_list[place], self.ready_list[place] = Meta((name,)), True

    async def remove(self, idxs: list[int], remove_in_dp: bool) -> int:
        for place in sorted(idxs, reverse=True):
            for column in (self.names, self.meta_list, self.start_weight_list, self.ready_list):
                del column[place]
        return len(idxs)


@dataclass
class ClaimingBuffer(Buffer):
    """As since September: a trained group is claimed, and its metadata have metrics."""

    claimed: list[int] = field(default_factory=list)

    def commit(self, name: int) -> None:
        super().commit(name)
        self.meta_list[self.names.index(name)] = Meta((name,), {"rollout_metrics": [{"of": name}]})

    async def claim_for_training(self, idxs: list[int]) -> int:
        self.claimed += [self.names[place] for place in idxs]
        return await self.remove(idxs, remove_in_dp=False)

    def release(self, names: Sequence[int]) -> None:
        assert sorted(self.claimed) == sorted(names), "the controller raises ValueError"
        self.claimed.clear()


class Cut:
    """A change of the buffer, between which checkpoints are taken."""

    def __init__(self) -> None:
        self.asked = 0

    def require_live(self) -> None:
        self.asked += 1


@dataclass
class Controller:
    sampler: OvercommitSampler
    buffer: Buffer
    seconds: list[float]
    chunk: int
    capacity: int
    version: int = 0
    most: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)

    async def roll_out(self) -> None:
        tasks = []
        for first in range(0, len(self.seconds), B):
            if isinstance(self.buffer, ClaimingBuffer):
                await self.sampler.wait_until_admissible(trainer_version_fn=lambda: self.version)
                before, cut = self.sampler.dispatch_index, Cut()
                self.sampler.commit_admission(cut)
                assert cut.asked == 1 and self.sampler.dispatch_index == before + 1
            else:
                await self.sampler.admit(trainer_version_fn=lambda: self.version)
            tasks += [asyncio.create_task(self._generate(name)) for name in range(first, first + B)]
        await asyncio.gather(*tasks)

    async def _generate(self, name: int) -> None:
        self.starts[name] = self.version
        self.buffer.reserve(name, self.version)
        assert len(self.buffer.names) <= self.capacity
        self.most = max(self.most, self.buffer.ready_list.count(False))
        await asyncio.sleep(self.seconds[name])
        self.buffer.commit(name)

    async def train(self) -> None:
        for _ in range(len(self.seconds) // B):
            step: list[int] = []
            while len(step) < B:
                least = min(self.chunk, B - len(step))
                assert await self.sampler.evict(current_train_weight=self.version) == 0
                meta, count = await self.sampler.select(
                    current_train_weight=self.version, min_prompt_groups=least, max_prompt_groups=B - len(step)
                )
                if meta is None:
                    await asyncio.sleep(0.001)
                    continue
                assert len(meta.groups) == count >= least
                step += meta.groups
                if isinstance(self.buffer, ClaimingBuffer):
                    assert meta.extra_info == {"rollout_metrics": [{"of": name} for name in meta.groups]}
            if isinstance(self.buffer, ClaimingBuffer):
                self.buffer.release(step)
            self.steps.append(step)
            await asyncio.sleep(0.002)
            self.version += 1


def train(delta: int, max_staleness: int, chunk: int, seconds: list[float], kind: type[Buffer] = Buffer) -> Controller:
    buffer = kind()
    sampler = OvercommitSampler(buffer, delta=delta, max_staleness=max_staleness)
    sampler.set_dispatch_index(0)
    capacity = sampler.required_buffer_capacity(B)
    assert capacity == (2 * B if delta else B)
    controller = Controller(sampler, buffer, seconds, chunk, capacity)

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(controller.roll_out(), controller.train()), timeout=30)

    virtual_loop.run(both())
    return controller


def long_tailed(steps: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [0.05 if chance.random() < 0.15 else 0.004 * chance.random() for _ in range(steps * B)]


@pytest.mark.parametrize("chunk", [1, 3, B])
@pytest.mark.parametrize("delta", [0, 3, B])
@pytest.mark.parametrize("kind", [Buffer, ClaimingBuffer])
def test_every_group_is_trained_once_and_at_most_delta_run_beyond_a_batch(kind: type[Buffer], delta: int, chunk: int) -> None:
    done = train(delta, max_staleness=2, chunk=chunk, seconds=long_tailed(6, delta), kind=kind)
    assert sorted(name for step in done.steps for name in step) == list(range(6 * B))
    assert [len(step) for step in done.steps] == [B] * 6 and done.most <= B + delta
    stale = [version - done.starts[name] for version, step in enumerate(done.steps) for name in step]
    if delta == 0:
        assert not any(stale) and done.sampler.is_on_policy
    else:
        assert not done.sampler.is_on_policy


@pytest.mark.parametrize("chunk", [1, B])
def test_the_tail_runs_during_the_next_batch_and_is_waited_for_when_due(chunk: int) -> None:
    seconds = [0.001] * (3 * B)
    seconds[0] = seconds[1] = 0.2
    done = train(delta=2, max_staleness=2, chunk=chunk, seconds=seconds)
    assert not {0, 1} & set(done.steps[0]), "the tail is deferred"
    assert {done.starts[name] for name in done.steps[0]} == {0}
    assert {0, 1} <= {name for step in done.steps[1:] for name in step}
    done = train(delta=2, max_staleness=2, chunk=chunk, seconds=[0.4] + [0.001] * (6 * B - 1))
    assert 0 in done.steps[2], "passed by two updates, then waited for"


def test_ready_groups_that_are_due_come_first() -> None:
    buffer = Buffer()
    for name, version in enumerate([2, 2, 0]):
        buffer.reserve(name, version)
        buffer.commit(name)
    sampler = OvercommitSampler(buffer, delta=2, max_staleness=2)
    meta, count = asyncio.run(sampler.select(current_train_weight=2, min_prompt_groups=2, max_prompt_groups=2))
    assert (meta, count) == (Meta((2, 0), {}), 2) and buffer.names == [1]
    with pytest.raises(ValueError, match="0 to 2 prompt groups"):
        asyncio.run(sampler.select(current_train_weight=2, min_prompt_groups=0, max_prompt_groups=2))


@pytest.mark.parametrize("resumed_at", [5, 6])
def test_a_resumed_run_admits_as_many_batches_as_the_run_that_goes_on(resumed_at: int) -> None:
    """Index 5 at version 5: one more batch may begin; the index that a checkpoint without it leads to is 4: two may."""
    sampler = OvercommitSampler(Buffer(), delta=2)
    sampler.restore_dispatch_index(5) if resumed_at == 6 else sampler.set_dispatch_index(resumed_at)

    async def admitted() -> int:
        for count in range(3):
            try:
                await asyncio.wait_for(sampler.admit(trainer_version_fn=lambda: 5), timeout=1)
            except asyncio.TimeoutError:
                return count
        return 3

    assert virtual_loop.run(admitted()) == (1 if resumed_at == 6 else 2) and sampler.dispatch_index == 6


@runtime_checkable
class OfAugust(Protocol):
    """Names of NeMo-RL's `PromptGroupSampler` in August 2026 (7ea279a), for which its factory looks."""

    is_on_policy: bool
    admit: Any
    select: Any
    evict: Any
    should_abort_inflight: Any
    required_buffer_capacity: Any
    set_dispatch_index: Any


@runtime_checkable
class OfSeptember(OfAugust, Protocol):
    """Names since September (018355f)."""

    supports_buffer_checkpoint: ClassVar[bool]
    dispatch_index: int
    restore_dispatch_index: Any


@runtime_checkable
class Transactional(Protocol):
    wait_until_admissible: Any
    commit_admission: Any


def test_it_has_what_the_controllers_look_for() -> None:
    sampler = OvercommitSampler(Buffer(), delta=1)
    assert isinstance(sampler, OfAugust) and isinstance(sampler, OfSeptember) and isinstance(sampler, Transactional)
    assert vars(OvercommitSampler)["supports_buffer_checkpoint"] is True, "of this class itself: an inherited one is not counted"


def test_it_has_what_the_controller_calls() -> None:
    """The names and keywords of NeMo-RL's `PromptGroupSampler`, which its factory and pumps use."""
    calls = {
        "admit": ["trainer_version_fn"], "wait_until_admissible": ["trainer_version_fn"],
        "select": ["current_train_weight", "min_prompt_groups", "max_prompt_groups"], "evict": ["current_train_weight"],
        "should_abort_inflight": ["start_weight_version", "current_train_weight"],
    }  # fmt: skip
    for name, keywords in calls.items():
        parameters = inspect.signature(getattr(OvercommitSampler, name)).parameters
        assert [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] == keywords
    assert all(
        inspect.iscoroutinefunction(getattr(OvercommitSampler, name))
        for name in ("admit", "select", "evict", "wait_until_admissible")
    )


@pytest.mark.parametrize(("given", "says"), [
    ({"delta": -1}, "delta is -1"), ({"delta": 1.5}, "delta is 1.5"),
    ({"delta": 2, "max_staleness": 0}, "max_staleness is 0"), ({"delta": 9}, "delta 9 is more than 8, the prompts of a step"),
])  # fmt: skip
def test_impossible_settings_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"async_rl.sampler.{says}"):
        OvercommitSampler(Buffer(), **given).required_buffer_capacity(B)
