"""An algorithm without a critic on the same loop: REINFORCE++, against an implementation of its own and against itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from transformers import AutoModelForCausalLM

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.preflight.settings import check_train
from tests.support.hf import save_tiny
from tests.support.layouts import STEADY_ADAM, TOLERANCE, WITHOUT_CRITIC, assert_same, deep
from tests.support.ppo import SHAPE, Outcome, Workspace, run_ppo_ranks, weight_distance
from tools.replay import main as replay
from tools.replay import read_rejected

EPOCHS, CLIP, KL, ENTROPY, GAMMA, CLIP_GRAD = 2, 0.2, 0.05, 0.01, 0.97, 1.0
CARRIED: dict[str, Any] = {
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 3, "max": 3},
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "actor | scorers": {"mode": "disaggregated"},
    "PP2 | TP2": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"tp": 2}},
    "TP2 colocated": {"mode": "colocated", "actor": {"tp": 2}},
    "reference beside the actor": {"mode": "disaggregated", "reference": "actor"},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("reinforce"))


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Iterator[Outcome]:
    yield run_ppo_ranks(deep(workspace, "plain", **WITHOUT_CRITIC))


@pytest.mark.parametrize("ranks", ["one rank", "actor | scorers"])
def test_a_run_with_carried_rollouts_is_what_a_loop_of_its_own_makes_of_its_tokens(
    workspace: Workspace, ranks: str
) -> None:
    """The loop below reads what the run recorded (tokens, log-probs of sampling, rewards), and nothing of this package."""
    shape = {name: SHAPE[name] for name in SHAPE if name not in ("model_type", "initializer_range")}
    name = "parity-" + "".join(c for c in ranks if c.isalnum())
    start, reward = workspace.root / f"{name}-actor", workspace.root / f"{name}-reward"
    save_tiny(start, "qwen2", **shape)
    save_tiny(reward, "qwen2", "scalar", seed=6, **shape)
    config = workspace.config(
        name,
        **WITHOUT_CRITIC,
        **CARRIED,
        placement={"mode": "single" if ranks == "one rank" else "disaggregated"},
        actor={"checkpoint": str(start), "optimizer": STEADY_ADAM},
        reward={"checkpoint": str(reward)},
        steps=4,
        rollout={"batch_size": 6, "max_response_tokens": 40, "stop": list(range(240, 256))},
        ppo={
            "epochs": EPOCHS, "minibatches": 1, "clip": CLIP, "gamma": GAMMA, "entropy_coefficient": ENTROPY,
            "kl": {"coefficient": KL},
        },
    )  # fmt: skip
    run = run_ppo_ranks(config)
    assert sum(row["deferrals"] for row in run.rollouts) > 0, "some rollouts should be carried"
    assert any(len(set(row["versions"])) > 1 for row in run.rollouts), "some should be of several versions"
    trained, sizes = independent_loop(start, run, workspace)
    assert [line["ess"] for line in run.metrics] == pytest.approx(sizes, abs=1e-5) and min(sizes) < 1 - 1e-4
    begun = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict()
    assert weight_distance(run.actor, {name: begun[name] for name in run.actor}) > 1e-3, "the run should train"
    assert weight_distance(run.actor, {name: trained[name] for name in run.actor}) < 1e-5


def at_the_end(row: dict[str, Any], prompt: list[int]) -> list[float]:
    """The reward of each token: the response's at the last."""
    return [0.0] * (len(row["tokens"]) - 1) + [row["reward"]]


def independent_loop(
    start: Path,
    run: Outcome,
    workspace: Workspace,
    rewards_of: Callable[[dict[str, Any], list[int]], list[float]] = at_the_end,
) -> tuple[dict[str, Tensor], list[float]]:
    """REINFORCE++ with transformers and plain torch: weights after all steps of the run, and each step's share of tokens
    that Kish's effective sample size leaves of those that older policies have drawn."""
    policy = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    policy.get_input_embeddings().padding_idx = None  # its row would have no gradient, though the token may be drawn
    reference = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).requires_grad_(False)
    adam = torch.optim.AdamW(
        policy.parameters(), lr=STEADY_ADAM["lr"], betas=(0.9, 0.95), eps=STEADY_ADAM["eps"], weight_decay=0.0
    )
    tokenizer = SentencePieceProcessor(model_file=str(workspace.root / "tokenizer.model"))
    sizes = []
    for step in sorted({row["step"] for row in run.rollouts}):
        batch = [row for row in run.rollouts if row["step"] == step]
        prompts = [list(tokenizer.encode(row["prompt"])) for row in batch]
        old = [torch.tensor(row["logprobs"], dtype=torch.float64).float() for row in batch]
        returns = []
        for prompt, row, logp in zip(prompts, batch, old, strict=True):
            kl = logp - logprobs(reference, prompt, row["tokens"])[0]
            rewards = [a + b for a, b in zip((-KL * kl).tolist(), rewards_of(row, prompt), strict=True)]
            later, found = 0.0, []
            for value in reversed(rewards):
                later = value + GAMMA * later
                found.append(later)
            returns.append(torch.tensor(found[::-1]))
        flat = torch.cat(returns)
        advantages = [(each - flat.mean()) / (flat.var(correction=0) + 1e-8).sqrt() for each in returns]
        for epoch in range(EPOCHS):
            losses, entropies, ratios = [], [], []
            for prompt, row, logp, advantage in zip(prompts, batch, old, advantages, strict=True):
                new, entropy = logprobs(policy, prompt, row["tokens"])
                ratio = (new - logp).exp()
                ratios.append(ratio.detach().double())
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
                entropies.append(entropy)
            weights = torch.cat(ratios)
            if epoch == 0:
                sizes.append(float(weights.sum() ** 2 / (weights.square().sum() * weights.numel())))
            adam.zero_grad()
            (torch.cat(losses).mean() - ENTROPY * torch.cat(entropies).mean()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP_GRAD)
            adam.step()
    return dict(policy.state_dict()), sizes


def logprobs(model: Any, prompt: list[int], response: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probs of the response's tokens, and the entropy of each draw."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logits[torch.arange(len(response)), torch.tensor(response)], -(logits.exp() * logits).sum(-1)


@pytest.mark.parametrize(
    "placement", [pytest.param(p, marks=pytest.mark.long) if p == "TP2 colocated" else p for p in PLACEMENTS]
)
def test_overlap_and_layout_change_nothing(workspace: Workspace, plain: Outcome, placement: str) -> None:
    """Streamed, with delta 0, on ranks of which none is a critic's."""
    name = "".join(c for c in placement if c.isalnum())
    config = deep(workspace, name, **WITHOUT_CRITIC, placement=PLACEMENTS[placement], **{"overlap.intra": True})
    assert_same(run_ppo_ranks(config), plain)


@pytest.mark.parametrize("chunk", [1, 64])
def test_the_chunk_size_changes_nothing(workspace: Workspace, plain: Outcome, chunk: int) -> None:
    changes = {"overlap.intra": True, "overlap.chunk.tokens": chunk}
    assert_same(run_ppo_ranks(deep(workspace, f"chunk-{chunk}", **WITHOUT_CRITIC, **changes)), plain)


def test_several_responses_a_prompt_are_those_of_rows_that_stand_as_often(workspace: Workspace) -> None:
    """Without a baseline and carried rollouts only the order in a batch tells groups from rows one after the other."""
    rows = (workspace.root / "data" / "prompts.jsonl").read_text().splitlines(keepends=True)
    repeated = workspace.root / "each-twice.jsonl"
    repeated.write_text("".join(row * 2 for row in rows))
    common: dict[str, Any] = {**WITHOUT_CRITIC, "data.shuffle": False, "steps": 2, "ppo.minibatches": 1}
    ours = run_ppo_ranks(deep(workspace, "two-responses", **common, **{"rollout.group_size": 2}))
    plain = run_ppo_ranks(deep(workspace, "two-rows", **common, **{"data.path": str(repeated)}))
    assert ours.tokens() == plain.tokens()
    assert [sorted(batch) for batch in ours.batches()] == [sorted(batch) for batch in plain.batches()]
    assert weight_distance(ours.actor, plain.actor) < TOLERANCE
    answers: dict[str, list[list[int]]] = {}
    for row in sorted(ours.rollouts, key=lambda row: row["seq_id"]):
        answers.setdefault(row["prompt"], []).append(row["tokens"])
    pairs = [each for each in answers.values() if len(each) == 2]
    assert len(pairs) >= 4 and all(first != second for first, second in pairs)


def test_nothing_of_a_critic_is_written(workspace: Workspace, plain: Outcome) -> None:
    run = Path(deep(workspace, "plain")["run_dir"])
    assert not plain.critic and not (run / "weights" / "critic").exists()
    assert not [name for line in plain.metrics for name in line if name.startswith("critic_")]
    assert all(line["value_mean"] is None and line["explained_variance"] is None for line in plain.metrics)


def test_a_verifier_alone_needs_no_rank_of_scorers(workspace: Workspace) -> None:
    """No reward model, and the reference on the actor's rank: a single process is the whole run."""
    config = deep(workspace, "verifier", **WITHOUT_CRITIC, placement={"mode": "disaggregated", "reference": "actor"})
    config |= {"reward": None, "rewards": [{"kind": "verifier", "name": "arithmetic"}]}
    assert world_size(TrainConfig(**config)) == 1
    assert len(run_ppo_ranks(config).metrics) == 3


def test_a_step_that_a_guard_takes_back_can_be_replayed(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    guards = {"ratio_max": 1.0001, "action": "skip"}
    config = workspace.config("guard", **WITHOUT_CRITIC, guards=guards, steps=2)
    assert all(line["skipped"] for line in run_ppo_ranks(config).metrics)
    path = Path(config["run_dir"]) / "rejected" / "step-1.safetensors"
    assert read_rejected(path).scored.values_T is None
    assert replay([str(path)]) == 0
    out = capsys.readouterr().out
    assert "the replay: ratio_max is" in out and "critic_loss" not in out
    with_critic = ["algorithm.preset=ppo", f"critic.init={json.dumps(SHAPE)}"]
    assert replay([str(path), *with_critic]) == 2
    assert "algorithm.baseline is none, but algorithm.preset ppo is what trains a critic" in capsys.readouterr().err
    assert replay([str(path), *with_critic, "algorithm.baseline=critic"]) == 2
    assert "the batch has no values, but algorithm.preset ppo updates a critic" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"critic": None}, "critic is missing, but algorithm.preset ppo trains one; add the section"),
        (
            {"algorithm": {"preset": "reinforce_pp"}},
            "critic is given, but algorithm.preset reinforce_pp has none; remove",
        ),
    ],
    ids=["ppo without", "reinforce_pp with"],
)
def test_a_critic_is_there_exactly_where_the_algorithm_has_one(
    workspace: Workspace, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainConfig(**workspace.config("refused", **changes))


def test_settings_that_only_a_critic_gives_a_meaning_are_refused(workspace: Workspace) -> None:
    config = TrainConfig(**workspace.config("refused", **WITHOUT_CRITIC, **{"ppo.gae_lambda": 0.9}))
    assert (
        "ppo.gae_lambda is 0.9, but algorithm.preset reinforce_pp has no critic, and nothing reads it; remove it"
        in (check_train(config))
    )
