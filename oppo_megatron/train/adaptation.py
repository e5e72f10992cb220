"""Adaptation from step to step: delta, the chunk size, the KL coefficient, and the costs by which rounds are woven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oppo_megatron.algorithms.experience import Experience
from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.control.chunk_tuner import ChunkTuner, StepCost
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.control.occupancy import length_gap
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import ALONE, Members, Rollout, StepSignals
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs
from oppo_megatron.train.logs.facts import StepFacts
from oppo_megatron.train.score_exchange import sum_over_ranks

COSTS_KEPT = 0.5
"""How much what was measured before a step counts against what the step measured."""


@dataclass
class Adaptation:
    """The controllers of one rank.  `tunes_chunk`: the chunk size is searched, which rounds without scoring gain nothing by.
    `costs`: what this rank's actions took in the step under way.

    All that plan a round need the same size, also ranks that only score: it goes by what the scores bring to every rank.
    """

    world: World
    scheduler: OvercommitScheduler
    chunk: ChunkTuner
    kl: KLController
    planner: RoundPlanner
    costs: CostMeter
    tunes_chunk: bool
    members: Members = ALONE
    _learned: int = 0  # steps

    def __post_init__(self) -> None:
        self._of_run, self._of_late = CostMeter(self.costs.stages), CostMeter(self.costs.stages)

    def learn_costs(self, step: int) -> None:
        """What all ranks measured becomes the cost model of the next step's rounds, where they are woven by it.

        Before the update: the ranks have just met for the scores, and the actor's may later be ahead of the critic's.
        """
        sums = self.costs.take()
        self._learned += 1
        warm = self._learned > 2
        self._of_run.join(sums, keep=float(warm))  # the first step warms up, and counts where no other follows
        if self.planner.generator != "woven":
            return
        with waiting_for(f"measured costs, step {step}", self.world.activity):
            sums = sum_over_ranks(sums, self.world.device)
        self._of_late.join(sums, COSTS_KEPT)
        self.planner.learn(self._of_late.costs(Costs()))

    def measured_costs(self) -> Costs | None:
        """What actions have taken on all ranks, over all steps but the first; None where no step was made; collective."""
        sums = sum_over_ranks(self._of_run.to_vector(), self.world.device)
        of_run = CostMeter(self.costs.stages, sums)
        return None if of_run.empty else of_run.costs(Costs())

    def learn_batch(
        self, facts: StepFacts, batch: Sequence[Rollout], experience: Experience, *, actor_trained: bool = True
    ) -> None:
        """Delta and KL after an update of the actor; their inputs are the same on every rank."""
        assert facts.scores is not None
        with facts.planning():
            facts.length_gap = length_gap(batch, self.members.to_train(self.scheduler.buffer.rollouts))
            if not actor_trained:
                facts.delta_reason = f"step {facts.step}: delta stays, the critic warms up"
                return
            signals = StepSignals(
                experience.stats.shaped_score_mean, facts.tail_waste, facts.scores.ess, facts.length_gap
            )
            facts.delta_reason = self.scheduler.end_step(facts.step, signals).reason
            if experience.stats.kl_mean is not None:
                self.kl.observe(experience.stats.kl_mean)

    def learn_times(self, facts: StepFacts, cost: StepCost) -> None:
        """The chunk size, by what the step cost."""
        if self.tunes_chunk:
            facts.chunk_reason = self.chunk.observe(facts.step, cost).reason
