"""`oppo sft`, `rm`, `prm`, `dpo` and `kto`, from the configuration to the weights.

Every rank reads all rows, and a replica trains its share of each batch.  The model's output rank (first of the last
pipeline stage) has the loss, so it alone owns the run directory; the weights in it are written by the model's first rank.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeVar

import torch.distributed as dist

from oppo_megatron.clock import by_time
from oppo_megatron.cluster.liveness.watchdog import watched
from oppo_megatron.cluster.process_groups import use_once
from oppo_megatron.cluster.world import World, open_world
from oppo_megatron.config.data import DataConfig
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.supervised import (
    DPOConfig,
    KTOConfig,
    PreferenceConfig,
    ProcessRewardModelConfig,
    RewardModelConfig,
    SupervisedConfig,
)
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised_rows import BEGINNING, read_heldout
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.shape import check_shape
from oppo_megatron.mcore.cpu import require_private_ops
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import SpanRecorder, merge_traces
from oppo_megatron.train.heldout import Heldout, Point
from oppo_megatron.train.logs.supervised_report import Report
from oppo_megatron.train.logs.trackers import open_trackers
from oppo_megatron.train.memory_meter import MemoryMeter, require_memory
from oppo_megatron.train.preference.reference_pass import ReferencePass
from oppo_megatron.train.preference.tasks import MarkedPreferences, PairPreferences, Preferences, ReferencePoint
from oppo_megatron.train.run_files import save_role, share_run_directory
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.resuming import find_checkpoint
from oppo_megatron.train.saving.saver import SupervisedSaver
from oppo_megatron.train.saving.state import describe_missing
from oppo_megatron.train.supervised_loop import SupervisedTrainer, Task
from oppo_megatron.train.supervised_tasks import FineTuning, ProcessRewardModelling, RewardModelling

RowT = TypeVar("RowT", bound=tuple[list[Any], ...])


def run_supervised(config: SupervisedConfig) -> bool:
    """Train as configured.  Called on every rank; see `train_supervised`."""
    task, preemption = task_of(config), Preemption(config.preempt_deadline_s)
    with (
        open_world(config.runtime) as world,
        watched(world, config.stall_deadline_s, config.run_dir, task.title),
        preemption.listening(),
    ):
        require_memory(config, world)
        if world.device.type == "cpu":
            require_private_ops(config.runtime, {model.dtype for model in config.models.values()})
        return train_supervised(config, task, world, preemption)


def task_of(config: SupervisedConfig) -> Task[Any]:
    """Return the task of the configuration."""
    if isinstance(config, DPOConfig):
        return PairPreferences(config)
    if isinstance(config, KTOConfig):
        return MarkedPreferences(config)
    if isinstance(config, ProcessRewardModelConfig):
        return ProcessRewardModelling()
    return RewardModelling() if isinstance(config, RewardModelConfig) else FineTuning()


def train_supervised(config: SupervisedConfig, task: Task[RowT], world: World, preemption: Preemption) -> bool:
    """Train, then write weights and summary into `config.run_dir`; False if the run was asked to stop and has saved.

    Before the model is built it raises ConfigError (number of ranks, shape, tokenizer, a run directory with a finished run),
    DataError, or CheckpointError for a checkpoint that this run cannot continue; later CheckpointError for weights that do not
    fit, NumericsError for a gradient that is not finite.
    """
    groups = _build_groups(config, world)
    tokenizer = load_tokenizer(config.tokenizer, config.model.checkpoint)
    _check_model(config, tokenizer)
    with ExitStack() as stack:
        trainer = _build(config, task, tokenizer, groups, world, preemption, stack)
        if not trainer.run():
            return False
        _write(config, trainer, tokenizer)
        dist.barrier()  # the weights and every rank's trace are whole
        if trainer.report:
            merge_traces(config.run_dir)
            trainer.report.write_summary(trainer.saver.best)
    return True


def _build(
    config: SupervisedConfig,
    task: Task[RowT],
    tokenizer: Tokenizer,
    groups: RoleGroups,
    world: World,
    preemption: Preemption,
    stack: ExitStack,
) -> SupervisedTrainer[RowT]:
    """Build everything that the steps need, new or from a checkpoint; the `stack` closes it."""
    run, is_owner = RunDirectory(config.run_dir), world.rank == groups.output_rank
    if is_owner:
        stack.enter_context(run.held())
    point = ReferencePoint(task, world) if isinstance(task, MarkedPreferences) else None
    quarantine = Quarantine(progress=by_time(is_owner=is_owner))
    rows, heldout = _load_rows(config, task, tokenizer, quarantine, world, point)
    saver = SupervisedSaver(config, task.title, world, rows, preemption)
    found, start = (
        find_checkpoint(config, world),
        [describe_missing(config.run_dir)] if config.checkpoint.resume else [],
    )
    if found is not None:  # before any file of the run is touched
        saver.require_same_run(found)
        start = saver.describe(found)
        dist.barrier()  # no rank reads the directory any more
    if is_owner:
        run.take_up(None if found is None else found.state)
        dump_config(config, run.config)
        if quarantine:
            quarantine.write(run.quarantine)
    share_run_directory(run, world, owner=is_owner, show=config.logging.console != "off")
    trackers = open_trackers(config.logging, run) if is_owner else None  # may refuse to begin
    spans, memory = SpanRecorder(world.rank, run if config.logging.trace else None), MemoryMeter.begin(world.device)
    began, before_s = (BEGINNING, 0.0) if found is None else (found.passed, found.state["elapsed_s"])
    steps, held = saver.num_steps(began), () if heldout is None else heldout.rows
    if report := trackers and Report(config, task.title, steps, world.device, trackers, stack, before_s):
        report.begin(start, rows, held, quarantine)

    def load(model: ModelConfig) -> RoleModel:
        length, layers = config.max_tokens, config.runtime.layers
        loaded = load_role(model, groups, head=task.head, max_length=length, device=world.device, layers=layers)
        loaded.register_forward_pre_hook(lambda *_: world.activity.beat())  # a micro-batch is a sign of life
        return loaded

    with spans.span("load", role="model", step=0):
        if isinstance(config, PreferenceConfig) and isinstance(task, Preferences):
            note = report.note if report else lambda text: None
            reference = ReferencePass(config, task, world, groups.output_rank, note)
            saver.compare(reference.fingerprint, found)
            model = reference.make(rows, held, began, load)
        else:
            model = load(config.model)
    trained = TrainedModel(model, config.optimizer, steps)
    trainer = SupervisedTrainer(
        config, task, rows, heldout, trained, saver, report, spans, world.activity, memory, began, steps, point
    )
    if found is not None:
        saver.load(trainer.models, found)
        trainer.load_state_dict(found.state)
    return trainer


def _load_rows(
    config: SupervisedConfig,
    task: Task[RowT],
    tokenizer: Tokenizer,
    quarantine: Quarantine,
    world: World,
    point: Point[Any] | None,
) -> tuple[list[RowT], Heldout[RowT] | None]:
    """Return the rows to train on, and the held-out rows."""

    def read(data: DataConfig) -> list[RowT]:
        return task.load(config.model_copy(update={"data": data}), tokenizer, quarantine)

    evaluation = config.evaluation
    rows, held = read_heldout(evaluation, config.seed, read(config.data), read)
    if evaluation is None:
        return rows, None
    return rows, Heldout(evaluation, config.early_stop, task, held, config.METRICS, world, point)


def _write(config: SupervisedConfig, trainer: SupervisedTrainer[RowT], tokenizer: Tokenizer) -> None:
    """Write the weights, a checkpoint to continue from, and the best step's weights."""
    run, keeps = RunDirectory(config.run_dir), config.checkpoint.writes_weights
    trained, passed, base = trainer.trained, trainer.passed, config.model.checkpoint
    with trainer.spans.span("save", role="model", step=passed.steps), trainer.activity.doing("writing weights"):
        if keeps:
            save_role(trained.chunks, run.weights, tokenizer, base)
    trainer.saver.save_end(trainer)
    with trainer.activity.doing("writing the best step's weights"):
        if keeps and trainer.saver.load_best(trainer.models, trainer.position):
            save_role(trained.chunks, run.best, tokenizer, base)
    trainer.spans.flush()


def _build_groups(config: SupervisedConfig, world: World) -> RoleGroups:
    layout = config.parallel
    if world.size != layout.num_ranks:
        raise ConfigError(
            f"{world.size} ranks were started, but parallel.tp {layout.tp} x parallel.pp {layout.pp} x parallel.dp "
            f"{layout.dp} needs exactly {layout.num_ranks}; start {layout.num_ranks}, or change the layout"
        )
    groups = build_groups(range(world.size), layout.tp, layout.pp, "model")
    assert groups is not None, "every rank of the world is one of the model's"
    use_once([None, *groups.made], world.device)  # over the world's go held-out figures
    return groups


def _check_model(config: SupervisedConfig, tokenizer: Tokenizer) -> None:
    """Check the shape, from config.json alone, against the layout, the longest row and the tokenizer's vocabulary."""
    problems: list[str] = []
    for name, model in config.models.items():
        shape = read_hf_config(model)
        problems += check_shape(name, shape, config.parallel, config.max_tokens, tokenizer.vocab_size)
    if problems:
        raise ConfigError(problems)
