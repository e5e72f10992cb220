"""`oppo sft` and `oppo rm`: one training loop; a task says how rows become micro-batches and what their loss is.

Every rank reads all rows, and a replica trains its share of each batch.  The model's output rank (first of the last
pipeline stage) has the loss, so it alone owns the run directory; the weights in it are written by the model's first rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from oppo_megatron.algorithms.supervised import means
from oppo_megatron.config.checkpoint import read_hf_config
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import RewardModelConfig, SFTConfig, SupervisedConfig
from oppo_megatron.config.shape import check_shape
from oppo_megatron.data.rows import Quarantine
from oppo_megatron.data.supervised import BEGINNING, Passed, batches
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer
from oppo_megatron.errors import ConfigError
from oppo_megatron.runtime.activity import Activity
from oppo_megatron.runtime.batch import MicroBatch
from oppo_megatron.runtime.exhaustion import Allowances, in_smaller_ones
from oppo_megatron.runtime.mcore.groups import RoleGroups, build_groups
from oppo_megatron.runtime.mcore.model import Head, RoleModel
from oppo_megatron.runtime.mcore.training import Loss, StepReport, TrainedModel
from oppo_megatron.runtime.roles import load_role
from oppo_megatron.runtime.vocab_shards import VocabShards
from oppo_megatron.runtime.world import World, open_world
from oppo_megatron.schedule.packing import Packing, balance, packing_figures
from oppo_megatron.train.hosts import share_run_directory
from oppo_megatron.train.liveness.watching import watched
from oppo_megatron.train.logs.supervised import Report, summary
from oppo_megatron.train.logs.trace import SpanRecorder, merge_traces
from oppo_megatron.train.logs.trackers import open_trackers
from oppo_megatron.train.memory import require_memory
from oppo_megatron.train.reward_model import RewardModelling
from oppo_megatron.train.run_dir import RunDirectory, write_json
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.supervised import FoundSupervised, SupervisedSaver, find_supervised
from oppo_megatron.train.saving.telling import tell_of_nothing
from oppo_megatron.train.sft import FineTuning
from oppo_megatron.train.weights import save_role

RowT = TypeVar("RowT", bound=tuple[list[int], ...])


class Task(Protocol[RowT]):
    """What tells one kind of supervised training from another."""

    title: str
    head: Head

    def load(self, config: SupervisedConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> list[RowT]: ...

    def num_tokens(self, row: RowT) -> int:
        """Tokens that the model reads of a row."""
        ...

    def micro_batches(self, rows: Sequence[RowT], budget: int, device: torch.device) -> list[MicroBatch]: ...

    def loss(self, rows: Sequence[RowT], vocab: VocabShards) -> Loss:
        """Mean loss of the batch `rows`; its statistics are sums with their `count`."""
        ...


def run_sft(config: SFTConfig) -> bool:
    """Fine-tune a causal LM on completions.  Called on every rank; see `train_supervised`."""
    return _run(config, FineTuning())


def run_reward_model(config: RewardModelConfig) -> bool:
    """Train a scalar head and the model below it on preferences.  Called on every rank; see `train_supervised`."""
    return _run(config, RewardModelling())


def _run(config: SupervisedConfig, task: Task[RowT]) -> bool:
    preemption = Preemption(config.preempt)
    with (
        open_world(config.runtime) as world,
        watched(world, config.stall, config.run_dir, task.title),
        preemption.listening(),
    ):
        require_memory(config, world)
        return train_supervised(config, task, world, preemption)


def train_supervised(config: SupervisedConfig, task: Task[RowT], world: World, preemption: Preemption) -> bool:
    """Train, then write weights and summary into `config.run_dir`; False where it was told to stop before, and saved.

    Raises, before the model is built, ConfigError (number of ranks, shape, tokenizer, a run directory that holds a
    finished run), DataError, or CheckpointError for a checkpoint that this run cannot go on from; then CheckpointError for
    weights that do not fit, NumericsError for a gradient that is not finite.
    """
    groups = _build_groups(config, world)
    tokenizer = load_tokenizer(config.tokenizer, config.model.checkpoint)
    _check_model(config, tokenizer)
    run, quarantine, is_owner = RunDirectory(config.run_dir), Quarantine(), world.rank == groups.output_rank
    with ExitStack() as stack:
        if is_owner:
            stack.enter_context(run.held())
        rows = task.load(config, tokenizer, quarantine)
        saver = SupervisedSaver(config, task.title, world, rows, preemption)
        found, start = _continued(config, saver, world)
        if is_owner:
            _prepare(config, run, found, quarantine)
        share_run_directory(run, world, owner=is_owner, show=config.logging.console != "off")
        trackers = open_trackers(config.logging, run) if is_owner else None  # may refuse to begin
        spans = SpanRecorder(world.rank, run if config.logging.trace else None)
        with spans.span("load", role="model", step=0):
            model = _load(config, task.head, groups, world)
        began, before_s = (BEGINNING, 0.0) if found is None else (found.passed, found.state["elapsed_s"])
        steps = saver.num_steps(began)
        report = trackers and Report(config, task.title, steps, trackers, stack, before_s)
        if report:
            report.begin(start, rows, quarantine)
        trained = TrainedModel(model, config.optimizer, steps)
        model.register_forward_pre_hook(lambda *_: world.activity.beat())  # a micro-batch is a sign of life
        if found is not None:
            saver.restore(trained, found)
        taken = _steps(config, task, rows, trained, spans, world.activity, began)
        passed = _train(taken, trained, saver, report, began, steps)
        if passed.steps < steps:
            return False
        with spans.span("save", role="model", step=steps), world.activity.doing("writing weights"):
            save_role(model, run.weights, tokenizer, config.model.checkpoint)
        saver.save_end(trained, passed, report)
        spans.flush()
        dist.barrier()  # the weights and every rank's trace are whole
        if is_owner:
            merge_traces(run)
            write_json(run.summary, summary(run, task.title, rows, len(quarantine)))
    return True


def _train(
    taken: Iterator[tuple[Passed, dict[str, Any]]],
    trained: TrainedModel,
    saver: SupervisedSaver,
    report: Report | None,
    passed: Passed,
    steps: int,
) -> Passed:
    """Make the steps and save them; where the run comes to before it ends, or is told to stop."""
    for passed, figures in taken:
        if report:
            report.step(passed.steps, figures, saver.take_cost())
        saver.look_around()
        if saver.due(passed.steps):
            saver.save(trained, passed, report)
            if saver.stopping and passed.steps < steps:
                break
    saver.conclude()
    return passed


def _continued(
    config: SupervisedConfig, saver: SupervisedSaver, world: World
) -> tuple[FoundSupervised | None, list[str]]:
    """The checkpoint that the run goes on from, and what is said of that; nothing of the run has been touched."""
    found = find_supervised(config, world)
    if found is None:
        return None, [tell_of_nothing(config.run_dir)] if config.checkpoint.resume else []
    saver.require_same_run(found)
    start = saver.describe(found)
    dist.barrier()  # no rank looks at the directory any more
    return found, start


def _prepare(
    config: SupervisedConfig, run: RunDirectory, found: FoundSupervised | None, quarantine: Quarantine
) -> None:
    """The run directory, by the rank that owns it."""
    if found is None:
        run.prepare()
    else:
        run.reopen(found.state["done"], found.state["saved_at"])
    dump_config(config, run.config)
    if quarantine:
        quarantine.write(run.quarantine)


def _load(config: SupervisedConfig, head: Head, groups: RoleGroups, world: World) -> RoleModel:
    layers, length = config.runtime.layers, config.max_tokens
    return load_role(config.model, groups, head=head, max_length=length, device=world.device, layers=layers)


def _build_groups(config: SupervisedConfig, world: World) -> RoleGroups:
    layout = config.parallel
    if world.size != layout.num_ranks:
        raise ConfigError(
            f"{world.size} ranks were started, but parallel.tp {layout.tp} x parallel.pp {layout.pp} x parallel.dp "
            f"{layout.dp} needs exactly {layout.num_ranks}; start {layout.num_ranks}, or change the layout"
        )
    groups = build_groups(range(world.size), layout.tp, layout.pp, "model")
    assert groups is not None, "every rank of the world is one of the model's"
    return groups


def _check_model(config: SupervisedConfig, tokenizer: Tokenizer) -> None:
    """The shape, from config.json alone, against the layout, the longest row and what the tokenizer really gives."""
    shape = read_hf_config(config.model)
    if problems := check_shape("model", shape, config.parallel, config.max_tokens, tokenizer.vocab_size):
        raise ConfigError(problems)


def _steps(
    config: SupervisedConfig,
    task: Task[RowT],
    rows: Sequence[RowT],
    trained: TrainedModel,
    spans: SpanRecorder,
    activity: Activity,
    passed: Passed,
) -> Iterator[tuple[Passed, dict[str, Any]]]:
    """Make the optimizer steps of the run that are left; how far it is after each, and its figures."""
    groups, device = trained.model.groups, next(trained.model.parameters()).device
    allowance = Allowances().train
    order = batches(
        len(rows), config.batch_size, config.seed, config.epochs, config.max_steps, config.data.shuffle, passed
    )
    for index in order:
        start, passed = time.monotonic(), passed.step(len(index))
        step = passed.steps
        chosen = [rows[i] for i in index]
        lengths = [task.num_tokens(row) for row in chosen]
        shares, budget = balance(lengths, groups.dp), config.runtime.micro_batch_tokens
        mine, loss = [chosen[i] for i in shares[groups.dp_rank]], task.loss(chosen, trained.model.vocab)

        def make(most: int, mine: list[RowT] = mine, loss: Loss = loss) -> StepReport:
            return trained.step(task.micro_batches(mine, most, device), loss)

        with spans.span("update", role="model", step=step), activity.doing(f"update, step {step}"):
            report = in_smaller_ones(make, budget, allowance, trained.begun, trained.bound_to_peers)
        packing = Packing.of([[lengths[i] for i in share] for share in shares], allowance.within(budget))
        spans.flush()
        step_s, num_tokens = time.monotonic() - start, sum(lengths)
        yield (
            passed,
            {
                "step_s": step_s,
                **means(report.stats),
                "tokens": num_tokens,
                "tokens_per_s": num_tokens / step_s,
                "lr": report.lr,
                "grad_norm": report.grad_norm,
                **packing_figures([packing]),
            },
        )
