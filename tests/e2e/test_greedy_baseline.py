"""Greedy responses as a baseline: they are the likeliest of their weights, belong to their group, and are never trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oppo_megatron.cli.main import main
from tests.e2e.test_groups import grouped
from tests.support.hf import save_tiny
from tests.support.layouts import DEEP, STEADY_ADAM
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

LONGEST = 40
"""`rollout.max_response_tokens`"""


@pytest.fixture(scope="module")
def workspace(workspace: Workspace) -> Workspace:
    shape = {name: DEEP[name] for name in DEEP if name not in ("model_type", "initializer_range")}
    save_tiny(workspace.root / "actor", "qwen2", **shape)
    return workspace


def remax(workspace: Workspace, name: str, size: int = 2, **changes: Any) -> dict[str, Any]:
    """16 responses a step, in groups of `size` with a greedy one each that is not among them."""
    actor = {"checkpoint": str(workspace.root / "actor"), "optimizer": STEADY_ADAM}
    return grouped(workspace, name, "remax", size, **{"actor": actor} | changes)


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(remax(workspace, "plain"))


def test_greedy_responses_are_the_likeliest_of_their_weights(workspace: Workspace, plain: Outcome) -> None:
    """Token by token, by transformers, of the weights that the run began with; the temperature of the others is 1."""
    model = AutoModelForCausalLM.from_pretrained(workspace.root / "actor", dtype=torch.float32).eval()
    first = [row for row in plain.greedy if row["step"] == 1]
    assert len(first) == 8 and {version for row in first for version in row["versions"]} == {0}
    for row in first:
        tokens: list[int] = []
        while len(tokens) < len(row["tokens"]):
            with torch.inference_mode():
                logits = model(torch.tensor([[*row["prompt_tokens"], *tokens]])).logits[0, -1]
            tokens.append(int(logits.argmax()))
        assert row["tokens"] == tokens, row["seq_id"]
    sampled = {row["seq_id"] // 3: row["tokens"] for row in plain.rollouts if row["step"] == 1}
    assert any(sampled[row["seq_id"] // 3] != row["tokens"] for row in first)


def test_what_is_told_of_a_batch_is_of_what_is_trained(plain: Outcome) -> None:
    """And of greedy responses their reward alone."""
    for line in plain.metrics:
        trained, greedy = ([row for row in rows if row["step"] == line["step"]] for rows in (plain.rollouts, plain.greedy))
        assert (len(trained), len(greedy)) == (16, 8)
        assert line["reward_mean"] == pytest.approx(sum(row["reward"] for row in trained) / 16)
        assert line["greedy_reward_mean"] == pytest.approx(sum(row["reward"] for row in greedy) / 8)
        parts = line["reward_parts"]
        assert line["reward_mean"] == pytest.approx(parts["model"] + 0.5 * parts["arithmetic"])
        assert line["trained_len_mean"] == pytest.approx(sum(len(row["tokens"]) for row in trained) / 16)
        assert line["tokens"] == sum(len(row["tokens"]) for row in [*trained, *greedy]), "what is decoded is counted"
        assert line["kl_mean"] is not None and line["grad_norm"] > 0


def test_each_score_is_of_its_own_response(workspace: Workspace) -> None:
    """Told by a rule that goes by the length, which differs between greedy and drawn ones."""
    rule = {"reward": None, "rewards": [{"kind": "verifier", "name": "length", "buffer_tokens": LONGEST}]}
    run = run_ppo_ranks(remax(workspace, "lengths", **rule, steps=1))
    assert len(run.greedy) == 8 and {len(row["tokens"]) for row in run.greedy} != {len(row["tokens"]) for row in run.rollouts}
    for row in [*run.rollouts, *run.greedy]:
        assert row["reward"] == pytest.approx(-len(row["tokens"]) / LONGEST)


def test_a_run_does_not_go_on_without_them(
    workspace: Workspace, plain: Outcome, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Sequence ids, and with them prompts and draws, would be others."""
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(remax(workspace, "plain", steps=3)))
    assert main(["train", str(path), "--resume", "algorithm.baseline=none"]) == 2
    told = capsys.readouterr().err
    assert "whether a prompt has a greedy response (algorithm.baseline) is False, but the checkpoint's run has True" in told
