"""Rejected batches with greedy responses: what is written is what is read, and nothing else is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.errors import DataError
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.train.guard import Facts, RejectedBatch
from tools.replay import read_rejected

GREEDY = GreedyRows(torch.tensor([0.5, -2.0]), torch.tensor([3, 7]), torch.tensor([False, True]))


def rejected(greedy: GreedyRows | None) -> RejectedBatch:
    """Four rollouts, two to a prompt."""
    facts = Facts(3, 1, 9, 2, 0.1, "", "kl", {"kl_mean": 1.0}, {})
    batch = [Rollout(Prompt(i, i, "p", (1, 2)), i, [4, 5], [-1.0, -2.0], [-1.0, -2.0], [2, 2]) for i in (0, 1, 3, 4)]
    logp_T = torch.tensor([-1.0, -2.0] * 4)
    scored = ScoredBatch(logp_T, None, None, torch.arange(4.0), [2] * 4, torch.zeros(4, dtype=torch.bool), greedy=greedy)
    return RejectedBatch(facts, batch, scored)


def test_greedy_responses_come_back(tmp_path: Path) -> None:
    rejected(GREEDY).write(tmp_path / "step-3.safetensors")
    found = read_rejected(tmp_path / "step-3.safetensors").scored.greedy
    assert found is not None
    for name, expected in vars(GREEDY).items():
        assert torch.equal(getattr(found, name), expected) and getattr(found, name).dtype == expected.dtype, name


def test_without_them_there_are_none(tmp_path: Path) -> None:
    rejected(None).write(tmp_path / "step-3.safetensors")
    assert not [name for name in load_file(tmp_path / "step-3.safetensors") if name.startswith("greedy")]
    assert read_rejected(tmp_path / "step-3.safetensors").scored.greedy is None


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("greedy_scores_G", None, "greedy_lengths_G has 2 entries, not 0"),
        ("greedy_lengths_G", None, "greedy_lengths_G has 0 entries, not 2"),
        ("greedy_truncated_G", torch.zeros(1, dtype=torch.bool), "greedy_truncated_G has 1 entries, not 2"),
        ("greedy_scores_G", torch.zeros(3), "4 rollouts are not whole groups of 3 prompts"),
        ("greedy_scores_G", torch.zeros(2, dtype=torch.float64), "greedy_scores_G is missing or of another kind"),
    ],
)
def test_damaged_ones_are_refused(tmp_path: Path, name: str, tensor: torch.Tensor | None, told: str) -> None:
    path = tmp_path / "step-3.safetensors"
    rejected(replace(GREEDY)).write(path)
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors if tensor is None else tensors | {name: tensor}, path)
    with pytest.raises(DataError, match=told):
        read_rejected(path)
