"""The sampler in NeMo-RL's own controller, over generation and training that only wait (needs its sources: docs/nemo_rl.md)."""

import asyncio
import importlib.util
import random
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

if importlib.util.find_spec("nemo_rl") is None:
    pytest.skip("needs the sources of NeMo-RL, and ray: see docs/nemo_rl.md", allow_module_level=True)

import ray
from nemo_rl.algorithms import single_controller
from nemo_rl.algorithms.async_utils.replay_buffer import TQReplayBuffer
from nemo_rl.algorithms.async_utils.staleness_sampler import create_sampler
from nemo_rl.algorithms.grpo import GRPOConfig
from nemo_rl.algorithms.single_controller_utils.config import AsyncRLConfig, validate_sampler_buffer_capacity
from nemo_rl.data_plane import KVBatchMeta
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.experience.rollout_manager import RolloutOutcome
from nemo_rl.utils.timer import Timer

B = 8


class World:
    """The pumps' calls of a controller: rollouts that take `seconds`, a trainer that notes what it is given."""

    def __init__(self, settings: dict[str, Any], seconds: Sequence[float], chunk: int, start: int):
        self.seconds, self.starts, self.trained, self.most = seconds, {}, list[list[int]](), 0
        target = "oppo_megatron.integrations.nemo_rl.sampler:OvercommitSampler"
        config = AsyncRLConfig(
            sampler={"name": "custom", "target": target, **settings}, min_groups_for_streaming_train=chunk,
            max_inflight_prompts=2 * B, max_buffered_rollouts=2 * B,  # so that the sampler alone bounds them
        )  # fmt: skip
        self.buffer = TQReplayBuffer(self, partition_id="rollouts", pad_value_dict={})
        sampler = create_sampler(self.buffer, config.sampler)
        sampler.set_dispatch_index(start)
        capacity = sampler.required_buffer_capacity(B)
        validate_sampler_buffer_capacity(config, required_capacity=capacity, sampler_name=type(sampler).__name__)
        self.controller = self._controller(config, sampler, start)

    def _controller(self, config: AsyncRLConfig, sampler: Any, start: int) -> Any:
        """NeMo-RL's, with the attributes that its constructor gives it and its pumps read."""
        made = object.__new__(single_controller.SingleControllerActor.__ray_metadata__.modified_class)
        vars(made).update(_buffer=self.buffer, _sampler=sampler, _rollout_manager=self, _trainer=self)
        made._async_cfg, made._dp_client, made._partition_id, made._gen = config, self, "rollouts", None
        grpo = GRPOConfig.model_construct(max_num_epochs=1, max_num_steps=10**6, num_prompts_per_step=B)
        made._master_config = SimpleNamespace(grpo=grpo, checkpointing={"enabled": False, "save_period": 10**9})
        prompts = {"message_log": [[]] * B}
        firsts = range(0, len(self.seconds), B)
        made._dataloader = [BatchedDataDict({"name": list(range(i, i + B)), **prompts}) for i in firsts]
        made._rollout_exhausted, made._rollout_permitted = asyncio.Event(), asyncio.Event()
        made._rollout_permitted.set()
        made._buffer_capacity = asyncio.Semaphore(config.max_buffered_rollouts)
        made._inflight_rollouts, made._inflight_by_group_id, made._dispatched_rollouts = 0, {}, set()
        made._trainer_version = made._train_steps = start
        made._current_epoch = made._consumed_samples = made._total_valid_tokens = 0
        made._batch_shortfall, made._batch_replacements, made._batch_promotions = {}, {}, {}
        made._replacement_reserve, made._sampler_stamps_target_steps = deque(), False
        made._policy_logprobs_required = made._reference_logprobs_required = False
        made._timer, made._loss_fn, made._step_log_dict = Timer(), None, {"sequence_lengths": []}
        made._timeout = SimpleNamespace(mark_iteration=lambda: None, check_save=lambda: False)
        made._logger = SimpleNamespace(log_metrics=lambda *_, **__: None)
        made._advantage_stage, made._sync_weights = self.advantages, self.sync
        return made

    async def advantages(self, meta: KVBatchMeta) -> tuple[KVBatchMeta, bool]:
        return meta, True

    async def sync(self, calibration_data: Any) -> int:
        self.controller._rollout_permitted.clear()
        await asyncio.sleep(0.003)
        self.controller._rollout_permitted.set()
        return 0

    def clear_samples(self, **_: Any) -> None:
        """Data plane's call."""

    async def generate_and_push(self, prompt: Any, *, target_step: int | None, inflight_registry: Any) -> Any:
        """Rollout manager's call: a slot of the real buffer, filled as its `commit` does."""
        name, version, buffer = prompt["name"], self.controller._trainer_version, self.buffer
        group = buffer.reserve(weight_version=version, target_step=target_step)
        self.starts[name], self.most = version, max(self.most, buffer.ready_list.count(False))
        await asyncio.sleep(self.seconds[name])
        place = buffer._group_ids.index(group)
        buffer.meta_list[place] = KVBatchMeta(
            partition_id="rollouts", task_name="train", sample_ids=[f"{name}_g0"], fields=["input_ids"],
            sequence_lengths=[4], tags=[{"weight_version": version}],
        )  # fmt: skip
        buffer.ready_list[place] = True
        return RolloutOutcome.COMMITTED

    def begin_train_step(self, _: Any) -> None:
        self.trained.append([])

    def train_microbatches_from_meta(self, meta: KVBatchMeta) -> None:
        self.trained[-1] += [int(name.partition("_")[0]) for name in meta.sample_ids]

    def prepare_for_training(self) -> None:
        """Trainer's call."""

    def finish_train_step(self) -> dict[str, Any]:
        return {}

    async def run(self) -> None:
        pumps = self.controller._rollout_pump(), self.controller._train_pump()
        await asyncio.wait_for(asyncio.gather(*pumps), timeout=30)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with (
        mock.patch.object(ray, "cluster_resources", dict), mock.patch.object(single_controller, "aggregate_step_metrics", dict),
        mock.patch.object(single_controller, "reduce_advantage_pump_metrics", dict),
    ):  # fmt: skip
        yield


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("chunk", [1, 3, B])
@pytest.mark.parametrize("delta", [0, 1, 3, B])
def test_nemo_rls_pumps_train_every_group_once(delta: int, chunk: int, start: int) -> None:
    chance = random.Random(delta)
    seconds = [0.06 if chance.random() < 0.15 else 0.006 * chance.random() for _ in range(8 * B)]

    async def whole() -> World:
        world = World({"delta": delta, "max_staleness": 2}, seconds, chunk, start)
        await world.run()
        return world

    world = asyncio.run(whole())
    assert [len(step) for step in world.trained] == [B] * 8
    assert sorted(name for step in world.trained for name in step) == list(range(8 * B))
    assert world.most <= B + delta
    ages = [start + step - world.starts[name] for step, names in enumerate(world.trained) for name in names]
    assert min(ages) == 0 and (max(ages) > 0) == (delta > 0) and world.controller._sampler.is_on_policy == (delta == 0)
