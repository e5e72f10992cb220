"""What distinguishes plain PPO, intra-step overlap, inter-step overlap and both.  One loop runs them all."""

from __future__ import annotations

from dataclasses import dataclass

from oppo_megatron.config.overlap import DeltaConfig, OverlapConfig
from oppo_megatron.config.places import decodes_and_scores
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class StepPlan:
    """How a step's rollout and scoring are laid out in time.

    `stream`: scorers prefill every round, beside the actor's decoding; else they score the finished batch.
    `wait_for_critic`: the next step starts when the critic's update has ended; else the update runs beside its decoding,
    which needs the critic no sooner than its first scored chunk.
    """

    stream: bool
    wait_for_critic: bool


def plan_step(overlap: OverlapConfig) -> StepPlan:
    """The plan that the intra-step switch asks for."""
    return StepPlan(stream=overlap.intra, wait_for_critic=not (overlap.intra and overlap.hide_critic))


def delta_rule(overlap: OverlapConfig) -> DeltaConfig:
    """The delta rule in force: without inter-step overlap it is fixed at 0, which is plain PPO."""
    return overlap.delta if overlap.inter else DeltaConfig(rule="fixed", initial=0, min=0, max=0)


def round_generator(overlap: OverlapConfig, site: Site) -> str:
    """Name of the generator of the rounds: woven only where there are ranks that decode and score."""
    if not overlap.intra:
        return "sequential"
    if overlap.schedule != "auto":
        return overlap.schedule
    return "woven" if decodes_and_scores(site.places) else "intra"
