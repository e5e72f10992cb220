"""The settings that an algorithm reads are those that change what it trains; the others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import pytest
import torch

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.config.algorithm import PRESETS
from oppo_megatron.config.algorithm_rules import unread_settings
from oppo_megatron.config.run import TrainConfig

SIZE, GROUPS, LONGEST = 2, 3, 6
CHANGES: dict[str, tuple[Any, ...]] = {
    "ppo.gamma": (0.7,), "ppo.gae_lambda": (0.3,), "ppo.clip": (0.01,), "ppo.clip_high": (0.02,), "ppo.dual_clip": (1.01,),
    "ppo.value_clip": (0.01,), "ppo.entropy_coefficient": (0.3,), "ppo.reward_clip": (0.4,), "ppo.truncated": (-9.0,),
    "ppo.reward_normalization": ("batch",), "ppo.kl.coefficient": (0.7,),
    "ppo.kl.estimator": ("k2", "k3"), "ppo.staleness": ("decoupled", "behaviour"),
    "algorithm.ratio": ("sequence_product", "token"), "algorithm.scale": ("batch_std", "none"), "dpo.beta": (0.7,),
}  # fmt: skip
"""Values of each setting, of which the first is taken that an algorithm does not have already."""
VARIANTS: dict[str, dict[str, Any]] = {name: {"algorithm.preset": name} for name in PRESETS} | {
    "grpo, plain": {"algorithm.preset": "grpo", "algorithm.objective": "plain"},
    "grpo, cispo": {"algorithm.preset": "grpo", "algorithm.objective": "cispo", "ppo.clip_high": 4.0},
    "grpo, no KL": {"algorithm.preset": "grpo", "ppo.kl.mode": "none"},
    "grpo, penalty": {"algorithm.preset": "grpo", "ppo.kl.mode": "penalty"},
}


def configured(changes: Mapping[str, Any]) -> TrainConfig:
    tree: dict[str, Any] = {
        "run_dir": "run", "tokenizer": {"path": "t"}, "data": {"path": "d"}, "actor": {"init": {}},
        "rewards": [{"kind": "verifier", "name": "gsm8k"}],
        "rollout": {"batch_size": SIZE * GROUPS, "group_size": SIZE, "max_response_tokens": LONGEST},
        "overlap": {"inter": False},
    }  # fmt: skip
    if changes["algorithm.preset"] == "ppo":
        tree["critic"] = {"init": {}}
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return TrainConfig.model_validate(tree)


def trained(config: TrainConfig) -> list[torch.Tensor]:
    """Losses and the actor's gradient on a fixed batch, on which every bound of a ratio is reached."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 6, 2, 5, 4, 6]
    total = sum(lengths)

    def drawn(count: int = total, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(count, generator=generator) * scale

    behaviour_T, values_T, scores_B = -drawn().abs(), drawn(), drawn(len(lengths), 2.0)
    algorithm, kl = Algorithm.of(config), config.ppo.kl
    scored = ScoredBatch(
        behaviour_logp_T=behaviour_T,
        reference_logp_T=None if kl.mode == "none" else behaviour_T + drawn(scale=0.3),
        values_T=values_T if config.algorithm.critic else None,
        scores_B=scores_B,
        lengths_B=lengths,
        truncated_B=torch.tensor([each == LONGEST for each in lengths]),
        group_size=SIZE,
        greedy=GreedyRows(drawn(GROUPS), torch.tensor([2, 6, 3]), torch.tensor([False, True, False]))
        if config.algorithm.greedy
        else None,
    )
    made = algorithm.experience(scored, kl.coefficient)
    stale_T = behaviour_T + drawn(scale=0.5)
    proximal_T = stale_T if algorithm.ppo.staleness == "decoupled" else None
    old_T, weight_T = algorithm.ratio_base(behaviour_T, proximal_T, made.lengths_B)
    shares = algorithm.row_weights(lengths, [True] * len(lengths))
    share_T = torch.cat([torch.full((length,), share) for length, share in zip(lengths, shares, strict=True)])
    logp_T = (behaviour_T + drawn(scale=0.6)).requires_grad_()
    entropy_T = (logp_T * drawn()).abs()
    targets = ActorTargets(
        old_T, made.advantages_T, made.reference_logp_T, weight_T, share_T, torch.tensor(lengths), stale_T=None
    )
    loss, _ = algorithm.actor_loss(logp_T, entropy_T, targets, kl.coefficient, total)
    found = [loss.detach(), *torch.autograd.grad(loss, logp_T)]
    if config.algorithm.critic:
        found.append(algorithm.critic_loss(values_T + drawn(scale=0.5), values_T, made.returns_T, total)[0])
    return found


def cases() -> list[tuple[str, str]]:
    """Every variant with every setting; section `dpo` and the scale of pairs are refused by rules of their own."""
    pairs = {name for name, changes in VARIANTS.items() if configured(changes).algorithm.pairs}
    return [
        (variant, key)
        for variant in VARIANTS
        for key in CHANGES
        if not (key.startswith("dpo.") and variant not in pairs) and not (key == "algorithm.scale" and variant in pairs)
    ]


@pytest.mark.parametrize(("variant", "key"), cases())
def test_a_setting_is_refused_if_and_only_if_it_changes_nothing(variant: str, key: str) -> None:
    base = VARIANTS[variant]
    plain = configured(base)
    section, _, name = key.rpartition(".")
    now = getattr(reduce(getattr, section.split("."), plain), name)
    changed = configured({**base, key: next(value for value in CHANGES[key] if value != now)})
    refused = [problem for problem in unread_settings(changed) if problem.startswith(f"{key} is ")]
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(trained(plain), trained(changed), strict=True))
    assert same == bool(refused), refused
    assert not list(unread_settings(plain))
