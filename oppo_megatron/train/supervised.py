"""`oppo sft`, `rm` and `dpo`, from configuration to weights; a task turns rows into batches and losses.

Every rank reads all rows; a replica trains its share of a batch.  The output rank (first of the last pipeline stage) has the loss
and owns the run directory; the model's first rank writes the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch.distributed as dist

from oppo_megatron.algorithms.supervised_losses import means
from oppo_megatron.clock import by_time
from oppo_megatron.cluster.process_groups import use_once
from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SupervisedConfig
from oppo_megatron.data.prompts import RowOrder
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import BEGINNING, Passed, batches, load_rows, num_batches, read_heldout
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.mcore.context import connect_ring
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import SpanRecorder, merge_traces
from oppo_megatron.schedule.packing import Packing, balance, packing_figures
from oppo_megatron.train.logs.journal import Report
from oppo_megatron.train.logs.trackers import open_trackers
from oppo_megatron.train.memory_meter import MemoryMeter
from oppo_megatron.train.reference_pass import ReferencePass
from oppo_megatron.train.run_files import prepare_run_directory, save_role
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.saver import Saveable, Saver
from oppo_megatron.train.saving.state import Found, describe_missing, find_checkpoint, require_same_run, row_data
from oppo_megatron.train.supervised_tasks import (
    FineTuning,
    Heldout,
    MarkedPreferences,
    PairPreferences,
    Preferences,
    ProcessRewardModelling,
    RewardModelling,
    RowT,
    TakePoint,
    Task,
)


@dataclass
class SupervisedTrainer(Saveable, Generic[RowT]):
    """One rank's view of the run.  `steps`: of the whole run; `report`: on one rank.  `take_point` precedes each batch."""

    config: SupervisedConfig
    task: Task[RowT]
    rows: Sequence[RowT]
    order: RowOrder
    heldout: Heldout[RowT] | None
    trained: TrainedModel
    saver: Saver
    report: Report | None
    spans: SpanRecorder
    memory: MemoryMeter
    passed: Passed
    steps: int
    take_point: TakePoint | None

    def run(self) -> bool:
        """Train and measure; False if asked to stop, after saving."""
        config = self.config
        if self.passed.steps == 0:
            self._measure()
        for index in batches(self.order, config.batch_size, config.epochs, config.steps, self.passed):
            if self.over:  # a run that is resumed may have been
                break
            figures = self._step(index) | self.saver.take_cost()
            if self.report:
                self.report.begin_line(self.passed.steps, {"time_s": self.report.elapsed_s, **figures})
            memory = self.memory.by_rank.peak_fields() if self._measure() else {}
            if self.report:
                self.report.complete(self.passed.steps, memory)
            self.saver.look_around()
            if self.saver.due(self.passed.steps):
                self.saver.save(self)
                if self.saver.stopping and not self.over:
                    return False
        self.saver.conclude()
        self.memory.look()
        self.memory.of_all_ranks()
        if self.report:
            self.report.end(None if self.heldout is None else self.heldout.describe_end())
        return True

    @property
    def over(self) -> bool:
        return self.passed.steps >= self.steps or (self.heldout is not None and self.heldout.over)

    @property
    def position(self) -> Position:
        return Position(self.passed.steps)

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        return {"model": self.trained}

    @property
    def note(self) -> Callable[[str], None] | None:
        return None if self.report is None else self.report.note

    def finish_step(self) -> None:
        self.memory.of_all_ranks()

    def state_dict(self) -> dict[str, Any]:
        assert self.report is not None
        return {
            "done": self.passed.steps,
            "rows": self.passed.rows,
            "updates": self.trained.updates,
            "elapsed_s": self.report.elapsed_s,
            "heldout": self.report.heldout.state_dict(),
            "early_stop": None if self.heldout is None else self.heldout.state_dict(),
        }

    def restore(self, found: Found) -> None:
        self.saver.load(self, found)
        if self.heldout is not None:
            self.heldout.load_state_dict(found.state["early_stop"])
        if self.report is not None:
            self.report.heldout.load_state_dict(found.state["heldout"])

    def _measure(self) -> bool:
        step = self.passed.steps
        if self.heldout is None or not self.heldout.due(step, last=step >= self.steps):
            return False
        activity, budget = self.saver.world.activity, self.config.runtime.micro_batch_tokens
        with self.spans.span("evaluate", role="model", step=step), activity.doing(f"evaluation after step {step}"):
            figures = self.heldout.measure(self.trained, step, budget)
        self.saver.look_at(step, figures)
        self.memory.look()
        self.memory.of_all_ranks()
        if self.report:
            self.report.evaluation(step, figures)
        return True

    def _step(self, index: Sequence[int]) -> dict[str, Any]:
        start, self.passed = time.monotonic(), self.passed.step(len(index))
        step, chosen = self.passed.steps, [self.rows[i] for i in index]
        groups, device = self.trained.model.groups, next(self.trained.model.parameters()).device
        lengths, budget = [self.task.num_tokens(row) for row in chosen], self.config.runtime.micro_batch_tokens
        shares = balance(lengths, groups.dp)
        if self.take_point is not None:
            with self.spans.span("point", role="model", step=step):
                self.take_point(self.trained, chosen, step, budget)
        mine, loss = [chosen[i] for i in shares[groups.dp_rank]], partial(self.task.loss, chosen)
        activity = self.saver.world.activity
        with self.spans.span("update", role="model", step=step), activity.doing(f"update, step {step}"):
            report = self.trained.step(self.task.micro_batches(mine, budget, device), loss)
        packing = Packing.of([[lengths[i] for i in share] for share in shares], budget)
        self.spans.flush()
        step_s, num_tokens = time.monotonic() - start, sum(lengths)
        return {
            "step_s": step_s,
            **means(report.stats),
            "tokens": num_tokens,
            "tokens_per_s": num_tokens / step_s,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            **packing_figures([packing]),
        }


def task_of(config: SupervisedConfig) -> Task[Any]:
    if isinstance(config, DPOConfig):
        return PairPreferences(config) if config.of_pairs else MarkedPreferences(config)
    if isinstance(config, RewardModelConfig):
        return RewardModelling() if config.of_pairs else ProcessRewardModelling()
    return FineTuning()


def train_supervised(config: SupervisedConfig, task: Task[RowT], world: World, preemption: Preemption) -> bool:
    """Train and write weights; False if asked to stop.  Raises ConfigError, DataError or CheckpointError for wrong input."""
    layout = config.parallel
    if world.size != layout.num_ranks:
        context = "" if layout.cp == 1 else f" x parallel.cp {layout.cp}"
        raise ConfigError(
            f"{world.size} ranks were started, but parallel.tp {layout.tp} x parallel.pp {layout.pp} x parallel.dp "
            f"{layout.dp}{context} needs exactly {layout.num_ranks}; start {layout.num_ranks}, or change the layout"
        )
    groups = build_groups(range(world.size), layout.tp, layout.pp, "model", cp=layout.cp, ep=layout.ep)
    assert groups is not None, "every rank of the world is one of the model's"
    use_once([None, *groups.made], world.device)  # held-out figures use the world's
    connect_ring(groups, world.device)
    tokenizer = load_tokenizer(config.tokenizer, config.model.checkpoint)
    problems: list[str] = []
    for name, model in config.models.items():  # by config.json alone
        problems += check_shape(name, read_hf_config(model), config.parallel, config.max_tokens, tokenizer.vocab_size)
    if problems:
        raise ConfigError(problems)
    with ExitStack() as stack:
        trainer = _build(config, task, tokenizer, groups, world, preemption, stack)
        if not trainer.run():
            return False

        def save(folder: Path) -> None:
            with trainer.spans.span("save", role="model", step=trainer.passed.steps):
                save_role(trainer.trained.chunks, folder, tokenizer, config.model.checkpoint)

        trainer.saver.finish(trainer, save)
        trainer.spans.flush()
        dist.barrier()  # the weights and every rank's trace are whole
        if trainer.report:
            merge_traces(config.run_dir)
            trainer.report.write_summary(task.title, trainer.memory.by_rank, trainer.saver.best)
    return True


def _build(
    config: SupervisedConfig, task: Task[RowT], tokenizer: Tokenizer, groups: RoleGroups, world: World, preemption: Preemption,
    stack: ExitStack,
) -> SupervisedTrainer[RowT]:  # fmt: skip
    run, is_owner = RunDirectory(config.run_dir), world.rank == groups.output_rank
    stack.enter_context(run.held() if is_owner else nullcontext())
    quarantine, evaluation = Quarantine(progress=by_time(is_owner=is_owner)), config.evaluation
    read = partial(load_rows, config, tokenizer=tokenizer, quarantine=quarantine)
    rows, held = read_heldout(evaluation, config.seed, read(config.data), read)
    take_point = partial(task.take_point, world) if isinstance(task, MarkedPreferences) else None
    heldout = None
    if evaluation is not None:
        heldout = Heldout(evaluation, config.early_stop, task, held, config.metrics, world, take_point)
        held = held.at(range(len(heldout.rows)))

    saver = Saver(config, world, preemption, lambda: row_data(config, rows), {"kind": task.title, "reference": None})
    found, start = find_checkpoint(config, world), [describe_missing(config.run_dir)] if config.resume else []
    began, before_s = BEGINNING, 0.0
    if found is not None:
        began, before_s = Passed(found.state["done"], found.state["rows"]), found.state["elapsed_s"]
    order = RowOrder(rows.sources, config.seed, config.data.shuffle)
    steps = num_batches(order, config.batch_size, config.epochs, config.steps, began)
    if found is not None:  # before any file of the run is touched
        _require_same_run(found, saver, config, steps)
        start = saver.describe(found)
        dist.barrier()  # no rank reads the directory any more
    prepare_run_directory(config, world, None if found is None else found.state, quarantine, owner=is_owner)
    trackers = open_trackers(config.logging, run) if is_owner else None  # may refuse to begin
    spans, memory = SpanRecorder(world.rank, run if config.logging.trace else None), MemoryMeter.begin(world.device)
    if report := trackers and Report(config, steps, task.title, world.device, trackers, before_s):
        stack.enter_context(report)
        report.begin(start, rows, held, quarantine)

    options: Any = {"head": task.head, "role": "model", "max_length": config.max_tokens, "device": world.device}

    def load(model: ModelConfig) -> RoleModel:
        loaded = load_role(model, groups, **options)
        loaded.register_forward_pre_hook(lambda *_: world.activity.beat())  # a micro-batch is a sign of life
        return loaded

    with spans.span("load", role="model", step=0):
        if isinstance(config, DPOConfig) and isinstance(task, Preferences):
            note = report.note if report else lambda text: None
            reference = ReferencePass(config, task.reference, world, groups.output_rank, note)
            if found is not None:
                _require_same_reference(found, reference.fingerprint)
            saver.extra["reference"] = reference.fingerprint
            model = reference.make(task.all_answers(config, rows, held, began), load)
        else:
            model = load(config.model)
    trained = TrainedModel(model, config.optimizer, steps)
    trainer = SupervisedTrainer(
        config, task, rows, order, heldout, trained, saver, report, spans, memory, began, steps, take_point
    )
    if found is not None:
        trainer.restore(found)
    return trainer


def _require_same_run(found: Found, saver: Saver, config: SupervisedConfig, steps: int) -> None:
    kind, done = found.state["kind"], found.state["done"]
    if kind != saver.extra["kind"]:
        raise CheckpointError(
            f"{found.folder} is of a {kind} run, and this is a {saver.extra['kind']} run; resume with the configuration that "
            "it began with, or choose another run_dir"
        )
    require_same_run(found, saver.data, config, noun="rows")
    if steps < done or (steps == done and saver.run_dir.finished):
        raise CheckpointError(
            f"{found.folder} is after {done} steps, and epochs and steps ask for no more than {steps}: there is "
            "nothing to train; raise them to continue, or choose another run_dir"
        )


def _require_same_reference(found: Found, fingerprint: str) -> None:
    began = found.state["reference"]
    if began is not None and began != fingerprint:
        raise CheckpointError(
            f"the reference (its weights, shape, type or adapters) is not the one of the run of {found.folder}: "
            f"fingerprint {fingerprint[:12]}, not {began[:12]}; resume with the same `reference` and `model`, or "
            "start a new run in another run_dir"
        )
