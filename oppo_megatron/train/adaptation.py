"""Adaptation from step to step: delta, the chunk size, the KL coefficient, and the costs by which rounds are woven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from oppo_megatron.algorithms.experience import Experience
from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.control.chunk_tuner import ChunkTuner, DecodeLaw, StepCost
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.control.occupancy import length_gap
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Rollout, StepSignals
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs
from oppo_megatron.train.logs.facts import StepFacts
from oppo_megatron.train.score_exchange import sum_over_ranks

COSTS_KEPT = 0.5
"""How much what was measured before a step counts against what the step measured."""


@dataclass
class Adaptation:
    """The controllers of one rank; `decoding` are the actor's groups on ranks that hold it, where the chunk size is tuned."""

    world: World
    scheduler: OvercommitScheduler
    chunk: ChunkTuner
    kl: KLController
    planner: RoundPlanner
    costs: CostMeter
    decoding: RoleGroups | None

    def learn_costs(self, step: int) -> None:
        """What all ranks measured becomes the cost model of the next step's rounds, where they are woven by it.

        Before the update: the ranks have just met for the scores, and the actor's may later be ahead of the critic's.
        """
        if self.planner.generator != "woven":
            return
        with waiting_for(f"measured costs, step {step}", self.world.activity):
            sums = sum_over_ranks(self.costs.to_vector(), self.world.device)
        self.planner.learn(CostMeter(self.costs.stages, sums).costs(Costs()))
        self.costs.forget(COSTS_KEPT)

    def learn_batch(self, facts: StepFacts, batch: Sequence[Rollout], experience: Experience) -> None:
        """Delta and KL after an update; their inputs are the same on every rank."""
        assert facts.scores is not None
        with facts.planning():
            facts.length_gap = length_gap(batch, self.scheduler.buffer.rollouts)
            signals = StepSignals(experience.stats.score_mean, facts.tail_waste, facts.scores.ess, facts.length_gap)
            facts.delta_reason = self.scheduler.end_step(facts.step, signals).reason
            self.kl.observe(experience.stats.kl_mean, len(batch))

    def learn_times(self, facts: StepFacts, cost: StepCost) -> None:
        """The chunk size goes by the times of the actor's output rank."""
        groups = self.decoding
        if groups is None:
            return
        measured = torch.tensor([cost.seconds, *cost.rounds.sums()], dtype=torch.float64, device=self.world.device)
        if groups.all.size() > 1:
            with waiting_for(f"seconds of the rollout, step {facts.step}", self.world.activity):
                dist.broadcast(measured, groups.output_rank, group=groups.all)
        seconds, *sums = measured.tolist()
        cost = replace(cost, seconds=seconds, rounds=DecodeLaw(*sums))
        facts.chunk_reason = self.chunk.observe(facts.step, cost).reason
