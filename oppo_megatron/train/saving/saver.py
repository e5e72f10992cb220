"""The checkpoints of `oppo train`: preparing and writing one, and continuing a run from one."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

import torch.distributed as dist

from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import batch_rows, best_standard, members
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.weights.checkpoint import load_models
from oppo_megatron.overcommit.ahead import (
    Ahead,
    require_bounded_deferrals,
    require_prompts,
    require_resumable,
    require_work,
)
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.saving.caches import load_caches, require_sound_books
from oppo_megatron.train.saving.keeper import CheckpointKeeper, Cost, Work
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.resuming import Found
from oppo_megatron.train.saving.saveable import Saveable
from oppo_megatron.train.saving.snapshot import MODELS, Snapshot, best_of, cache_path, take_snapshot, updates_of
from oppo_megatron.train.saving.state import (
    adapter_state,
    data_state,
    frozen_models,
    layout_of,
    make_rollouts,
    require_same_adapters,
    require_same_data,
)
from oppo_megatron.train.saving.telling import (
    config_state,
    read_config_state,
    source_state,
    tell_of_changes,
    tell_of_start,
)


class Saver(CheckpointKeeper):
    """One rank's part.  Calls are collective of the world but for `due`, `take_cost` and `told_to_stop`."""

    def __init__(self, config: TrainConfig, world: World, prompts: PromptSet, preemption: Preemption):
        super().__init__(config.checkpoint, best_standard(config), config.run_dir, world, preemption)
        self.config, self.prompts = config, prompts
        self._told = {"config": config_state(config), "sources": source_state(config)}
        self._data: dict[str, Any] | None = None

    def told_to_stop(self, group: dist.ProcessGroup) -> bool:
        """Before a round, on the ranks of the actor alone: the chunk tells the others."""
        return self.preemption.agreed(group, self.world.activity)

    def meet(self, step: int, reward: float) -> None:
        """All ranks have met for the scores of a step, of mean `reward`."""
        if self.standard is not None and self.standard.metric == REWARD:
            self.measured(step, reward)
        self.look_around()

    def save_end(self, run: Saveable) -> None:
        """After the last step, behind the weights: a disk that is full now costs no more than the way on from here."""
        if not self.rules.saves_end or self.saved == run.position:
            return
        try:
            self.save(run)
            self.conclude()
        except CheckpointError as error:
            if run.note is not None:
                run.note(f"the run has ended, but cannot be given more steps later: {error}")

    def save(self, run: Saveable) -> None:
        """Write the run's state between two rounds, as `write` does."""
        self.conclude()
        started = time.monotonic()
        run.settle()
        position, admitted, note = run.position, run.admitted, run.note
        self.judge(position)

        def take(copied: bool) -> Snapshot:
            told = self._told | {"data": self._data_now(), "best_metric": self.standard and self.standard.metric}
            return take_snapshot(run, self.config, told, self.best, copied=copied)

        def whole(cost: Cost) -> None:
            run.rollbacks.checkpoint = position.name, admitted
            if note is not None:
                note(cost.describe(position.name))

        last = self.stopping or run.within_step  # the run is to stop with this one
        self.write(Work(position, take, whole, note, last), started)

    def require_same_run(self, found: Found, left_out: Set[int]) -> Ahead:
        """The rest of a checkpoint's run under the present configuration; `left_out`: positions in the stream of prompts.

        Raises CheckpointError where it has other prompts, another order of them, other adapters, had more steps or passes over
        the prompts, or has ended and has nothing left to train, and where rollouts in flight could not be trained within
        `overlap.max_staleness`.
        """
        require_same_data(found.state["data"], self._data_now())
        require_same_adapters(found.state["adapters"], adapter_state(self.config))
        ahead = found.ahead(left_out)
        require_resumable(ahead.done, self.config.steps)
        a_pass, passes = self.prompts.rollouts_per_pass, self.config.passes
        most = None if passes is None else passes * a_pass
        require_prompts(ahead, most, a_pass)
        if RunDirectory(self.config.run_dir).finished:
            require_work(ahead, self.config.steps, most, batch_rows(self.config))
        if ahead.done != self.config.steps:
            rollout, held = self.config.rollout, found.held(left_out)
            deferrals = [line["deferrals"] for line in held[:: members(self.config).size]]
            groups = rollout.batch_size // rollout.group_size
            require_bounded_deferrals(deferrals, groups, rollout.group_size, self.config.overlap.max_staleness)
        return ahead

    def describe(self, found: Found) -> list[str]:
        """Report where the run goes on from, and the changed settings."""
        state, run = found.state, RunDirectory(self.config.run_dir)
        then = state.get("config") or read_config_state(run.config)
        told = tell_of_changes(then, self._told["config"], state.get("sources", {}), self._told["sources"])
        return [tell_of_start(run.path, found.folder.name, state["done"], state["saved_at"]), *told]

    def restore(self, run: Saveable, found: Found) -> None:
        """Continue from a checkpoint.  Raises CheckpointError for other data, models or a damaged file."""
        state, models, rollbacks = found.state, run.models, run.rollbacks
        self.require_same_run(found, rollbacks.left_out)
        self.resume_best(best_of(state), state.get("best_metric", REWARD))
        updates = updates_of(state, models)
        with waiting_for("models of the checkpoint", self.world.activity, waits=False):
            load_models(found.folder / MODELS, models, updates)
        for name, model in models.items():
            model.resume_schedule(updates[name])
        run.publish()
        stream = PromptStream(self.prompts, self.config.seed, shuffle=self.config.data.shuffle)
        held = make_rollouts(found.held(rollbacks.left_out), stream)
        run.load_state_dict(state, held)
        rollbacks.checkpoint = found.folder.name, found.position
        lost = len(held) < len(found.rollouts)
        if not lost:
            self._restore_caches(run, found)
        if run.within_step and (lost or len(run.buffer) < run.buffer.target):  # as where the batch is larger now
            run.refill()

    def _restore_caches(self, run: Saveable, found: Found) -> None:
        """Where layout and options allow, then and now; else everything is prefilled again, with what each sequence has."""
        there = self.config.checkpoint.caches and found.state["caches"]
        if not there or found.state["layout"] != layout_of(run.rounds) or self._other_models(found):
            return
        require_sound_books(found.state, run.buffer.rollouts)
        planner, books = run.rounds.planner, found.state["books"]
        planner.actor.load_state_dict(books["actor"])
        for name, book in planner.scorers.items():
            book.load_state_dict(books[name])
        load_caches(cache_path(found.folder, self.world.rank), run.rounds)

    def _other_models(self, found: Found) -> bool:
        """Whether reference or reward model are not those that computed what is cached, as far as the checkpoint says."""
        then = found.state.get("config")
        return then is not None and frozen_models(then) != frozen_models(self._told["config"])

    def _data_now(self) -> dict[str, Any]:
        if self._data is None:
            self._data = data_state(self.config, self.prompts)
        return self._data
