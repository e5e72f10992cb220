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
from oppo_megatron.data.supervised import batches, num_batches, num_duplicates
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
from oppo_megatron.train.logs.console import Progress
from oppo_megatron.train.logs.metrics_log import MetricsLog, read_metrics
from oppo_megatron.train.logs.trace import SpanRecorder, merge_traces
from oppo_megatron.train.logs.trackers import Tracker, open_trackers
from oppo_megatron.train.memory import require_memory
from oppo_megatron.train.reward_model import RewardModelling
from oppo_megatron.train.run_dir import RunDirectory, write_json
from oppo_megatron.train.sft import FineTuning
from oppo_megatron.train.weights import save_role

RowT = TypeVar("RowT")


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


def run_sft(config: SFTConfig) -> None:
    """Fine-tune a causal LM on completions.  Called on every rank; see `train_supervised`."""
    with open_world(config.runtime) as world, watched(world, config.stall, config.run_dir, "sft"):
        require_memory(config, world)
        train_supervised(config, FineTuning(), world)


def run_reward_model(config: RewardModelConfig) -> None:
    """Train a scalar head and the model below it on preferences.  Called on every rank; see `train_supervised`."""
    with open_world(config.runtime) as world, watched(world, config.stall, config.run_dir, "rm"):
        require_memory(config, world)
        train_supervised(config, RewardModelling(), world)


def train_supervised(config: SupervisedConfig, task: Task[RowT], world: World) -> None:
    """Train, then write weights and summary into `config.run_dir`.

    Raises, before the model is built, ConfigError (number of ranks, shape, tokenizer, a run directory that holds a
    finished run) or DataError; then CheckpointError for weights that do not fit, NumericsError for a gradient that is
    not finite.
    """
    groups = _build_groups(config, world)
    tokenizer = load_tokenizer(config.tokenizer, config.model.checkpoint)
    _check_model(config, tokenizer)
    run, quarantine = RunDirectory(config.run_dir), Quarantine()
    is_owner = world.rank == groups.output_rank
    if is_owner:
        run.prepare()
        dump_config(config, run.config)
    rows = task.load(config, tokenizer, quarantine)
    if is_owner and quarantine:
        quarantine.write(run.quarantine)
    share_run_directory(run, world, owner=is_owner, show=config.logging.console != "off")
    trackers = open_trackers(config.logging, run) if is_owner else None  # may refuse to begin
    spans = SpanRecorder(world.rank, run if config.logging.trace else None)
    with spans.span("load", role="model", step=0):
        model = _load(config, task.head, groups, world)
    steps = num_batches(len(rows), config.batch_size, config.epochs, config.max_steps)
    with ExitStack() as stack:
        report = trackers and _Report(config, task.title, steps, run, trackers, stack)
        if report:
            report.tell_of_rows(rows, quarantine, run)
        trained = TrainedModel(model, config.optimizer, steps)
        model.register_forward_pre_hook(lambda *_: world.activity.beat())  # a micro-batch is a sign of life
        for step, figures in enumerate(_steps(config, task, rows, trained, spans, world.activity), start=1):
            if report:
                report.step(step, figures)
    with spans.span("save", role="model", step=steps):
        save_role(model, run.weights, tokenizer, config.model.checkpoint)
    spans.flush()
    dist.barrier()  # the weights and every rank's trace are whole
    if is_owner:
        merge_traces(run)
        write_json(run.summary, _summary(run, task.title, rows, len(quarantine)))


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
) -> Iterator[dict[str, Any]]:
    """Make the optimizer steps of the run; the figures of each."""
    groups, device = trained.model.groups, next(trained.model.parameters()).device
    allowance = Allowances().train
    order = batches(
        len(rows), config.batch_size, config.seed, config.epochs, config.max_steps, shuffle=config.data.shuffle
    )
    for step, index in enumerate(order, start=1):
        start = time.monotonic()
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
        yield {
            "step_s": step_s,
            **means(report.stats),
            "tokens": num_tokens,
            "tokens_per_s": num_tokens / step_s,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            **packing_figures([packing]),
        }


class _Report:
    """Figures of each step to the metrics log, the console and the trackers, until `stack` closes."""

    def __init__(
        self, config: SupervisedConfig, title: str, steps: int, run: RunDirectory, trackers: Tracker, stack: ExitStack
    ):
        self._start = time.monotonic()
        self._log = stack.enter_context(MetricsLog(run.metrics))
        self._trackers = trackers
        stack.callback(self._trackers.close)
        self._progress = stack.enter_context(Progress(config.logging.console, steps, title))

    def step(self, step: int, figures: dict[str, Any]) -> None:
        fields = {"time_s": time.monotonic() - self._start, **figures}
        self._log.write(step, fields)
        self._trackers.log(step, fields)
        self._progress.update(step, fields)

    def tell_of_rows(self, rows: Sequence[Any], quarantine: Quarantine, run: RunDirectory) -> None:
        """How the rows are read, and which are not trained on, or more than once."""
        for note in quarantine.notes:
            self._progress.note(note)
        if quarantine:
            self._progress.note(f"{len(quarantine)} rows set aside, {len(rows)} left; see {run.quarantine}")
        if duplicates := num_duplicates(rows):
            self._progress.note(f"{duplicates} of {len(rows)} rows are duplicates of others")


def _summary(run: RunDirectory, title: str, rows: Sequence[Any], num_quarantined: int) -> dict[str, Any]:
    """Final figures.  Losses (and accuracies) are of the first and of the last tenth of the steps."""
    lines = read_metrics(run.metrics)
    tenth = max(1, len(lines) // 10)
    learned = [name for name in ("loss", "accuracy", "margin") if name in lines[0]]
    ends = {"first": lines[:tenth], "last": lines[-tenth:]}
    tokens, seconds = sum(line["tokens"] for line in lines), sum(line["step_s"] for line in lines)
    return {
        "kind": title,
        "steps": len(lines),
        "rows": len(rows),
        "duplicates": num_duplicates(rows),
        "quarantined": num_quarantined,
        "time_s": lines[-1]["time_s"],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        **{
            f"{name}_{end}": sum(line[name] for line in part) / len(part)
            for name in learned
            for end, part in ends.items()
        },
    }
