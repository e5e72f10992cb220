"""Recomputes a run from its records, with transformers and plain torch and no function of the product.
Reads `config.yaml`, `rollouts.jsonl` and the initial models; computes everything from log-probs to weights."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.replay.formulas import Batch, actor_loss, advantages_of, critic_loss, kl_of, row_ratio, scores_for_training
from tests.replay.recipe import PRESETS, Recipe

GAIN, MAX_ERROR = 0.1, 0.2
Row = Mapping[str, Any]


@dataclass
class Replayed:
    """Final weights by name, and figures of each step.

    `gaps`: largest difference of a recorded log-prob from its version's weights.
    `sizes`: Kish's effective sample size as a share of the stale tokens."""

    actor: dict[str, Tensor] = field(default_factory=dict)
    critic: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)


class Trained:
    def __init__(self, model: Any, settings: Mapping[str, Any], total: int):
        self.model, self.settings, self.total, self.done = model, settings, total, 0
        parameters = dict(model.named_parameters())
        plain = [each for name, each in parameters.items() if each.dim() > 1 and not name.endswith(".bias")]
        exempt = [each for name, each in parameters.items() if each.dim() == 1 or name.endswith(".bias")]
        self.adam = torch.optim.AdamW(
            [{"params": plain, "weight_decay": settings["weight_decay"]}, {"params": exempt, "weight_decay": 0.0}],
            lr=settings["lr"], betas=tuple(settings["betas"]), eps=settings["eps"],
        )  # fmt: skip

    def rate(self) -> float:
        """The coming update's rate: a linear ramp to `lr`, then the decay to `min_lr` at the end."""
        settings, warmup = self.settings, self.settings["warmup_steps"]
        if warmup and self.done <= warmup:
            begin = settings["lr"] / warmup
            return begin + (settings["lr"] - begin) * self.done / warmup
        if settings["decay"] == "constant":
            return settings["lr"]
        share = (self.done - warmup) / (self.total - warmup)
        left = 1 - share if settings["decay"] == "linear" else (1 + math.cos(math.pi * share)) / 2
        return settings["min_lr"] + (settings["lr"] - settings["min_lr"]) * left

    def step(self, loss: Tensor) -> float:
        """One update; the learning rate that it was made with."""
        rate = self.rate()
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.zero_grad()
        loss.backward()
        if self.settings["clip_grad"] > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip_grad"])
        self.adam.step()
        self.done += 1
        return rate


def logprobs(model: Any, row: Row, temperature: float) -> tuple[Tensor, Tensor]:
    prompt, response = row["prompt_tokens"], row["tokens"]
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    table = logits.log_softmax(-1)
    return table[torch.arange(len(response)), torch.tensor(response)], -(table.exp() * table).sum(-1)


def likeliest(model: Any, row: Row) -> Tensor:
    """The largest log-prob that a token could have had, at each place of the response."""
    prompt, response = row["prompt_tokens"], row["tokens"]
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1).amax(-1)


def values(model: Any, row: Row) -> Tensor:
    """The critic's value of every state in which a token of the response was drawn."""
    prompt, response = row["prompt_tokens"], row["tokens"]
    hidden = model.model(torch.tensor([[*prompt, *response]])).last_hidden_state[0, len(prompt) - 1 : -1]
    return model.score(hidden)[:, 0]


def minibatches(rows: int, size: int, count: int, epochs: int, seed: int, step: int) -> Iterator[list[int]]:
    """The rows of every update: an order of each epoch's own of the groups by a counter-based generator, cut into equal parts."""
    groups = rows // size
    count = min(count, groups)
    for epoch in range(epochs):
        order = np.arange(groups)
        if count > 1:
            np.random.Generator(np.random.Philox(key=[seed, step * 65536 + epoch])).shuffle(order)
        for part in np.array_split(order, count):
            yield [group * size + member for group in part.tolist() for member in range(size)]


class Replay:
    """The run in `run`, whose recipe is that of its preset but for `choices`; `versions`: compare tokens with their weights."""

    def __init__(
        self, run: Path, versions: bool = False, token_rewards: Callable[[Row], list[float]] | None = None, **choices: Any
    ):
        self.token_rewards = token_rewards
        self.config = yaml.safe_load((run / "config.yaml").read_text())
        self.recipe = Recipe.of(self.config, **{**PRESETS[self.config["algorithm"]["preset"]], **choices})
        rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
        self.batches = [[row for row in rows if row["step"] == step] for step in sorted({row["step"] for row in rows})]
        self.group_size = self.config["rollout"].get("group_size", 1)
        self.neighbours = self.group_size + (self.recipe.baseline == "greedy")  # sequence ids of a prompt
        # Greedy draws are of the policy at temperature 1.
        self.temperature = self.config["rollout"]["temperature"] or 1.0
        # Pairs are compared at temperature 1.
        self.compared = 1.0 if self.recipe.objective == "dpo" else self.temperature
        self.coefficient, self.seen, self.versions = (self.recipe.kl_coefficient, torch.zeros(0, dtype=torch.float64), versions)
        self.kept: list[dict[str, Tensor]] = []

    def run(self) -> Replayed:
        ppo, out = self.config["ppo"], Replayed()
        warmup, updates = ppo["critic_warmup_steps"], ppo["epochs"] * ppo["minibatches"]
        start = self.config["actor"]["checkpoint"]
        reference = (self.config["reference"] or {}).get("checkpoint") or start
        self.reference = load(AutoModelForCausalLM, reference).requires_grad_(False)
        policy, optimizer = load(AutoModelForCausalLM, start), self.config["actor"]["optimizer"]
        self.actor = Trained(policy, optimizer, updates * (len(self.batches) - warmup))
        self.critic = None
        if self.recipe.baseline == "critic":
            model = load(AutoModelForSequenceClassification, self.config["critic"]["checkpoint"])
            self.critic = Trained(model, self.config["critic"]["optimizer"], updates * len(self.batches))
        for step, rows in enumerate(self.batches, 1):
            self._step(step, rows, out, trains_actor=step > warmup)
        out.actor = dict(self.actor.model.state_dict())
        out.critic = {} if self.critic is None else dict(self.critic.model.state_dict())
        return out

    def _step(self, step: int, rows: Sequence[Row], out: Replayed, trains_actor: bool) -> None:
        recipe, ppo = self.recipe, self.config["ppo"]
        if self.versions:
            assert not ppo["critic_warmup_steps"], "every step is a version"
            self.kept.append({name: each.clone() for name, each in self.actor.model.state_dict().items()})
            out.gaps.append(self._furthest(rows))
        greedy_rows = [row for row in rows if row.get("greedy")]
        rows = [row for row in rows if not row.get("greedy")]
        batch = self._batch(rows, greedy_rows)
        out.sizes.append(self._effective_size(rows, batch))
        scores_B, greedy, self.seen = scores_for_training(batch, recipe, self.seen)
        advantages, returns = advantages_of(batch, scores_B, greedy, recipe, self.coefficient)
        old, importance = self._ratio_base(rows, batch)
        out.coefficients.append(self.coefficient)
        rate = math.nan
        cut = (ppo["minibatches"], ppo["epochs"], self.config["seed"], step)
        for chosen in minibatches(len(rows), self.group_size, *cut):
            if trains_actor:
                found = [logprobs(self.actor.model, rows[i], self.compared) for i in chosen]
                loss = actor_loss(
                    [new for new, _ in found], [entropy for _, entropy in found], [old[i] for i in chosen],
                    None if importance is None else [importance[i] for i in chosen], [advantages[i] for i in chosen],
                    [batch.reference[i] for i in chosen], [batch.groups[i] for i in chosen], recipe, self.coefficient,
                )  # fmt: skip
                rate = self.actor.step(loss)
            if self.critic is not None:
                assert batch.values is not None
                new = [values(self.critic.model, rows[i]) for i in chosen]
                befores, targets = [batch.values[i] for i in chosen], [returns[i] for i in chosen]
                self.critic.step(critic_loss(new, befores, targets, recipe))
        out.rates.append(rate)
        if trains_actor:
            self._follow_target(batch)

    @torch.no_grad()
    def _batch(self, rows: Sequence[Row], greedy: Sequence[Row]) -> Batch:
        return Batch(
            scores_B=torch.tensor([row["reward"] for row in rows], dtype=torch.float64).float(),
            groups=[row["seq_id"] // self.neighbours for row in rows], cut=[row["finish_reason"] == "length" for row in rows],
            old=[torch.tensor(row["logprobs"], dtype=torch.float64).float() for row in rows],
            reference=[logprobs(self.reference, row, self.compared)[0] for row in rows],
            values=None if self.critic is None else [values(self.critic.model, row) for row in rows],
            token_rewards=self.token_rewards and [torch.tensor(self.token_rewards(row)) for row in rows],
            greedy={row["seq_id"] // self.neighbours: (row["reward"], row["finish_reason"] == "length") for row in greedy},
        )  # fmt: skip

    @torch.no_grad()
    def _effective_size(self, rows: Sequence[Row], batch: Batch) -> float:
        now = [logprobs(self.actor.model, row, self.temperature)[0] for row in rows]
        weights = torch.cat([(new - old).exp().double() for new, old in zip(now, batch.old, strict=True)])
        return float(weights.sum() ** 2 / (weights.square().sum() * weights.numel()))

    @torch.no_grad()
    def _ratio_base(self, rows: Sequence[Row], batch: Batch) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        if self.recipe.staleness == "behaviour":
            return batch.old, None
        proximal = [logprobs(self.actor.model, row, self.temperature)[0] for row in rows]
        ratios = [row_ratio(now, then, self.recipe) for now, then in zip(proximal, batch.old, strict=True)]
        return proximal, [ratio.clamp(max=self.recipe.weight_cap) for ratio in ratios]

    def _follow_target(self, batch: Batch) -> None:
        """Ziegler et al. 2019: the coefficient moves by the relative error of the KL of a response."""
        if self.recipe.kl_target is None:
            return
        kl = [
            float(kl_of(old, reference, self.recipe.estimator).double().sum())
            for old, reference in zip(batch.old, batch.reference, strict=True)
        ]
        error = sum(kl) / len(kl) / self.recipe.kl_target - 1
        self.coefficient *= 1 + GAIN * min(max(error, -MAX_ERROR), MAX_ERROR)

    @torch.no_grad()
    def _furthest(self, rows: Sequence[Row]) -> float:
        """The largest difference of log-probs from their version's weights, or of a greedy token from the likeliest one."""
        gap, now = 0.0, self.kept[-1]
        for version, weights in enumerate(self.kept):
            touched = [row for row in rows if version in row["versions"]]
            if not touched:
                continue
            self.actor.model.load_state_dict(weights)
            for row in touched:
                of_version = torch.tensor(row["versions"]) == version
                temperature = 1.0 if row.get("greedy") else self.temperature
                found = logprobs(self.actor.model, row, temperature)[0]
                if row.get("greedy"):
                    gap = max(gap, float((likeliest(self.actor.model, row) - found)[of_version].max()))
                gap = max(gap, float((found - torch.tensor(row["logprobs"]))[of_version].abs().max()))
        self.actor.model.load_state_dict(now)
        return gap


def load(kind: Any, directory: str) -> Any:
    """A model of transformers whose padding token is a token like any other: there is no padding, and it may be drawn."""
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None  # its row would have no gradient
    return model
