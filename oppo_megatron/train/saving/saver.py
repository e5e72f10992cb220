"""The checkpoints of `oppo train` (`Saver`) and of supervised training (`SupervisedSaver`)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence, Set
from functools import cached_property
from typing import Any

import torch.distributed as dist

from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import batch_rows, members
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.data.supervised_rows import Passed, num_batches
from oppo_megatron.errors import CheckpointError
from oppo_megatron.overcommit.ahead import (
    Ahead,
    require_bounded_deferrals,
    require_prompts,
    require_resumable,
    require_work,
)
from oppo_megatron.train.run_state import RunState
from oppo_megatron.train.saving.caches import CacheContents, gather_caches, load_caches, require_sound_books
from oppo_megatron.train.saving.keeper import CheckpointKeeper, Saveable
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.resuming import Found
from oppo_megatron.train.saving.state import (
    books_state,
    frozen_models,
    make_rollouts,
    require_same_adapters,
    require_same_data,
    rollout_lines,
    source_state,
)
from oppo_megatron.train.saving.writing import ROLLOUTS, cache_path


class Saver(CheckpointKeeper[RunState]):
    """One rank's part.  Calls are collective of the world except `due`, `take_cost` and `told_to_stop`."""

    def __init__(self, config: TrainConfig, world: World, prompts: PromptSet, preemption: Preemption):
        super().__init__(config, world, preemption)
        self.config, self.prompts = config, prompts
        self.sources = source_state(config)

    @cached_property
    def data(self) -> dict[str, Any]:
        return {
            "seed": self.config.seed,
            "shuffle": self.config.data.shuffle,
            "rows": len(self.prompts),
            "fingerprint": self.prompts.fingerprint(),
            "group_size": self.config.rollout.group_size,
            "greedy": self.config.algorithm.greedy,
        }

    def caches(self, run: RunState, *, copied: bool) -> CacheContents | None:
        return gather_caches(run.rounds, copied=copied) if self.config.checkpoint.caches else None

    def texts(self, run: RunState) -> dict[str, str]:
        return super().texts(run) | {ROLLOUTS: "".join(rollout_lines(run.buffer.rollouts))}

    def state(self, run: RunState) -> dict[str, Any]:
        books = books_state(run.rounds)
        return super().state(run) | books | {"caches": self.config.checkpoint.caches, "sources": self.sources}

    def on_complete(self, run: RunState) -> Callable[[], None]:
        place = run.position.name, run.admitted

        def note() -> None:
            run.rollbacks.checkpoint = place

        return note

    def told_to_stop(self, group: dist.ProcessGroup) -> bool:
        """True if a rank of the actor was asked to stop; called before a round on these ranks, whose chunk informs the others."""
        return self.preemption.agreed(group, self.world.activity)

    def meet(self, step: int, reward: float) -> None:
        """Look around while all ranks meet for the scores of a step, with mean `reward`."""
        if self.standard is not None and self.standard.metric == REWARD:
            self.measured(step, reward)
        self.look_around()

    def require_same_run(self, found: Found, left_out: Set[int]) -> Ahead:
        """Return the rest of a checkpoint's run under the present configuration, without the positions `left_out` of the stream.

        Raises CheckpointError if prompts, their order or adapters differ, if the run had more steps or passes, if it has ended
        and nothing is left to train, and if rollouts in flight could not be trained within `overlap.max_staleness`.
        """
        require_same_data(found.state["data"], self.data)
        require_same_adapters(found.state["adapters"], self.adapters)
        ahead = found.ahead(left_out)
        require_resumable(ahead.done, self.config.steps)
        a_pass, passes = self.prompts.rollouts_per_pass, self.config.passes
        most = None if passes is None else passes * a_pass
        require_prompts(ahead, most, a_pass)
        if self.run_dir.finished:
            require_work(ahead, self.config.steps, most, batch_rows(self.config))
        if ahead.done != self.config.steps:
            rollout, held = self.config.rollout, found.held(left_out)
            deferrals = [line["deferrals"] for line in held[:: members(self.config).size]]
            groups = rollout.batch_size // rollout.group_size
            require_bounded_deferrals(deferrals, groups, rollout.group_size, self.config.overlap.max_staleness)
        return ahead

    def restore(self, run: RunState, found: Found) -> None:
        """Continue from a checkpoint.  Raises CheckpointError for other data, models or a damaged file."""
        rollbacks = run.rollbacks
        self.require_same_run(found, rollbacks.left_out)
        self.load(run.models, found)
        run.publish()
        stream = PromptStream(self.prompts, self.config.seed, shuffle=self.config.data.shuffle)
        held = make_rollouts(found.held(rollbacks.left_out), stream)
        run.load_state_dict(found.state, held)
        rollbacks.checkpoint = found.folder.name, found.position
        lost = len(held) < len(found.rollouts)
        if not lost:
            self._restore_caches(run, found)
        if run.within_step and (lost or len(run.buffer) < run.buffer.target):  # the batch may also be larger now
            run.refill()

    def _restore_caches(self, run: RunState, found: Found) -> None:
        """Load books and caches if layouts, models and options then and now allow; else all sequences are prefilled again."""
        saved = self.config.checkpoint.caches and found.state["caches"]
        if not saved or found.state["layout"] != books_state(run.rounds)["layout"]:
            return
        if frozen_models(found.state["config"]) != frozen_models(self.settings):
            return
        require_sound_books(found.state, run.buffer.rollouts)
        planner, books = run.rounds.planner, found.state["books"]
        planner.actor.load_state_dict(books["actor"])
        for name, book in planner.scorers.items():
            book.load_state_dict(books[name])
        load_caches(cache_path(found.folder, self.world.rank), run.rounds)


class SupervisedSaver(CheckpointKeeper[Saveable]):
    """One rank's part.  `reference` is the fingerprint of the model that preferences are compared with."""

    def __init__(
        self,
        config: SupervisedConfig,
        kind: str,
        world: World,
        rows: Sequence[tuple[list[Any], ...]],
        preemption: Preemption,
    ):
        super().__init__(config, world, preemption)
        self.config, self.kind, self.rows = config, kind, rows
        self.reference: str | None = None

    @cached_property
    def data(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for part in (part for row in self.rows for part in row):
            code = "d" if any(isinstance(value, float) for value in part) else "q"
            digest.update(len(part).to_bytes(8, "little") + array(code, part).tobytes())
        config = self.config
        return {
            "seed": config.seed,
            "shuffle": config.data.shuffle,
            "rows": len(self.rows),
            "fingerprint": digest.hexdigest(),
        }

    def state(self, run: Saveable) -> dict[str, Any]:
        return super().state(run) | {"kind": self.kind, "reference": self.reference}

    def num_steps(self, passed: Passed) -> int:
        """Return the steps of the whole run, after `passed` of them."""
        config = self.config
        return num_batches(len(self.rows), config.batch_size, config.epochs, config.steps, passed)

    def require_same_run(self, found: Found) -> None:
        """Raises CheckpointError if kind, rows or adapters of the checkpoint differ, or nothing is left to train."""
        state = found.state
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"{found.folder} is of a run of `oppo {state['kind']}`; resume it with that, or choose another run_dir"
            )
        require_same_data(state["data"], self.data, noun="rows")
        require_same_adapters(state["adapters"], self.adapters)
        steps = self.num_steps(found.passed)
        if steps < state["done"] or (steps == state["done"] and self.run_dir.finished):
            raise CheckpointError(
                f"{found.folder} is after {state['done']} steps, and epochs and steps ask for no more than {steps}: there is "
                "nothing to train; raise them to continue, or choose another run_dir"
            )

    def compare(self, reference: str | None, found: Found | None) -> None:
        """Set the fingerprint of the reference.  Raises CheckpointError if the checkpoint's run had another."""
        began = None if found is None else found.state["reference"]
        if found is not None and began is not None and began != reference:
            raise CheckpointError(
                f"the reference (its weights, shape, type or adapters) is not the one of the run of {found.folder}: "
                f"fingerprint {(reference or 'none')[:12]}, not {began[:12]}; resume with the same `reference` and `model`, or "
                "start a new run in another run_dir"
            )
        self.reference = reference
