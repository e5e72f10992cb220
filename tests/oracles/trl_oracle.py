"""TRL 1.12: losses and advantages of `GRPOTrainer` and `RLOOTrainer`.
Methods are called unbound; of the long one that computes advantages, the statements between two names are run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.utils import nanstd

from tests.oracles.batches import LIMIT, Sample, mask_of, padded, rows_of
from tests.replay.formulas import Rows


def grpo_loss(
    sample: Sample,
    old: Rows,
    advantages: Rows,
    loss_type: str,
    *,
    level: str = "token",
    beta: float = 0.0,
    low: float = 0.2,
    high: float = 0.2,
    delta: float | None = None,
    bias_correction: bool = False,
) -> Tensor:
    trainer = _trainer(
        sample,
        args=SimpleNamespace(use_bias_correction_kl=bias_correction, delta=delta, steps_per_generation=1),
        loss_type=loss_type,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
    )
    mask = mask_of(sample.new)
    inputs = _inputs(mask) | {
        "advantages": padded(advantages),
        "old_per_token_logps": padded(old),
        "ref_per_token_logps": padded(sample.batch.reference),
        "num_items_in_batch": mask.sum(),
    }
    return grpo_trainer.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def rloo_loss(sample: Sample, old: Rows, advantages: Rows, low: float = 0.2, high: float = 0.2) -> Tensor:
    """`RLOOTrainer._compute_loss`; it takes one advantage a row."""
    trainer = _trainer(sample, epsilon_low=low, epsilon_high=high)
    inputs = _inputs(mask_of(sample.new)) | {
        "advantages": torch.stack([row[0] for row in advantages]),
        "old_logps": torch.stack([row.sum() for row in old]),
    }
    return rloo_trainer.RLOOTrainer._compute_loss(trainer, trainer.model, inputs)


def grpo_advantages(sample: Sample, scale_rewards: str) -> Rows:
    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1), scale_rewards=scale_rewards
    )
    return _advantages(grpo_trainer.GRPOTrainer, sample, trainer)


def rloo_advantages(sample: Sample, beta: float, normalize: bool = False) -> Rows:
    """Advantages of each token, the KL of the sampling policy within the rewards."""
    trainer = SimpleNamespace(reward_weights=torch.ones(1), reward_clip_range=None, beta=beta, normalize_advantages=normalize)
    return _advantages(rloo_trainer.RLOOTrainer, sample, trainer)


def _trainer(sample: Sample, **settings: Any) -> Any:
    new = padded(sample.new)
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (new, torch.zeros_like(new), None),
        **settings,
    )


def _inputs(mask: Tensor) -> dict[str, Tensor]:
    prompt, completion = torch.ones(len(mask), 1, dtype=torch.long), torch.ones_like(mask, dtype=torch.long)
    return {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": completion, "completion_mask": mask}


def _advantages(trainer_class: Any, sample: Sample, trainer: Any) -> Rows:
    names = {
        "self": trainer, "rewards_per_func": sample.batch.scores_B[:, None], "num_generations": sample.group_size,
        "device": torch.device("cpu"), "torch": torch, "nanstd": nanstd, "gather": lambda x: x,
        "completion_mask": mask_of(sample.batch.old), "old_per_token_logps": padded(sample.batch.old),
        "ref_per_token_logps": padded(sample.batch.reference),
    }  # fmt: skip
    exec(_statements(trainer_class._generate_and_score_completions), names)
    return rows_of(names["advantages"], sample.batch.old)


def _statements(method: Callable[..., Any]) -> Any:
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    body = tree.body[0].body
    texts = [ast.unparse(statement) for statement in body]
    first = next(i for i, text in enumerate(texts) if text.startswith("unscorable_mask ="))
    last = next(i for i, text in enumerate(texts) if text.startswith("advantages = torch.nan_to_num"))
    return compile(ast.Module(body[first : last + 1], []), inspect.getsourcefile(method), "exec")
