"""Jobs that run on the ranks of the pool."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.cluster.world import World
from oppo_megatron.engine import generation
from oppo_megatron.engine.executor import Executor
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.errors import OppoError
from oppo_megatron.mcore.training import StepReport, TrainedModel
from oppo_megatron.records import Rollout
from oppo_megatron.train.actor import Critic
from oppo_megatron.train.entry import run_ppo, run_rank
from oppo_megatron.train.guard import RollBack
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.loop import TrainingLoop
from oppo_megatron.train.rollouts import Rollouts
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.saving.state import Found
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.update import UpdateSettings, minibatches_of
from oppo_megatron.train.updates import Updates
from tests.support.configs import run_of
from tests.support.processes import room_for
from tests.support.traffic import Traffic


def train(config: dict[str, Any], preemption: Preemption | None = None) -> bool:
    """One rank of a whole PPO run, as `oppo train` starts it; False if it was asked to stop."""
    checked = run_of(config)
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return run_ppo(checked, world, read_inputs(checked), preemption or Preemption(checked.preempt_deadline_s))


def train_with_fan_out(config: dict[str, Any], fan_out: int) -> None:
    with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", fan_out):
        train(config)


def train_reading_seldom(config: dict[str, Any], every: int) -> None:
    """`train`, where the host reads tokens once in so many decode steps, as on a GPU."""
    with mock.patch.dict("oppo_megatron.engine.device_decode.SYNC_STEPS", cpu=every):
        train(config)


@dataclass
class Counted:
    """Messages of one rank in each round, those gathered by replicas among them, in all steps, and shared: (what, numbers)."""

    rounds: list[Traffic] = field(default_factory=list)
    gathers: list[Traffic] = field(default_factory=list)
    steps: Traffic = field(default_factory=Traffic)
    shared: list[tuple[str, int]] = field(default_factory=list)


def train_counted(config: dict[str, Any], fan_out: int) -> Counted:
    counted, rounds, gathers = Counted(), Traffic(), Traffic()
    run, all_steps, share, steps = RoundRunner.run, TrainingLoop.run, ScoreExchange.shared, counted.steps
    gather = generation.gather_rows

    def counted_round(runner: RoundRunner, *args: Any) -> Any:
        with rounds.counting():
            chunk = run(runner, *args)
        counted.rounds.append(rounds.taken())
        counted.gathers.append(gathers.taken())
        return chunk

    def counted_gather(*args: Any) -> Any:
        with gathers.counting():
            return gather(*args)

    def noted(exchange: ScoreExchange, what: str, values: Tensor | None, size: int, source: int) -> Tensor:
        counted.shared.append((what, size))
        return share(exchange, what, values, size, source)

    def counted_steps(loop: TrainingLoop) -> bool:
        with steps.counting():
            return all_steps(loop)

    with (
        rounds.watched(),
        gathers.watched(),
        steps.watched(),
        mock.patch.object(generation, "gather_rows", counted_gather),
        mock.patch.object(RoundRunner, "run", counted_round),
        mock.patch.object(TrainingLoop, "run", counted_steps),
        mock.patch.object(ScoreExchange, "shared", noted),
    ):
        train_with_fan_out(config, fan_out)
    return counted


def train_with_environment(config: dict[str, Any], environment: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, environment):
        train(config)


def train_with_a_death_in_an_update(config: dict[str, Any], rank: int, nth: int) -> tuple[str, str, float]:
    seen = []
    step = TrainedModel.step

    def mortal(trained: TrainedModel, *args: Any) -> StepReport:
        seen.append(trained)
        if dist.get_rank() == rank and len(seen) == nth:
            trained.optimizer.prepare_grads = partial(os._exit, 9)
        return step(trained, *args)

    with mock.patch.object(TrainedModel, "step", mortal):
        return _error_of(config)


def _error_of(config: dict[str, Any]) -> tuple[str, str, float]:
    started = time.monotonic()
    try:
        train(config)
    except OppoError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


def train_beside_a_slow_rank(config: dict[str, Any], rank: int, seconds: float) -> None:
    receive = Executor._receive

    def slow(executor: Executor, *args: Any) -> None:
        if executor.rank == rank:
            time.sleep(seconds)
        receive(executor, *args)

    with mock.patch.object(Executor, "_receive", slow):
        train(config)


def train_with_a_slow_critic(config: dict[str, Any], seconds: float) -> None:
    update = Critic.update

    def slow(critic: Critic, *args: Any) -> Any:
        time.sleep(seconds)
        return update(critic, *args)

    with mock.patch.object(Critic, "update", slow):
        train(config)


def train_while_the_clock_is_set_back(config: dict[str, Any]) -> None:
    shown = itertools.count(2e9, -5.0)
    with mock.patch.object(time, "time", lambda: next(shown)):
        train(config)


def run_rank_within(kind: str, config: Any) -> int:
    """`run_rank`, where the process of the last rank may not grow by more than BOUND_MB in its second update."""
    make = Updates.make

    def bounded(updates: Updates, step: int, *args: Any) -> Any:
        last = dist.get_rank() == dist.get_world_size() - 1
        with room_for(int(os.environ["BOUND_MB"])) if last and step == 2 else nullcontext():
            return make(updates, step, *args)

    with mock.patch.object(Updates, "make", bounded):
        return run_rank(kind, config)


def train_until(config: dict[str, Any], rounds: int, rank: int = 0) -> bool:
    """`train`, where `rank` alone is told to stop once it has begun so many rounds; whether the run ended by itself."""
    preemption, run, begun = Preemption(), RoundRunner.run, itertools.count(1)

    def counting(runner: RoundRunner, *args: Any) -> Any:
        if next(begun) == rounds and dist.get_rank() == rank:
            preemption.ask()
        return run(runner, *args)

    with mock.patch.object(RoundRunner, "run", counting):
        return train(config, preemption)


def train_with_a_wrong_logprob(config: dict[str, Any], minibatch: int, step: int) -> str:
    take, settings = Rollouts.take_batch, UpdateSettings.of(run_of(config), step, torch.device("cpu"))
    steps = itertools.count(1)

    def spoilt(rollouts: Rollouts) -> list[Rollout]:
        batch = take(rollouts)
        if next(steps) != step:
            return batch
        row = list(minibatches_of(len(batch), settings))[minibatch][0]
        batch[row].logprobs[0] -= 0.5
        return batch

    with mock.patch.object(Rollouts, "take_batch", spoilt):
        return train_error(config)


def train_and_tell_chunks(config: dict[str, Any]) -> list[int]:
    chunks, run = [], RoundRunner.run

    def noting(runner: RoundRunner, active: Any, score: Any, chunk_tokens: int, *args: Any) -> Any:
        chunks.append(chunk_tokens)
        return run(runner, active, score, chunk_tokens, *args)

    with mock.patch.object(RoundRunner, "run", noting):
        train(config)
    return chunks


def train_with_sigterm(config: dict[str, Any], rank: int, after_s: float) -> bool:
    preemption = Preemption()
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM))
    run = TrainingLoop.run

    def told(loop: TrainingLoop) -> bool:
        if dist.get_rank() == rank:
            timer.start()
        return run(loop)

    with mock.patch.object(TrainingLoop, "run", told), preemption.listening():
        try:
            return train(config, preemption)
        finally:
            timer.cancel()


def train_error(config: dict[str, Any]) -> str:
    return _error_of(config)[1]


def train_through_rollbacks(config: dict[str, Any]) -> list[tuple[str, float]]:
    """Restart `train` after each rollback; return (when, sum of the actor's weights and optimizer) at each save and restore."""
    seen: list[tuple[str, float]] = []

    def sums(loop: TrainingLoop, when: str) -> None:
        trained = next(iter(loop.models.values()))
        optimizer = trained.optimizer.chained_optimizers[0].optimizer
        held = [*trained.model.parameters(), *(x for s in optimizer.state.values() for x in s.values())]
        total = sum(float(torch.as_tensor(x).double().abs().sum()) for x in held)
        seen.append((f"{when} {loop.done}", total + loop.adaptation.kl.value))

    save, restore = Saver.save, TrainingLoop.restore

    def saved(saver: Saver, loop: TrainingLoop) -> None:
        save(saver, loop)
        sums(loop, "saved")

    def restored(loop: TrainingLoop, found: Found) -> None:
        restore(loop, found)
        sums(loop, "restored")

    with mock.patch.object(Saver, "save", saved), mock.patch.object(TrainingLoop, "restore", restored):
        while True:
            try:
                train(config)
            except RollBack:
                config = config | {"checkpoint": config["checkpoint"] | {"resume": True}}
            else:
                return seen


def train_with_a_shared_reference(config: dict[str, Any]) -> int:
    run, shared = TrainingLoop.run, 0

    def looked_at(loop: TrainingLoop) -> bool:
        nonlocal shared
        actor, worker = loop.actor, loop.rounds.scoring.get("reference")
        assert (actor is None) == (worker is None), "they are on the same ranks"
        if actor is None or worker is None:
            return run(loop)
        for name, param in worker.model.named_parameters():
            assert param is actor.role.serving.get_parameter(name), name
            shared += param.numel()
        fused, ours = worker.model.fused, actor.role.serving.fused
        assert fused is not None and ours is not None
        reference = worker.model
        bare = ours.of(reference.decoder.layers, reference.groups.collection.tp)
        assert fused.layers[0].down is bare.layers[0].down is not ours.layers[0].down, "laid-out weights are shared, too"
        return run(loop)

    with mock.patch.object(TrainingLoop, "run", looked_at):
        train(config)
    return shared
