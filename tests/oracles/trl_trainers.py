"""Final weights of TRL 1.12's unchanged trainers on our run's rows, or on its completions and scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen2ForTokenClassification
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.prm import PRMConfig, PRMTrainer
from trl.trainer.utils import pad

from tests.replay.loop import load

Row = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """Weights by their names in a checkpoint; loss and gradient norm of each optimizer step; the data that the trainer had."""

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    data: Dataset


def arguments(out: Path, optimizer: Mapping[str, Any], steps: int, batch_size: int) -> dict[str, Any]:
    first, second = optimizer["betas"]
    return {
        "output_dir": str(out), "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "max_steps": steps,
        "per_device_train_batch_size": batch_size, "train_sampling_strategy": "sequential", "optim": "adamw_torch",
        "adam_beta1": first, "adam_beta2": second, "adam_epsilon": optimizer["eps"], "weight_decay": optimizer["weight_decay"],
        "max_grad_norm": optimizer["clip_grad"], "learning_rate": optimizer["lr"], "lr_scheduler_type": optimizer["decay"],
    }  # fmt: skip


def tokenizer_of(directory: Path) -> Any:
    """Use the second special token for padding, which is masked everywhere."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    return tokenizer


def train_preferences(common: Row, rows: Sequence[Row], model: Path, reference: Path, tokenizer: Path, **rule: Any) -> Trained:
    """Train by `DPOTrainer` on pairs, else by `KTOTrainer` (mismatched completions: of the row before, within a batch)."""
    trainer_class, config_class = (DPOTrainer, DPOConfig) if "chosen" in rows[0] else (KTOTrainer, KTOConfig)
    trainer = trainer_class(
        load(AutoModelForCausalLM, str(model)), load(AutoModelForCausalLM, str(reference)),
        config_class(**common, max_length=None, **rule), train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer_of(tokenizer),
    )  # fmt: skip
    return _trained(trainer)


class TwoLogits(nn.Module):
    """A scalar head as one of two logits, of which the first is 0: their cross-entropy is that of the scalar's sigmoid."""

    def __init__(self, scalar: nn.Module):
        super().__init__()
        self.scalar = scalar

    def forward(self, hidden: Tensor) -> Tensor:
        logit = self.scalar(hidden)
        return torch.cat([torch.zeros_like(logit), logit], -1)


def train_steps(common: Row, rows: Sequence[Row], model: Path, tokenizer: Path, separator: str) -> Trained:
    """Train by `PRMTrainer`; the first of its two logits' heads is held at 0, so that there is one head to compare."""
    scalar = load(AutoModelForSequenceClassification, str(model))
    config = scalar.config
    config.num_labels = 2
    two = Qwen2ForTokenClassification(config)
    two.model, two.score = scalar.model, TwoLogits(scalar.score)
    trainer = PRMTrainer(
        two, PRMConfig(**common, max_length=None, step_separator=separator), train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer_of(tokenizer),
    )  # fmt: skip
    trained = _trained(trainer)
    weights = {name.replace("score.scalar.", "score."): weight for name, weight in trained.weights.items()}
    return Trained(weights, trained.losses, trained.norms, trained.data)


class Recorded:
    """The rollouts of a run, a batch at each generation; `batches` are of rows as `rollouts.jsonl` has them."""

    def __init__(self, batches: Sequence[Sequence[Row]]):
        self.left, self.rows = list(batches), []

    def completions(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        self.rows = self.left.pop(0)
        assert prompt_ids == [row["prompt_tokens"] for row in self.rows]
        return [row["tokens"] for row in self.rows]

    def scores(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        for found, row in zip(completion_ids, self.rows, strict=True):
            assert found[: len(row["tokens"])] == row["tokens"]
        return [row["reward"] for row in self.rows]


class GivenGRPO(GRPOTrainer):
    recorded: Recorded

    def _generate_single_turn(self, prompt_ids: Any, *images: Any, **more: Any) -> tuple[list[list[int]], None]:
        return self.recorded.completions(prompt_ids), None


class GivenRLOO(RLOOTrainer):
    recorded: Recorded

    def _generate_single_turn(self, prompt_ids: Any, *images: Any, **more: Any) -> list[list[int]]:
        return self.recorded.completions(prompt_ids)


def train_groups(
    common: Row, batches: Sequence[Sequence[Row]], size: int, model: Path, reference: Path, tokenizer: Path, **rule: Any
) -> Trained:
    """Train by `GRPOTrainer`, or `RLOOTrainer` if `rule` has no loss type, on consecutive groups of `size` rows."""
    trainer_class, config_class = (GivenGRPO, GRPOConfig) if "loss_type" in rule else (GivenRLOO, RLOOConfig)
    policy, recorded = load(AutoModelForCausalLM, str(model)), Recorded(batches)
    policy.config._name_or_path = str(reference)
    trainer = trainer_class(
        policy, [recorded.scores], config_class(**common, num_generations=size, shuffle_dataset=False, **rule),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for batch in batches for row in batch[::size]]),
        processing_class=tokenizer_of(tokenizer),
    )  # fmt: skip
    return _trained_on(recorded, trainer)


class GivenOnlineDPO(OnlineDPOTrainer):
    recorded: Recorded

    def _generate(self, model: Any, prompts: list[str], images: Any = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prompts and completions with their masks: the first response to every prompt, then the second to every prompt."""
        prompt_ids = self.processing_class(text=prompts * 2)["input_ids"]
        completion_ids = self.recorded.completions(prompt_ids)
        return *self._padded(prompt_ids, "left"), *self._padded(completion_ids, "right")

    def _padded(self, rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
        ids = pad([torch.tensor(row) for row in rows], self.processing_class.pad_token_id, side)
        return ids, pad([torch.ones(len(row), dtype=torch.long) for row in rows], 0, side)


def train_online_pairs(
    common: Row, batches: Sequence[Sequence[Row]], model: Path, reference: Path, tokenizer: Path, **rule: Any
) -> Trained:
    """Train by `OnlineDPOTrainer`, whose batches are of prompts; the two rows of a pair follow each other."""
    recorded = Recorded([[*batch[::2], *batch[1::2]] for batch in batches])
    trainer = GivenOnlineDPO(
        load(AutoModelForCausalLM, str(model)), load(AutoModelForCausalLM, str(reference)), [recorded.scores],
        OnlineDPOConfig(**common, **rule),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for batch in batches for row in batch[::2]]),
        processing_class=tokenizer_of(tokenizer),
    )  # fmt: skip
    return _trained_on(recorded, trainer)


def _trained_on(recorded: Recorded, trainer: Any) -> Trained:
    trainer.recorded = recorded
    trained = _trained(trainer)
    assert not recorded.left, "a batch was not asked for"
    return trained


def _trained(trainer: Any) -> Trained:
    trainer.train()
    steps = [line for line in trainer.state.log_history if "grad_norm" in line]
    weights = {name: weight.detach().clone() for name, weight in trainer.model.state_dict().items()}
    return Trained(weights, [line["loss"] for line in steps], [line["grad_norm"] for line in steps], trainer.train_dataset)
