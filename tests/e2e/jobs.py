"""Jobs that run on the ranks of the pool."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from oppo_megatron.cluster.world import World
from oppo_megatron.engine import generation
from oppo_megatron.engine.executor import Executor
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.errors import OppoError
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.records import Rollout
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.entry import run_ppo, run_rank
from oppo_megatron.train.guard import RollBack
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.loop import TrainingLoop
from oppo_megatron.train.rollouts import Rollouts
from oppo_megatron.train.run_files import save_role
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.saver import Saver
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


def nothing(*_: Any) -> None:
    """Take the place of what is not asked for."""


@contextmanager
def around(owner: Any, name: str, before: Callable[..., Any] = nothing, after: Callable[..., Any] = nothing) -> Iterator[None]:
    """Each call of a method tells `before` and `after` its arguments."""
    original = getattr(owner, name)

    def called(*args: Any, **options: Any) -> Any:
        before(*args)
        result = original(*args, **options)
        after(*args)
        return result

    with mock.patch.object(owner, name, called):
        yield


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
    run, all_steps, steps, gather = RoundRunner.run, TrainingLoop.run, counted.steps, generation.gather_rows

    def counted_round(runner: RoundRunner, *args: Any) -> Any:
        with rounds.counting():
            chunk = run(runner, *args)
        counted.rounds.append(rounds.taken())
        counted.gathers.append(gathers.taken())
        return chunk

    def counted_gather(*args: Any) -> Any:
        with gathers.counting():
            return gather(*args)

    def counted_steps(loop: TrainingLoop) -> bool:
        with steps.counting():
            return all_steps(loop)

    with (
        rounds.watched(), gathers.watched(), steps.watched(), mock.patch.object(generation, "gather_rows", counted_gather),
        mock.patch.object(RoundRunner, "run", counted_round), mock.patch.object(TrainingLoop, "run", counted_steps),
        around(ScoreExchange, "shared", lambda _, what, values, size, *__: counted.shared.append((what, size))),
    ):  # fmt: skip
        train_with_fan_out(config, fan_out)
    return counted


def train_with_environment(config: dict[str, Any], environment: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, environment):
        train(config)


def train_with_a_death_in_an_update(config: dict[str, Any], rank: int, nth: int) -> tuple[str, str, float]:
    calls = itertools.count(1)

    def strike(trained: TrainedModel, *_: Any) -> None:
        if next(calls) == nth and dist.get_rank() == rank:
            trained.optimizer.prepare_grads = partial(os._exit, 9)

    with around(TrainedModel, "step", strike):
        return _error_of(config)


def _error_of(config: dict[str, Any]) -> tuple[str, str, float]:
    started = time.monotonic()
    try:
        train(config)
    except OppoError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


def train_beside_a_slow_rank(config: dict[str, Any], rank: int, seconds: float) -> None:
    with around(Executor, "_receive", lambda executor, *_: time.sleep(seconds * (executor.rank == rank))):
        train(config)


def train_with_a_slow_critic(config: dict[str, Any], seconds: float) -> None:
    with around(Critic, "update", lambda *_: time.sleep(seconds)):
        train(config)


def train_with_long_updates(config: dict[str, Any], seconds: float) -> float:
    """Return the most seconds that a verdict took.  An update lasts as long as 20 rounds of rank 0."""
    judge, most = ScoreExchange.judge, 0.0

    def timed(*args: Any) -> Any:
        nonlocal most
        began = time.monotonic()
        found = judge(*args)
        most = max(most, time.monotonic() - began)
        return found

    slow = around(Executor, "run", lambda executor, *_: time.sleep(seconds / 20 * (executor.rank == 0)))
    judging = mock.patch.object(ScoreExchange, "judge", timed)
    with slow, judging, around(Actor, "update", lambda *_: time.sleep(seconds)):
        train(config)
    return most


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
    preemption, begun = Preemption(), itertools.count(1)

    def ask(*_: Any) -> None:
        if next(begun) == rounds and dist.get_rank() == rank:
            preemption.ask()

    with around(RoundRunner, "run", ask):
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
    chunks = list[int]()
    with around(RoundRunner, "run", lambda runner, active, score, chunk_tokens, *_: chunks.append(chunk_tokens)):
        train(config)
    return chunks


def train_with_sigterm(config: dict[str, Any], rank: int, after_s: float) -> bool:
    preemption = Preemption()
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM))
    told = timer.start if dist.get_rank() == rank else nothing
    with around(TrainingLoop, "run", lambda _: told()), preemption.listening():
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

    with (
        around(Saver, "save", after=lambda _, loop: sums(loop, "saved")),
        around(TrainingLoop, "restore", after=lambda loop, _: sums(loop, "restored")),
    ):
        while True:
            try:
                train(config)
            except RollBack:
                config = config | {"checkpoint": config["checkpoint"] | {"resume": True}}
            else:
                return seen


def train_and_keep_weights(config: dict[str, Any], folder: Path) -> None:
    """`train`, with the actor's weights of each version as a Hugging Face directory named by it."""

    def keep(loop: TrainingLoop, *_: Any) -> None:
        if loop.actor is not None:
            save_role(loop.actor.role.trained.chunks, folder / str(loop.updates.version), loop.exchange.tokenizer)

    with around(TrainingLoop, "run", keep), around(TrainingLoop, "_train", after=keep):
        train(config)


def train_with_a_shared_reference(config: dict[str, Any]) -> int:
    shared = 0

    def look(loop: TrainingLoop) -> None:
        nonlocal shared
        actor, worker = loop.actor, loop.rounds.scoring.get("reference")
        assert (actor is None) == (worker is None), "they are on the same ranks"
        if actor is None or worker is None:
            return
        for name, param in worker.model.named_parameters():
            assert param is actor.role.serving.get_parameter(name), name
            shared += param.numel()
        fused, ours = worker.model.fused, actor.role.serving.fused
        assert fused is not None and ours is not None
        reference = worker.model
        bare = ours.of(reference.decoder.layers, reference.groups.collection.tp)
        assert fused.layers[0].down is bare.layers[0].down is not ours.layers[0].down, "laid-out weights are shared, too"

    with around(TrainingLoop, "run", look):
        train(config)
    return shared
