"""Everything a NeMo-Aligner training script passes to its trainer, small; and a record of what was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from omegaconf import OmegaConf

from oppo_megatron.integrations.nemo_aligner import PPOTrainer
from tests.aligner import actor as actors
from tests.aligner.actor import EOS, actor_config, start_megatron
from tests.aligner.checkpoints import attach, restore
from tests.aligner.job import Job

DIGITS, FIRST = 8, 4  # a prompt begins with its index in base 8, by tokens 4..11


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
        from nemo_aligner.utils.server_utils import FutureResult

        self.saved += 1

        class Done(FutureResult):
            def result(self) -> None:
                return None

        return Done()


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


def _loader(job: Job, dataset: Prompts, consumed_samples: int, random: bool) -> Any:
    from nemo_aligner.data.nlp.builders import build_dataloader

    cfg = OmegaConf.create({"model": {"seed": 11, "data": {"num_workers": 0}}})
    return build_dataloader(
        cfg, dataset, consumed_samples, mbs=job.micro, gbs=job.batch, load_gbs=False, use_random_sampler=random,
        collate_fn=lambda rows: rows,
    )  # fmt: skip


def arguments(job: Job) -> Iterator[tuple[str, Any]]:
    from nemo_aligner.data.nlp.builders import collate_with_pad_to_max_batch
    from nemo_aligner.utils.batch_iterators import get_batch_iterator_cls

    actor = getattr(actors, job.model)(actor_config(job.micro, job.batch, job.max_length, job.greedy))
    cfg = job.trainer_config()
    yield "cfg", cfg
    yield "model", actor
    yield "optimizer", actor._optimizer
    yield "scheduler", torch.optim.lr_scheduler.ConstantLR(actor._optimizer, 1.0)
    yield "train_dataloader_builder", partial(_loader, job, Prompts(job.prompts), random=job.random_sampler)
    yield "val_dataloader_builder", partial(_loader, job, Prompts(job.batch), random=False)
    yield (
        "collate_fn",
        collate_with_pad_to_max_batch(
            job.max_length, EOS, OmegaConf.create({"model": {"data": {}}}), generate_masks_and_position_ids=False
        ),
    )
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
    from nemo_aligner.algorithms.ppo import PPOTrainer as Theirs

    given = started(job) | changes
    trainer = (Theirs if job.oppo is None else PPOTrainer)(**given)
    if job.resume is not None:
        trainer.load_state_dict(restore(given["model"]))
    return trainer, given
