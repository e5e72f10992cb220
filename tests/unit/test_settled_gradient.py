"""Whether ending settled responses early changes the expected gradient, by enumeration of a tabular policy.

A policy over the tokens a, b and END has logits of its own for each prefix.  All pairs of responses make a group, with their
probabilities; rewards, advantages, weights and losses are the product's own.  What `certain` allows has to leave the expected
gradient what it is, and each setting that it refuses has to change it: neither is taken on trust.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.preflight.settings import check_train
from oppo_megatron.rewards.rules.formats import FormatRule
from tests.unit.test_preflight_settings import put, settings_without_critic

LONGEST, END = 3, 2
RULE = FormatRule("ab*", whole=True)
"""Settled as 0 by `b` and by `aa`; `ab` and `abb` may yet be either."""

Response = tuple[int, ...]
PREFIXES = {prefix: at for at, prefix in enumerate(p for n in range(LONGEST) for p in product((0, 1), repeat=n))}


def text(response: Response) -> str:
    return "".join("ab"[token] for token in response if token != END)


def responses() -> Iterator[Response]:
    for prefix in PREFIXES:
        yield (*prefix, END)
    yield from product((0, 1), repeat=LONGEST)


def cut(response: Response) -> Response:
    """Up to the token that settles it."""
    prefixes = (response[:n] for n in range(1, len(response) + 1))
    return next((prefix for prefix in prefixes if RULE.settled(text(prefix)) is not None), response)


def table(seed: int) -> Tensor:
    """Logits by prefix and token."""
    return torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def places(response: Response) -> tuple[list[int], list[int]]:
    return [PREFIXES[response[:n]] for n in range(len(response))], list(response)


@dataclass
class Policies:
    """The log-probs of the policy that samples and of the one that is updated, and what else scores."""

    config: TrainConfig

    def __post_init__(self) -> None:
        rollout, moved = self.config.rollout, self.config.ppo.epochs > 1 or self.config.overlap.inter
        self.sampled = torch.log_softmax(table(1), 1)
        logits = table(1)
        if rollout.top_k:
            logits = logits.masked_fill(logits < logits.topk(rollout.top_k, 1).values[:, -1:], -torch.inf)
        self.drawn = torch.softmax(logits, 1)
        self.updated = (table(1) + 0.5 * table(4) * moved).requires_grad_()
        self.logp = torch.log_softmax(self.updated, 1)
        self.entropy = -(self.logp.exp() * self.logp).sum(1)
        self.reference, self.values = torch.log_softmax(table(2), 1), table(3)

    def probability(self, response: Response) -> float:
        return float(self.drawn[places(response)].prod())

    def loss(self, algorithm: Algorithm, pair: tuple[Response, Response]) -> Tensor:
        nodes, tokens = (sum(parts, []) for parts in zip(*map(places, pair), strict=True))
        lengths = [len(response) for response in pair]
        kl, critic = self.config.ppo.kl.mode, algorithm.choices.critic
        reference_T = self.reference[nodes, tokens] if kl != "none" else None
        limits = [len(text(response)) == LONGEST for response in pair]
        scored = ScoredBatch(
            self.sampled[nodes, tokens], reference_T, self.values[nodes, tokens] if critic else None,
            torch.tensor([RULE.score(text(response)) for response in pair], dtype=torch.float64), lengths,
            torch.tensor(limits), group_size=2,
        )  # fmt: skip
        made = algorithm.experience(scored, 0.5, check=False)
        counted = None if made.counted_B is None else made.counted_B.tolist()
        shares = torch.tensor(algorithm.row_weights(lengths, counted), dtype=torch.float64)
        lengths_R = torch.tensor(lengths)
        targets = ActorTargets(
            made.old_logp_T, made.advantages_T, reference_T, share_T=shares.repeat_interleave(lengths_R), lengths_R=lengths_R
        )
        return algorithm.actor_loss(self.logp[nodes, tokens], self.entropy[nodes], targets, 0.5, sum(lengths))[0]


def gradients(config: TrainConfig) -> tuple[Tensor, Tensor]:
    """The expected gradients of the whole responses, and of those that end early."""
    policies, algorithm = Policies(config), Algorithm.of(config)
    whole = Counter({response: policies.probability(response) for response in responses()})
    early: Counter[Response] = Counter()
    for response, probability in whole.items():
        early[cut(response)] += probability
    assert sum(whole.values()) == pytest.approx(1) and len(early) < len(whole)
    found = []
    for law in (whole, early):
        possible = [response for response, probability in law.items() if probability]
        pairs = product(possible, repeat=2)
        expected = sum(law[one] * law[other] * policies.loss(algorithm, (one, other)) for one, other in pairs)
        assert isinstance(expected, Tensor)
        found.append(torch.autograd.grad(expected, policies.updated, retain_graph=True)[0])
    return found[0], found[1]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return settings_without_critic(tmp_path) | {
        "rewards": [{"kind": "verifier", "name": "format", "pattern": "ab*"}],
        "rollout": {"batch_size": 2, "group_size": 2, "max_response_tokens": LONGEST},
        "algorithm": {"preset": "dr_grpo"},
        "overlap": {"inter": False},
        "settle": {"mode": "certain", "every": 1},
    }


def config_of(settings: dict[str, Any], changes: dict[str, Any]) -> TrainConfig:
    for key, value in changes.items():
        put(settings, key, value)
    return TrainConfig.model_validate(settings)


EXACT: list[dict[str, Any]] = [
    *({"algorithm.reduction": how, "algorithm.baseline": to, "algorithm.scale": by}
      for how, to, by in product(("constant", "sequence_sum"), ("group_mean", "others", "none"), ("none", "group_std"))),
    *({"algorithm.reduction": how, "algorithm.ratio": ratio}
      for how, ratio in product(("constant", "sequence_sum"), ("sequence", "sequence_token", "sequence_product"))),
    {"algorithm.scale": "batch_std"}, {"algorithm.scale": "advantage_std"},
    {"algorithm.objective": "plain"}, {"algorithm.objective": "cispo", "ppo.clip_high": 4.0},
    {"ppo.reward_normalization": "batch"}, {"ppo.reward_clip": 0.5}, {"ppo.dual_clip": 3.0},
]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [pytest.param(each, marks=pytest.mark.long) if 0 < n < 18 and n % 3 else each for n, each in enumerate(EXACT)],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_what_certain_allows_leaves_the_expected_gradient_what_it_is(
    settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = config_of(settings, changes)
    assert check_train(config) == []
    whole, early = gradients(config)
    largest = float(whole.abs().max())
    assert largest > 1e-3 and (whole - early).abs().max() < 1e-15 * max(1.0, largest)


ON = {"initial": 1, "max": 1}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"algorithm.reduction": "token_mean"}, "algorithm.reduction is token_mean"),
    ({"algorithm.reduction": "sequence_mean"}, "algorithm.reduction is sequence_mean"),
    ({"algorithm.reduction": "group_token_mean"}, "algorithm.reduction is group_token_mean"),
    ({"algorithm.scale": "whiten"}, "algorithm.scale is whiten"),
    ({"ppo.kl": {"mode": "penalty"}}, "ppo.kl.mode is penalty"),
    ({"ppo.kl": {"mode": "score"}}, "ppo.kl.mode is score"),
    ({"ppo.kl": {"mode": "loss", "estimator": "k3"}}, "ppo.kl.mode is loss"),
    ({"ppo.entropy_coefficient": 0.1}, "ppo.entropy_coefficient is 0.1"),
    ({"ppo.gamma": 0.9}, "ppo.gamma is 0.9"),
    ({"overlong.buffer": 2}, "overlong.buffer is 2"),
    ({"overlong.mask": True}, "overlong.mask is true"),
    ({"ppo.truncated_score": -1.0}, "ppo.truncated_score is -1"),
    ({"ppo.missing_eos_penalty": 1.0}, "ppo.missing_eos_penalty is 1"),
    ({"ppo.epochs": 2, "ppo.clip": 0.05}, "ppo.epochs is 2"),
    ({"overlap": {"inter": True, "delta": ON}, "ppo.clip": 0.05}, "overlap.inter is true and carries responses"),
    ({"rollout.top_k": 2}, "rollout.top_k is 2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), REFUSED, ids=[expected for _, expected in REFUSED])
def test_what_certain_refuses_would_change_the_expected_gradient(
    settings: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    config = config_of(settings, changes)
    problems = check_train(config)
    assert len(problems) == 1 and problems[0].startswith(f"settle.mode is certain, but {expected}"), problems
    assert check_train(config_of(settings, {"settle.mode": "predicted"})) == []
    whole, early = gradients(config)
    assert (whole - early).abs().max() > 1e-4


def test_a_critic_would_change_the_expected_gradient(settings: dict[str, Any], tmp_path: Path) -> None:
    choices = {"preset": "ppo", "reduction": "constant", "scale": "none"}
    critic = {"critic": {"checkpoint": tmp_path / "actor", "fresh_head": True}}
    config = config_of(settings, {"algorithm": choices, "ppo": {"kl": {"mode": "none"}}} | critic)
    assert [problem.partition(", and")[0] for problem in check_train(config)] == [
        "settle.mode is certain, but algorithm.baseline is critic"
    ]
    whole, early = gradients(config)
    assert (whole - early).abs().max() > 1e-4
