"""What distinguishes plain PPO, intra-step overlap, inter-step overlap and both: the plan of a step.  One loop runs them all."""

from __future__ import annotations

from dataclasses import dataclass

from oppo_megatron.config.overlap import DeltaConfig, OverlapConfig


@dataclass(frozen=True)
class StepPlan:
    """How a step's rollout and scoring are laid out in time.

    `round_steps`: decode steps after which the scorers get what is new; None: once, when the batch is complete.
    `stream`: scorers prefill every round, beside the actor's decoding; else they score the finished batch.
    `wait_for_critic`: the next step starts when the critic's update has ended; else the update runs beside its decoding,
    which needs the critic no sooner than its first scored chunk.
    """

    round_steps: int | None
    stream: bool
    wait_for_critic: bool


def plan_step(overlap: OverlapConfig, chunk_tokens: int) -> StepPlan:
    """The plan that the intra-step switch asks for."""
    if overlap.intra:
        return StepPlan(round_steps=chunk_tokens, stream=True, wait_for_critic=False)
    return StepPlan(round_steps=None, stream=False, wait_for_critic=True)


def delta_rule(overlap: OverlapConfig) -> DeltaConfig:
    """The delta rule in force: without inter-step overlap it is fixed at 0, which is plain PPO."""
    return overlap.delta if overlap.inter else DeltaConfig(rule="fixed", initial=0, min=0, max=0)
