"""PPO with a process reward model: streamed step scores against transformers, overlaps and layouts against plain runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.token_text import StepEnds
from tests.e2e.rewards import brevity
from tests.e2e.test_reinforce_pp import CARRIED, CLIP, ENTROPY, EPOCHS, GAMMA, KL, independent_loop
from tests.support.hf import save_tiny
from tests.support.layouts import STEADY_ADAM, WITHOUT_CRITIC
from tests.support.ppo import SHAPE, Workspace, run_ppo_ranks, weight_distance

SEPARATOR, BELL = "\n", "\a"
"""The latter where random policies never write a newline."""


def parts(how: str, separator: str = SEPARATOR) -> list[dict[str, Any]]:
    return [
        {"kind": "process", "step_rewards": how, "separator": separator, "weight": 2.0},
        {"kind": "python", "entry_point": "tests.e2e.rewards:brevity", "options": {"limit": 100}, "weight": 0.1},
    ]


class Reference:
    """A process reward model in transformers, one whole sequence at a time."""

    def __init__(self, directory: Path, workspace: Workspace):
        self.model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = load_tokenizer(TokenizerConfig(path=workspace.root / "tokenizer.model"))

    def scores(self, row: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Ends of the response's steps, and the probability that each is right."""
        prompt = self.tokenizer.encode(row["prompt"])
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([[*prompt, *row["tokens"]]])).last_hidden_state
            logits = self.model.score(hidden)[0, len(prompt) :, 0]
        ends = StepEnds(SEPARATOR, self.tokenizer.decode).of(row["tokens"])
        return ends, logits[ends].sigmoid().tolist()


def saved(workspace: Workspace, name: str, **changes: Any) -> tuple[dict[str, Any], Path, Path]:
    """A configuration over saved weights of actor and reward model, and their directories."""
    shape = {key: SHAPE[key] for key in SHAPE if key not in ("model_type", "initializer_range")}
    actor, reward = workspace.root / f"{name}-actor", workspace.root / f"{name}-reward"
    save_tiny(actor, "qwen2", **shape)
    save_tiny(reward, "qwen2", "scalar", seed=6, **shape)
    config = workspace.config(
        name,
        actor={"checkpoint": str(actor), "optimizer": STEADY_ADAM},
        reward={"checkpoint": str(reward)},
        **changes,
    )
    return config, actor, reward


@pytest.mark.parametrize("how", ["sum", "potential"])
def test_a_run_over_step_rewards_is_what_a_loop_of_its_own_makes_of_them(workspace: Workspace, how: str) -> None:
    """Streamed on ranks of their own, with carried rollouts; the loop reads its step scores from transformers."""
    config, actor, reward = saved(
        workspace,
        f"parity-{how}",
        **WITHOUT_CRITIC,
        **CARRIED,
        **{"rollout.batch_size": 12},
        rewards=parts(how),
        placement={"mode": "disaggregated"},
        steps=3,
        ppo={
            "epochs": EPOCHS, "minibatches": 1, "clip": CLIP, "gamma": GAMMA, "entropy_coefficient": ENTROPY,
            "kl": {"coefficient": KL},
        },
    )  # fmt: skip
    run, reference = run_ppo_ranks(config), Reference(reward, workspace)
    assert sum(row["deferrals"] for row in run.rollouts) > 0, "some rollouts should be carried"
    num_steps = [len(reference.scores(row)[0]) for row in run.rollouts]
    assert max(num_steps) > 2 and sum(count > 1 for count in num_steps) > 2

    def rewards_of(row: dict[str, Any], prompt: list[int]) -> list[float]:
        ends, scores = reference.scores(row)
        found = [0.0] * len(row["tokens"])
        for end, now, before in zip(ends, scores, [0.0, *scores], strict=False):
            found[end] += 2.0 * (now if how == "sum" else now - before)
        found[-1] += 0.1 * brevity("", row["response"], {}, 100)
        assert sum(found) == pytest.approx(row["reward"], abs=1e-5), "the response's reward is that of its steps"
        return found

    trained, _ = independent_loop(actor, run, workspace, rewards_of)
    assert weight_distance(run.actor, {name: trained[name] for name in run.actor}) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("how", ["last", "min", "sum"])
def test_held_out_responses_are_scored_as_trained_ones_are(workspace: Workspace, how: str) -> None:
    """The mean of the whole forward's step scores, of replicas that share the responses."""
    config, _, reward = saved(
        workspace,
        f"heldout-{how}",
        rewards=parts(how),
        steps=1,
        placement={"mode": "disaggregated", "scorer": {"pp": 2, "dp": 2}},
        evaluation={
            "data": {"path": str(workspace.root / "data" / "prompts.jsonl"), "max_prompt_tokens": 96},
            "metrics": parts(how)[:1],
            "max_rows": 6,
            "temperature": 1.0,
        },
    )
    run, reference = run_ppo_ranks(config), Reference(reward, workspace)
    value_of = {"last": lambda p: p[-1], "min": min, "sum": sum}[how]
    for row in run.rollouts:
        trained = 2.0 * value_of(reference.scores(row)[1]) + 0.1 * brevity("", row["response"], {}, 100)
        assert row["reward"] == pytest.approx(trained, abs=1e-4)
