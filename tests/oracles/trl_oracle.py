"""TRL 1.12: losses and advantages of `GRPOTrainer` and `RLOOTrainer`, losses of `DPOTrainer` and `KTOTrainer`.
Methods are called unbound; of the long one that computes advantages, the statements between two names are run."""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.utils import nanstd

from tests.oracles.comparing import LIMIT, Sample, mask_of, padded, rows_of
from tests.replay.formulas import Rows

Answered = tuple[list[int], list[int]]


def grpo_loss(
    sample: Sample, old: Rows, advantages: Rows, loss_type: str, *, level: str = "token", beta: float = 0.0, low: float = 0.2,
    high: float = 0.2, delta: float | None = None, bias_correction: bool = False,
) -> Tensor:  # fmt: skip
    trainer = _group_trainer(
        sample, args=SimpleNamespace(use_bias_correction_kl=bias_correction, delta=delta, steps_per_generation=1),
        loss_type=loss_type, importance_sampling_level=level, beta=beta, epsilon_low=low, epsilon_high=high,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False, max_completion_length=LIMIT, current_gradient_accumulation_steps=1,
    )  # fmt: skip
    mask = mask_of(sample.new)
    inputs = _inputs(mask) | {
        "advantages": padded(advantages), "old_per_token_logps": padded(old),
        "ref_per_token_logps": padded(sample.batch.reference), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    return grpo_trainer.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def rloo_loss(sample: Sample, old: Rows, advantages: Rows, low: float = 0.2, high: float = 0.2) -> Tensor:
    """`RLOOTrainer._compute_loss`; it takes one advantage a row."""
    trainer = _group_trainer(sample, epsilon_low=low, epsilon_high=high)
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


def _group_trainer(sample: Sample, **settings: Any) -> Any:
    new = padded(sample.new)
    return _trainer(_get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None), **settings)


def _trainer(**settings: Any) -> Any:
    same = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
        num_processes=1,
    )  # fmt: skip
    return SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=same, aux_loss_enabled=False, precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, **settings,
    )  # fmt: skip


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


# preferences: B sequences, T tokens of the longest, V vocabulary


def dpo_loss(
    answered: Sequence[Answered], logits: Sequence[Tensor], reference_B: Tensor, loss_types: Sequence[str],
    weights: Sequence[float], beta: float, label_smoothing: float,
) -> Tensor:  # fmt: skip
    """`answered`, `logits` and `reference_B` are of the chosen answers, then of the rejected ones."""
    inputs, logits_BTV = _padded(answered, logits)
    chosen_P, rejected_P = reference_B.chunk(2)
    trainer = _trainer(
        loss_types=loss_types, loss_weights=weights, beta=beta, label_smoothing=label_smoothing, ld_alpha=None,
        f_divergence_type="reverse_kl", use_weighting=False,
    )  # fmt: skip
    given = inputs | {"ref_chosen_logps": chosen_P, "ref_rejected_logps": rejected_P}
    loss: Tensor = DPOTrainer._compute_loss(trainer, _Model(logits_BTV), given, False)
    return loss


def kto_loss(
    answered: Sequence[Answered], logits: Sequence[Tensor], reference_B: Tensor, wanted: Sequence[bool], ratios_B: Tensor,
    loss_type: str, beta: float, weights: tuple[float, float],
) -> Tensor:  # fmt: skip
    """`ratios_B`: log pi - log pi_ref of the mismatched answers; `weights`: of wanted and unwanted ones."""
    inputs, logits_BTV = _padded(answered, logits)
    trainer = _trainer(
        loss_type=loss_type, beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1],
        calculate_KL=loss_type == "kto", _compute_kl_logps=lambda model, batch: ratios_B if loss_type == "kto" else None,
    )  # fmt: skip
    given = inputs | {"label": torch.tensor(wanted), "ref_logps": reference_B, "ref_KL_logps": torch.zeros_like(ratios_B)}
    loss: Tensor = KTOTrainer._compute_loss(trainer, _Model(logits_BTV), given, False)
    return loss


class _Model:
    def __init__(self, logits_BTV: Tensor):
        self.logits_BTV, self.training = logits_BTV, True

    def __call__(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.logits_BTV)


def _padded(answered: Sequence[Answered], logits: Sequence[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens with their masks [B, T], and the logits [B, T, V]; the place before an answer's token predicts it."""
    longest = max(len(prompt) + len(answer) for prompt, answer in answered)
    shape = len(answered), longest
    tokens_BT, attended_BT, answer_BT = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    rows = []
    for place, ((prompt, answer), logits_RV) in enumerate(zip(answered, logits, strict=True)):
        whole = len(prompt) + len(answer)
        tokens_BT[place, :whole] = torch.tensor([*prompt, *answer])
        attended_BT[place, :whole] = 1
        answer_BT[place, len(prompt) : whole] = 1
        before, behind = len(prompt) - 1, longest - whole + 1
        rows.append(torch.nn.functional.pad(logits_RV, (0, 0, before, behind)))
    return {"input_ids": tokens_BT, "attention_mask": attended_BT, "completion_mask": answer_BT}, torch.stack(rows)
