"""Greedy responses as a baseline on the loop: they are the likeliest of their weights, belong to their group, and are never
trained; overlap, layouts and stops change nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oppo_megatron.cli.main import main
from tests.e2e.test_groups import CARRIED, LAYOUTS, grouped
from tests.support.hf import save_tiny
from tests.support.layouts import DEEP, STEADY_ADAM, TOLERANCE, assert_same
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks
from tests.support.virtual import assert_unfolds_alike

FULL = CARRIED | {"overlap.delta": {"rule": "fixed", "initial": 0, "max": 0}}
SCHEDULES = {"intra": {"overlap.intra": True}, "full": FULL}
IN_MAKE_TEST = ("full", "PP2 | TP2")
LONGEST = 40
"""`rollout.max_response_tokens`"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace.create(tmp_path_factory.mktemp("greedy"))
    shape = {name: DEEP[name] for name in DEEP if name not in ("model_type", "initializer_range")}
    save_tiny(made.root / "actor", "qwen2", **shape)
    return made


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
        trained, greedy = (
            [row for row in rows if row["step"] == line["step"]] for rows in (plain.rollouts, plain.greedy)
        )
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


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        pytest.param(schedule, placement, marks=() if (schedule, placement) == IN_MAKE_TEST else pytest.mark.long)
        for schedule in SCHEDULES
        for placement in LAYOUTS
    ],
)
def test_without_carried_groups_every_schedule_and_layout_is_the_sequential_run(
    workspace: Workspace, plain: Outcome, schedule: str, placement: str
) -> None:
    name = "".join(c for c in f"{schedule}-{placement}" if c.isalnum())
    config = remax(workspace, name, placement=LAYOUTS[placement], **SCHEDULES[schedule])
    assert_same(run_ppo_ranks(config), plain)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 4])
def test_greedy_responses_are_carried_with_their_group_in_any_layout(workspace: Workspace, size: int) -> None:
    """Also where tokens stay on the device for a while, and caches hold only what the role reads.

    Losses are not compared: with this reduction they are sums over a response, and their roundings as much larger.
    """
    delta = {"rule": "fixed", "initial": 16 // size, "max": 16 // size}
    carried = CARRIED | {"overlap.delta": delta, "steps": 3}
    config = remax(workspace, f"carried-{size}", size, **carried)
    one = run_ppo_ranks(config)
    assert_unfolds_alike(config, one)
    assert any(row["deferrals"] for row in one.greedy), "some should be carried with their group"
    for placement in ("TP2, colocated", "DP2 | DP2"):
        name = "".join(c for c in f"carried-{size}-{placement}" if c.isalnum())
        config = remax(workspace, name, size, **carried, placement=LAYOUTS[placement])
        config["runtime"] = {"decode_sync_steps": 5}
        spread = run_ppo_ranks(config)
        assert spread.tokens() == one.tokens() and spread.batches() == one.batches()
        assert weight_distance(spread.actor, one.actor) < TOLERANCE


def test_a_run_stopped_within_a_group_goes_on_to_the_bit(workspace: Workspace) -> None:
    whole = run_ppo_ranks(remax(workspace, "whole", 1, **CARRIED, steps=3))
    config = remax(workspace, "stopped", 1, **CARRIED, steps=3)
    ended = run_ranks(1, "tests.e2e.jobs:train_until", config=config, rounds=3, rank=0)
    assert ended == [False], "the run was over before it was to stop"
    held = [json.loads(line) for line in next(Path(config["run_dir"]).glob("checkpoints/*/rollouts.jsonl")).open()]
    goes_on = {row["seq_id"]: row["finish_clock"] is None for row in held}
    assert any(goes_on[i] != goes_on[i + 1] for i in range(min(goes_on), max(goes_on), 2)), (
        "of a response and its greedy one, one should have ended"
    )
    again = run_ppo_ranks(config | {"checkpoint": {"resume": True}})
    assert again.tokens() == whole.tokens() and again.batches() == whole.batches()
    assert again.greedy == whole.greedy
    assert weight_distance(again.actor, whole.actor) == 0


def test_a_run_does_not_go_on_without_them(
    workspace: Workspace, plain: Outcome, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Sequence ids, and with them prompts and draws, would be others."""
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps(remax(workspace, "plain", steps=3)))
    assert main(["train", str(path), "--resume", "algorithm.baseline=none"]) == 2
    told = capsys.readouterr().err
    assert (
        "whether a prompt has a greedy response (algorithm.baseline) is False, but the checkpoint's run has True"
        in told
    )
