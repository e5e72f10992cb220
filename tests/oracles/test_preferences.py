"""The losses of `oppo dpo` against TRL's: fifty random batches a case, loss and gradient of the logits."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl, in an environment of its own: make test-oracles", allow_module_level=True)

import torch
from torch import Tensor

from oppo_megatron.algorithms.supervised_losses import mean_loss
from oppo_megatron.config.supervised import DPOConfig
from oppo_megatron.data.supervised_rows import Marked, Pair
from oppo_megatron.mcore.vocab import VocabShards
from oppo_megatron.train.reference_pass import key_of, missing_answers
from oppo_megatron.train.supervised_tasks import MarkedPreferences, PairPreferences, Preferences, answer_logprobs
from tests.oracles.trl_preferences import Answered, dpo_loss, kto_loss

VOCAB, BATCHES, CLOSE = 11, 50, 1e-6
CPU = torch.device("cpu")
CASES: dict[str, tuple[dict[str, Any], list[str], list[float]]] = {
    "sigmoid": ({}, ["sigmoid"], [1.0]),
    "robust": ({"loss": "robust", "label_smoothing": 0.2}, ["robust"], [1.0]),
    "hinge": ({"loss": "hinge"}, ["hinge"], [1.0]),
    "ipo, which TRL averages": ({"loss": "ipo", "average": True}, ["ipo"], [1.0]),
    "sigmoid_norm": ({"average": True}, ["sigmoid_norm"], [1.0]),
    "sigmoid and sft": ({"nll": 0.3}, ["sigmoid", "sft"], [1.0, 0.3]),
}


def answer(rng: random.Random, length: int | None = None) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length or rng.randint(1, 7))]


def logits_of(answered: Sequence[Answered], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(len(tokens), VOCAB, generator=generator).requires_grad_() for _, tokens in answered]


def our_loss(task: Preferences[Any], rows: list[Any], answered: Sequence[Answered], logits: Sequence[Tensor]) -> Tensor:
    shares = []
    places = {id(tokens): logits_RV for (_, tokens), logits_RV in zip(answered, logits, strict=True)}
    for batch in task.micro_batches(rows, 30, CPU):
        inside = [each for i in batch.index for each in task.answers(rows[i])]
        logp_S = answer_logprobs(batch, torch.cat([places[id(tokens)] for _, tokens in inside]), VocabShards(None, VOCAB, VOCAB))
        shares.append(mean_loss(task.columns(batch, logp_S), len(rows))[0])
    return torch.stack(shares).sum()


def require_alike(ours: Tensor, theirs: Tensor, logits: Sequence[Tensor]) -> None:
    """Compare absolutely, and relatively to a number above 1: TRL adds up in float32."""
    torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=CLOSE)
    for mine, other in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(mine, other, atol=CLOSE, rtol=CLOSE)


def base() -> dict[str, Any]:
    return {"run_dir": "r", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "model": {"checkpoint": "m"}, "max_tokens": 64}


def refer(task: Preferences[Any], answered: Sequence[Answered], generator: torch.Generator) -> Tensor:
    values = -2.5 * torch.rand(len(answered), generator=generator, dtype=torch.float64) * 4
    missing = missing_answers(task.reference, answered)
    found = {key: float(value) for key, value in zip(missing, values.tolist(), strict=False)}
    task.reference.update(found)
    return torch.tensor([task.reference[key_of(*each)] for each in answered], dtype=torch.float64).float()


@pytest.mark.parametrize("case", CASES)
def test_dpo(case: str) -> None:
    rule, loss_types, weights = CASES[case]
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        beta = rng.choice([0.05, 0.1, 0.5])
        task = PairPreferences(DPOConfig.model_validate(base() | {"dpo": rule | {"beta": beta}}))
        length = rng.randint(1, 7) if "sft" in loss_types else None  # TRL's mean is over all tokens of the batch, ours over pairs
        rows = [Pair(answer(rng), answer(rng, length), answer(rng)) for _ in range(rng.randint(1, 6))]
        answered = [(row.prompt, row.chosen) for row in rows] + [(row.prompt, row.rejected) for row in rows]
        logits, reference_B = logits_of(answered, generator), refer(task, answered, generator)
        theirs = dpo_loss(answered, logits, reference_B, loss_types, weights, beta, rule.get("label_smoothing", 0.0))
        require_alike(our_loss(task, rows, answered, logits), theirs, logits)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_kto(loss: str) -> None:
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    points = []
    for _ in range(BATCHES):
        beta, wanted, unwanted = rng.choice([0.05, 0.1, 0.5]), 1.0, rng.choice([0.5, 1.0, 1.3])
        rule = {"loss": loss, "beta": beta, "wanted": wanted, "unwanted": unwanted}
        task = MarkedPreferences(DPOConfig.model_validate(base() | {"dpo": rule}))
        rows = [Marked(answer(rng), answer(rng), [rng.randrange(2)]) for _ in range(rng.randint(2, 8))]
        answered = [(row.prompt, row.completion) for row in rows]
        logits, reference_B = logits_of(answered, generator), refer(task, answered, generator)
        ratios_B = torch.randn(len(rows), generator=generator) + 0.3
        task.point = max(0.0, float(ratios_B.double().mean())) if loss == "kto" else 0.0
        points.append(task.point)
        marks = [bool(row.wanted[0]) for row in rows]
        theirs = kto_loss(answered, logits, reference_B, marks, ratios_B, loss, beta, (wanted, unwanted))
        require_alike(our_loss(task, rows, answered, logits), theirs, logits)
    assert loss != "kto" or (0.0 in points and max(points) > 0.3), "both sides of the cut at 0"
