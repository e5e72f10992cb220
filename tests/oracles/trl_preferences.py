"""TRL 1.12: `DPOTrainer._compute_loss`, `KTOTrainer._compute_loss`.  B sequences, T tokens of the longest, V vocabulary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

Answered = tuple[list[int], list[int]]


def dpo_loss(
    answered: Sequence[Answered],
    logits: Sequence[Tensor],
    reference_B: Tensor,
    loss_types: Sequence[str],
    weights: Sequence[float],
    beta: float,
    label_smoothing: float,
) -> Tensor:
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
    answered: Sequence[Answered],
    logits: Sequence[Tensor],
    reference_B: Tensor,
    wanted: Sequence[bool],
    ratios_B: Tensor,
    loss_type: str,
    beta: float,
    weights: tuple[float, float],
) -> Tensor:
    """`ratios_B`: log pi - log pi_ref of the mismatched answers; `weights`: of wanted and unwanted ones."""
    inputs, logits_BTV = _padded(answered, logits)
    trainer = _trainer(
        loss_type=loss_type,
        beta=beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        calculate_KL=loss_type == "kto",
        _compute_kl_logps=lambda model, batch: ratios_B if loss_type == "kto" else None,
    )
    given = inputs | {"label": torch.tensor(wanted), "ref_logps": reference_B, "ref_KL_logps": torch.zeros_like(ratios_B)}
    loss: Tensor = KTOTrainer._compute_loss(trainer, _Model(logits_BTV), given, False)
    return loss


class _Model:
    def __init__(self, logits_BTV: Tensor):
        self.logits_BTV, self.training = logits_BTV, True

    def __call__(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.logits_BTV)


def _trainer(**settings: Any) -> Any:
    same = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=same, aux_loss_enabled=False, precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, **settings,
    )  # fmt: skip


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
