"""Rollouts that grow by random chunks past streamed scorers, and the full-sequence forward of what they became."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.runtime.batch import join_rows, pack_responses
from oppo_megatron.runtime.mcore.groups import RoleGroups
from oppo_megatron.runtime.mcore.kv_cache import KVCache
from oppo_megatron.runtime.mcore.model import RoleModel
from oppo_megatron.runtime.mcore.training import forward_rows
from oppo_megatron.runtime.mcore.vocab_parallel import token_logprobs
from oppo_megatron.runtime.scoring import Scorer
from tests.gloo.models import CPU, MAX_LENGTH, Whole, full_outputs, load, world_groups

TEMPERATURE = 0.7
SIZES = [(1, 1), (1, 9), (5, 1), (3, 4), (7, 12), (2, 6), (4, 3), (1, 14), (6, 2)]
"""(prompt tokens, response tokens)"""
ROLES = ("reward", "reference", "critic")


class Growth:
    """Rollouts with a fixed end that grow by chunks of 0 to 5 tokens."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.rollouts, self.ends = [], []
        for i, (num_prompt, num_response) in enumerate(SIZES):
            tokens = tuple(self.random.randrange(64) for _ in range(num_prompt))
            self.rollouts.append(Rollout(Prompt(100 + i, i, "", tokens), admission=i))
            self.ends.append([self.random.randrange(64) for _ in range(num_response)])

    def rounds(self) -> Iterator[list[Rollout]]:
        """Until all have ended, the rollouts in some order after each round of growth."""
        clock = 0
        while not all(r.finished for r in self.rollouts):
            clock += 1
            for rollout, end in zip(self.rollouts, self.ends, strict=True):
                if not rollout.finished:
                    rollout.tokens = end[: len(rollout.tokens) + self.random.choice([0, 1, 1, 2, 5])]
                    rollout.finish_clock = clock if rollout.tokens == end else None
            yield self.random.sample(self.rollouts, len(self.rollouts))


def _expected(role: str, model: RoleModel, rollouts: Sequence[Rollout]) -> Tensor | None:
    """What the role says of whole sequences, without a cache."""
    if role == "reward":
        wholes = [Whole([*r.prompt.tokens, *r.tokens], [r.num_tokens - 1]) for r in rollouts]
        return full_outputs(model, wholes)
    batches = pack_responses([r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts], 40, CPU)
    group = model.groups.collection.tp
    outputs = forward_rows(
        model,
        batches,
        lambda batch, out: out if role == "critic" else token_logprobs(out, batch.targets_R, group, TEMPERATURE)[0],
    )
    return join_rows(outputs, [len(r.tokens) for r in rollouts], batches) if outputs else None


def _score(role: str, model: RoleModel, cache: KVCache, seed: int) -> dict[str, float]:
    """Stream to a scorer; halfway the critic's weights change, and the first to finish are taken out and scored anew."""
    scorer = Scorer(role, model, cache, prefill_tokens=16, temperature=TEMPERATURE)  # type: ignore[arg-type]
    growth, errors, taken = Growth(seed), [0.0], []
    with mock.patch.object(cache, "open", wraps=cache.open) as opened:
        for index, rollouts in enumerate(growth.rounds()):
            scorer.advance(rollouts)
            done = [r for r in rollouts if r.finished]
            if index == 2:
                if role == "critic":
                    with torch.no_grad():
                        next(model.parameters()).mul_(1.1)
                    scorer.reset()
                    assert not cache.seq_ids
                    scorer.advance(rollouts)
                errors.append(_error(scorer, done))
                taken = done[:1]
                for rollout in taken:
                    scorer.forget(rollout.seq_id)
                    scorer.advance([rollout])
        num_opened = opened.call_count
    assert not cache.seq_ids, "all have finished, so no slot is taken"
    errors.append(_error(scorer, growth.random.sample(growth.rollouts, len(SIZES))))
    return {"error": max(errors), "opened": num_opened, "slots": cache.num_slots, "taken": len(taken)}


def _error(scorer: Scorer, rollouts: list[Rollout]) -> float:
    if not rollouts:
        return 0.0
    expected = _expected(scorer.role, scorer.model, rollouts)
    num_outputs = scorer.num_outputs(rollouts)
    if expected is None:
        return 0.0
    found = scorer.collect(rollouts)
    assert found.shape == expected.shape == (num_outputs,)
    assert num_outputs == 1 or expected.std() > 0.05
    return float((found - expected).abs().max())


def _slot_bytes(model: RoleModel) -> int:
    shape = model.shape
    layers, heads = len(model.decoder.layers), shape.num_kv_heads // model.groups.tp
    return 2 * layers * heads * MAX_LENGTH * shape.head_dim * 4


def streamed_against_full(models: dict[str, str], tp: int, pp: int) -> dict[str, dict[str, float]]:
    """role/slots -> largest difference, slots, how many times a sequence was seated."""
    groups: RoleGroups = world_groups(tp, pp)
    reports = {}
    for role in ROLES:
        model = load(models[role], groups, "lm" if role == "reference" else "scalar")
        for slots in (len(SIZES), 3, 1):
            cache = model.new_cache(len(SIZES), budget_bytes=slots * _slot_bytes(model) + 5)
            assert cache.num_slots == slots
            reports[f"{role}/{slots}"] = _score(role, model, cache, seed=slots)
    return reports
