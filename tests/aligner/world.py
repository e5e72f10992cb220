"""Everything a NeMo-Aligner training script passes to its trainer, small; a record of what was trained; and NeMo's own checkpoint
callback over a stand-in for Lightning's trainer, which saves folders, as distributed checkpoints are."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from nemo.utils.callbacks import NeMoModelCheckpoint
from nemo.utils.model_utils import ckpt_to_dir
from nemo_aligner.algorithms.ppo import PPOTrainer as Theirs
from nemo_aligner.data.nlp.builders import build_dataloader, collate_with_pad_to_max_batch
from nemo_aligner.utils.batch_iterators import get_batch_iterator_cls
from nemo_aligner.utils.server_utils import FutureResult
from nemo_aligner.utils.train_script_utils import add_custom_checkpoint_callback
from nemo_aligner.utils.utils import extract_value_from_ckpt
from omegaconf import OmegaConf

from oppo_megatron.integrations.nemo_aligner import PPOTrainer
from tests.aligner import actor as actors
from tests.aligner.actor import EOS, actor_config, start_megatron
from tests.aligner.job import Job

DIGITS, FIRST = 8, 4  # a prompt begins with its index in base 8, by tokens 4..11
KEYS = ("step", "consumed_samples", "epoch", "ppo_optimization_step")


class Prompts(torch.utils.data.Dataset):
    """Prompt `i` is its own index and up to three tokens more."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        head = [FIRST + index // DIGITS, FIRST + index % DIGITS]
        tokens = torch.tensor(head + [20 + (index * k) % 7 for k in range(1, 1 + index % 4)])
        return {"text": tokens, "length": len(tokens), "loss_multiplier": True}


def index_of(tokens: torch.Tensor) -> int:
    return int((tokens[0] - FIRST) * DIGITS + tokens[1] - FIRST)


@dataclass
class Critic:
    """Rewards and values that are functions of the tokens; remembers what it was asked and trained with."""

    trained: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    endings: list[list[int]] = field(default_factory=list)
    saved: int = 0

    def infer_rm_critic(self, rollout: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, lengths = rollout["response_tokens"], rollout["response_lengths"]
        inside = torch.arange(tokens.size(1)) < lengths[:, None]
        rewards = ((tokens % 2 == 0) & inside).float().sum(-1) / lengths
        self.rewards += rewards.tolist()
        rows = zip(tokens.tolist(), rollout["prompt_lengths"].tolist(), lengths.tolist(), strict=True)
        self.endings += [[i - length for i in range(first, length) if row[i] == EOS] for row, first, length in rows]
        return rewards, torch.where(inside, (tokens % 5).float() / 10, 0.0)[:, 1:]

    def train(self, data: Mapping[str, torch.Tensor]) -> None:
        self.trained.append([index_of(row) for row in data["response_tokens"]])

    def save(self) -> Any:
        self.saved += 1
        return Done()


class Done(FutureResult):
    def result(self) -> None:
        return None


class Log:
    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict[str, Any]]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        self.rows.append((prefix, step, dict(metrics)))

    def log_table(self, key: str, dataframe: Any, step: int) -> None:
        pass

    def finalize(self) -> None:
        pass

    def of(self, prefix: str) -> list[dict[str, Any]]:
        return [metrics for found, _, metrics in self.rows if found == prefix]


class Timer:
    """`stop_after` steps; None: never."""

    def __init__(self, stop_after: int | None):
        self.left = stop_after

    def start_time(self) -> None:
        pass

    def is_finished(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left == 0


class Lightning:
    """The parts of Lightning's trainer, and of its strategy, that the callback uses."""

    fast_dev_run, val_check_interval, global_step = False, 0, 0

    def __init__(self, actor: Any, callbacks: list[Any], ckpt_path: str | None):
        self.actor, self.callbacks, self.ckpt_path, self.loggers = actor, callbacks, ckpt_path, []
        self.strategy, self.is_global_zero = self, dist.get_rank() == 0

    def save_checkpoint(self, path: str, weights_only: bool = False, storage_options: Any = None) -> None:
        folder = Path(ckpt_to_dir(path))
        folder.mkdir(parents=True, exist_ok=True)
        if parallel_state.get_data_parallel_rank() == 0:
            torch.save(self.actor.model.state_dict(), folder / weights_name())
        dist.barrier()

    def remove_checkpoint(self, path: str) -> None:
        if self.is_global_zero:
            shutil.rmtree(ckpt_to_dir(path))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision

    def broadcast(self, value: Any, src: int = 0) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=src)
        return values[0]

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()


def weights_name() -> str:
    return f"stage-{parallel_state.get_pipeline_model_parallel_rank()}-{parallel_state.get_tensor_model_parallel_rank()}.pt"


def callback_of(folder: Path, n_resume: bool = False) -> NeMoModelCheckpoint:
    """Make NeMo's callback as `exp_manager` does; it keeps the first two checkpoints and the last."""
    name = "tiny-" + "-".join(f"{{{key}}}" for key in KEYS)
    callback = NeMoModelCheckpoint(
        n_resume=n_resume, dirpath=str(folder / "checkpoints"), filename=name, monitor="step", mode="min", save_top_k=2,
        save_last=True, save_nemo_on_train_end=False,
    )  # fmt: skip
    callback.CHECKPOINT_NAME_LAST = f"{name}-last"
    return callback


def attach(job: Job, actor: Any) -> Any:
    """Give the script's `ckpt_callback`; the actor gets the trainer that it is restored by."""
    callbacks = [callback_of(job.folder)] if job.checkpoints else []
    path = None if job.resume is None else checkpoint_of(job.resume_from or job.folder, job.resume)
    actor._trainer = Lightning(actor, callbacks, path)
    return add_custom_checkpoint_callback(actor._trainer, actor)


def checkpoint_of(folder: Path, step: int) -> str:
    return str(min((folder / "checkpoints").glob(f"*-step={step}-*")))


def restore(actor: Any) -> dict[str, int]:
    path = actor.trainer.ckpt_path
    actor.model.load_state_dict(torch.load(Path(path) / weights_name(), weights_only=True))
    return {key: extract_value_from_ckpt(key, path) for key in KEYS}


def _loader(job: Job, dataset: Prompts, consumed_samples: int, random: bool) -> Any:
    cfg = OmegaConf.create({"model": {"seed": 11, "data": {"num_workers": 0}}})
    return build_dataloader(
        cfg, dataset, consumed_samples, mbs=job.micro, gbs=job.batch, load_gbs=False, use_random_sampler=random,
        collate_fn=lambda rows: rows,
    )  # fmt: skip


def arguments(job: Job) -> Iterator[tuple[str, Any]]:
    actor = getattr(actors, job.model)(actor_config(job.micro, job.batch, job.max_length, job.greedy))
    cfg = job.trainer_config()
    yield "cfg", cfg
    yield "model", actor
    yield "optimizer", actor._optimizer
    yield "scheduler", torch.optim.lr_scheduler.ConstantLR(actor._optimizer, 1.0)
    yield "train_dataloader_builder", partial(_loader, job, Prompts(job.prompts), random=job.random_sampler)
    yield "val_dataloader_builder", partial(_loader, job, Prompts(job.batch), random=False)
    data = OmegaConf.create({"model": {"data": {}}})
    yield "collate_fn", collate_with_pad_to_max_batch(job.max_length, EOS, data, generate_masks_and_position_ids=False)
    yield "rm_critic", Critic()
    yield "batch_iterator_cls", get_batch_iterator_cls(cfg.batch_iterator)
    yield "logger", Log()
    yield "ckpt_callback", attach(job, actor)
    yield "run_timer", Timer(job.stop_after)


def started(job: Job) -> dict[str, Any]:
    start_megatron(job.micro, job.batch, job.seed, job.pp, job.tp)
    given = dict(arguments(job))
    torch.manual_seed(job.seed + parallel_state.get_data_parallel_rank())
    return given


def build(job: Job, **changes: Any) -> tuple[Any, dict[str, Any]]:
    given = started(job) | changes
    trainer = (Theirs if job.oppo is None else PPOTrainer)(**given)
    if job.resume is not None:
        trainer.load_state_dict(restore(given["model"]))
    return trainer, given
