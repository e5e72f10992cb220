"""The differences between plain PPO, intra-step overlap, inter-step overlap and both.  One loop runs them all."""

from __future__ import annotations

from dataclasses import dataclass

from oppo_megatron.config.overlap import DeltaConfig, OverlapConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import decodes_and_scores
from oppo_megatron.schedule.rounds import Site


@dataclass(frozen=True)
class StepPlan:
    """How a step's rollout and scoring are laid out in time.

    `stream`: scorers prefill every round, beside the actor's decoding; else they score the finished batch.
    `wait_for_critic`: the next step starts when the critic's update has ended; else the update runs beside its decoding,
    which needs the critic no sooner than its first scored chunk.
    `forward_ahead`: the actor begins its update while the last scores are under way, as far as it needs none.
    """

    stream: bool
    wait_for_critic: bool
    forward_ahead: bool


def plan_step(config: TrainConfig) -> StepPlan:
    """The plan that the intra-step switch asks for."""
    stream = config.overlap.intra
    return StepPlan(
        stream=stream,
        wait_for_critic=not stream or "critic" in config.debug.wait_for,
        forward_ahead=stream and "scores" not in config.debug.wait_for,
    )


def delta_rule(overlap: OverlapConfig) -> DeltaConfig:
    """The delta rule in force: without inter-step overlap it is fixed at 0, which is plain PPO."""
    return overlap.delta if overlap.inter else DeltaConfig(rule="fixed", initial=0, max=0)


def round_generator(overlap: OverlapConfig, site: Site) -> str:
    """Name of the generator of the rounds (woven only if some rank decodes and scores), or the user's function."""
    if not overlap.intra:
        return "sequential"
    if overlap.schedule != "auto":
        return overlap.schedule
    return "woven" if decodes_and_scores(site.placements) else "intra"


def late_scorers(site: Site) -> frozenset[str]:
    """Roles that score a batch when it is complete, in the time that the actor would wait for scorers elsewhere.

    They lie on the actor's ranks alone, and its pipeline has no bubbles in which they could score beside its decoding.
    """
    actor = site.placements["actor"]
    if actor.pp > 1 or not site.listeners:
        return frozenset()
    own = set(actor.ranks)
    return frozenset(role for role, placement in site.placements.items() if role != "actor" and set(placement.ranks) <= own)
