"""Rollouts that grow by random chunks past streamed scorers, and the full-sequence forward of what they became."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.engine.executor import Executor, Links, build_links
from oppo_megatron.engine.round_runner import Decoding, RoundRunner
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.batch import join_rows, pack_responses
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.kv.sequence_cache import KVCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.mcore.vocab import token_logprobs
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Site
from tests.gloo.models import CPU, MAX_LENGTH, Whole, full_outputs, load, world_groups

TEMPERATURE = 0.7
SIZES = [(1, 1), (1, 9), (5, 1), (3, 4), (7, 12), (2, 6), (4, 3), (1, 14), (6, 2)]
"""(prompt tokens, response tokens)"""
ROLES = ("reward", "reference", "critic")
STREAMED = (*ROLES, "process")
"""`process`: a reward model that gives an output at every response token."""
PREFILL_TOKENS = 16


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
        clock = 0
        while not all(r.finished for r in self.rollouts):
            clock += 1
            for rollout, end in zip(self.rollouts, self.ends, strict=True):
                if not rollout.finished:
                    rollout.tokens[:] = end[: len(rollout.tokens) + self.random.choice([0, 1, 1, 2, 5])]
                    rollout.finish_clock = clock if rollout.tokens == end else None
            yield self.random.sample(self.rollouts, len(self.rollouts))


def _expected(role: str, model: RoleModel, rollouts: Sequence[Rollout]) -> Tensor | None:
    if role == "reward":
        wholes = [Whole([*r.prompt.tokens, *r.tokens], [r.num_tokens - 1]) for r in rollouts]
        return full_outputs(model, wholes)
    if role == "process":
        return full_outputs(
            model, [Whole([*r.prompt.tokens, *r.tokens], [*range(len(r.prompt.tokens), r.num_tokens)]) for r in rollouts]
        )
    batches = pack_responses([r.prompt.tokens for r in rollouts], [r.tokens for r in rollouts], 40, CPU)
    outputs = forward_rows(
        model,
        batches,
        lambda batch, out: out if role == "critic" else token_logprobs(out, batch.targets_R, model.vocab, TEMPERATURE)[0],
    )
    return join_rows(outputs, [len(r.tokens) for r in rollouts], batches) if outputs else None


class Scorers:
    """Some scoring roles on the same ranks, in rounds that decode nothing."""

    def __init__(self, models: dict[str, RoleModel], slots: dict[str, int], links: Links, site: Site):
        rank = dist.get_rank()
        self.workers = {
            role: ScoringWorker(
                "reward" if role == "process" else role, model, _cache(model, slots[role]), temperature=TEMPERATURE
            )
            for role, model in models.items()
        }
        planner = RoundPlanner(
            site,
            "woven",
            ("auto", PREFILL_TOKENS),
            MAX_LENGTH,
            MAX_LENGTH,
            ActorBook(site.placements["actor"].dp, 1, lambda _: 1),
            {role: _book(role, site.placements[role].dp, slots[role]) for role in models},
        )
        executor = Executor(rank, dict(self.workers), links, 60.0, CPU, lambda *_: None)
        coords_by_role = {
            role: coords.replica for role, placement in site.placements.items() if (coords := placement.coords(rank)) is not None
        }
        self.rounds = RoundRunner(planner, executor, coords_by_role, None, None, self.workers)

    def advance(self, rollouts: Sequence[Rollout]) -> None:
        """Prefill what is new of each rollout; finished ones are then complete, in as many rounds as that takes."""
        self._round(rollouts)
        while self.rounds.owes(done := [r for r in rollouts if r.finished]):
            self._round(done)

    def error(self, role: str, rollouts: Sequence[Rollout]) -> float:
        """Largest difference from the full forward, over this replica's finished rollouts; 0 before the last stage."""
        worker, book = self.workers[role], self.rounds.planner.scorers[role]
        mine = [r for r in rollouts if book.replica(r.seq_id) == self.rounds.replicas[role]]
        expected = _expected(role, worker.model, mine) if mine else None
        if expected is None:
            return 0.0
        found = worker.collect(mine)
        assert found.shape == expected.shape == (len(mine) if role == "reward" else sum(len(r.tokens) for r in mine),)
        assert len(expected) == 1 or expected.std() > 0.05
        return float((found - expected).abs().max())

    def _round(self, rollouts: Sequence[Rollout]) -> None:
        self.rounds.run([], rollouts, 1, Decoding(0, 0, _nothing_decoded))


def _book(role: str, replicas: int, slots: int) -> ScoringBook:
    if role == "process":
        return ScoringBook("reward", replicas, slots, every_token=True)
    return ScoringBook(role, replicas, slots)


def _nothing_decoded() -> Any:
    raise AssertionError("no round decodes")


def _score(role: str, model: RoleModel, slots: int, links: Links, site: Site) -> dict[str, float]:
    """Stream to a scorer; halfway the critic's weights change, and the first to finish are taken out and scored anew."""
    scorers = Scorers({role: model}, {role: slots}, links, site)
    cache, growth, errors, taken = scorers.workers[role].cache, Growth(slots), [0.0], list[Rollout]()
    assert cache.num_slots == slots
    with mock.patch.object(cache, "open", wraps=cache.open) as opened:
        for index, rollouts in enumerate(growth.rounds()):
            scorers.advance(rollouts)
            done = [r for r in rollouts if r.finished]
            if index == 2:
                if role == "critic":
                    with torch.no_grad():
                        next(model.parameters()).mul_(1.1)
                    model.end_weight_update()
                    scorers.rounds.scorers_changed()
                    assert not cache.seq_ids
                    scorers.advance(rollouts)
                errors.append(scorers.error(role, done))
                taken = done[:1]
                scorers.rounds.retire(taken)
                scorers.advance(taken)
        num_opened = opened.call_count
    scorers.rounds.executor.drain()
    assert not cache.seq_ids, "all have finished, so no slot is taken"
    errors.append(scorers.error(role, growth.random.sample(growth.rollouts, len(SIZES))))
    return {"error": max(errors), "opened": num_opened, "taken": len(taken)}


def together(models: dict[str, str], tp: int, pp: int) -> dict[str, float]:
    """Three roles of different sizes at once, each with its own slots and evictions, woven into each other's gaps."""
    groups = world_groups(tp, pp)
    placement = RolePlacement(groups.ranks, groups.tp, groups.pp, groups.dp)
    site = Site({"actor": placement, **dict.fromkeys(ROLES, placement)})
    loaded = {role: load(models[role], groups, "lm" if role == "reference" else "scalar") for role in ROLES}
    scorers = Scorers(loaded, {"reward": 2, "reference": 9, "critic": 3}, build_links(site), site)
    growth = Growth(5)
    for rollouts in growth.rounds():
        scorers.advance(rollouts)
    scorers.rounds.executor.drain()
    return {role: scorers.error(role, growth.rollouts) for role in ROLES}


def _cache(model: RoleModel, slots: int) -> KVCache:
    return model.new_cache(len(SIZES), budget_bytes=slots * _slot_bytes(model) + 5)


def _slot_bytes(model: RoleModel) -> int:
    shape = model.shape
    layers, heads = len(model.decoder.layers), shape.num_kv_heads // model.groups.tp
    return 2 * layers * heads * MAX_LENGTH * shape.head_dim * 4


def streamed_against_full(models: dict[str, str], tp: int, pp: int) -> dict[str, dict[str, float]]:
    """role/slots -> largest difference, and how many times a sequence was admitted."""
    groups: RoleGroups = world_groups(tp, pp)
    placement = RolePlacement(groups.ranks, groups.tp, groups.pp, groups.dp)
    reports = {}
    for role in STREAMED:
        site = Site({"actor": placement, role: placement})
        links = build_links(site)
        for slots in (len(SIZES), 3, 1):
            model = load(models[role], groups, "lm" if role == "reference" else "scalar")
            reports[f"{role}/{slots}"] = _score(role, model, slots, links, site)
    return reports
