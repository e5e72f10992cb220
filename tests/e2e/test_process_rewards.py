"""PPO with a process reward model: streamed step scores against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.token_text import StepEnds
from tests.e2e.rewards import brevity
from tests.replay.runs import assert_replays, carrying, save_models
from tests.support.layouts import WITHOUT_CRITIC
from tests.support.ppo import Workspace, run_ppo_ranks

SEPARATOR = "\n"


def parts(how: str) -> list[dict[str, Any]]:
    return [
        {"kind": "process", "step_rewards": how, "separator": SEPARATOR, "weight": 2.0},
        {"kind": "python", "entry_point": "tests.e2e.rewards:brevity", "options": {"limit": 100}, "weight": 0.1},
    ]


@pytest.fixture(scope="module")
def workspace(workspace: Workspace) -> Workspace:
    save_models(workspace.root)
    return workspace


class Reference:
    """A process reward model in transformers, one whole sequence at a time."""

    def __init__(self, workspace: Workspace):
        directory = workspace.root / "reward"
        self.model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = load_tokenizer(TokenizerConfig(path=workspace.root / "tokenizer.model"))

    def scores(self, row: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        prompt = self.tokenizer.encode(row["prompt"])
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([[*prompt, *row["tokens"]]])).last_hidden_state
            logits = self.model.score(hidden)[0, len(prompt) :, 0]
        ends = StepEnds(SEPARATOR, self.tokenizer.decode).of(row["tokens"])
        return ends, logits[ends].sigmoid().tolist()


@pytest.mark.parametrize("how", ["sum", "potential"])
def test_a_run_over_step_rewards_is_what_a_loop_of_its_own_makes_of_them(workspace: Workspace, how: str) -> None:
    changes = {"rewards": parts(how), "placement": {"mode": "disaggregated"}, "steps": 3}
    rollout = {"batch_size": 12, "max_response_tokens": 40}
    config = carrying(workspace, f"parity-{how}", WITHOUT_CRITIC | changes | {"rollout": rollout})
    run, reference = run_ppo_ranks(config), Reference(workspace)
    assert sum(row["deferrals"] for row in run.rollouts) > 0, "some rollouts should be carried"
    num_steps = [len(reference.scores(row)[0]) for row in run.rollouts]
    assert max(num_steps) > 2 and sum(count > 1 for count in num_steps) > 2

    def rewards_of(row: Mapping[str, Any]) -> list[float]:
        ends, scores = reference.scores(row)
        found = [0.0] * len(row["tokens"])
        for end, now, before in zip(ends, scores, [0.0, *scores], strict=False):
            found[end] += 2.0 * (now if how == "sum" else now - before)
        found[-1] += 0.1 * brevity("", row["response"], {}, 100)
        assert sum(found) == pytest.approx(row["reward"], abs=1e-5), "the response's reward is that of its steps"
        return found

    assert_replays(config, token_rewards=rewards_of)


@pytest.mark.long
@pytest.mark.parametrize("how", ["last", "min", "sum"])
def test_scores_of_a_part_are_those_of_the_whole_forward(workspace: Workspace, how: str) -> None:
    heldout = {"path": str(workspace.root / "data" / "prompts.jsonl"), "max_prompt_tokens": 96, "max_rows": 6}
    changes = {
        "rewards": parts(how), "steps": 1, "placement": {"mode": "disaggregated", "scorer": {"pp": 2, "dp": 2}},
        "evaluation": {"data": heldout, "metrics": parts(how)[:1], "temperature": 1.0},
    }  # fmt: skip
    run, reference = run_ppo_ranks(carrying(workspace, f"heldout-{how}", changes)), Reference(workspace)
    value_of = {"last": lambda p: p[-1], "min": min, "sum": sum}[how]
    for row in run.rollouts:
        trained = 2.0 * value_of(reference.scores(row)[1]) + 0.1 * brevity("", row["response"], {}, 100)
        assert row["reward"] == pytest.approx(trained, abs=1e-4)
