"""The modes of the loop under several kinds of reward, all in one comparison: which of them has something to hide.

A rule's reward costs nothing beside decoding; a reward model reads every token, and a process reward model the same, with a
score of every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oppo_megatron.bench.overlap import COLUMNS as OVERLAP_COLUMNS
from oppo_megatron.bench.overlap import compare, placed, say_what_is_left_out
from oppo_megatron.bench.pictures import draw_steps
from oppo_megatron.bench.suite import Suite, require_same_work, work_figures
from oppo_megatron.config.data import RewardPart
from oppo_megatron.config.model import RoleConfig
from oppo_megatron.config.modes import switched
from oppo_megatron.config.run import TrainConfig

REWARDS = ("verifier", "model", "process")
COLUMNS = {"reward": "reward", **OVERLAP_COLUMNS}
SEED = 3  # of the reward model's random weights


def bench_rewards(
    suite: Suite, config: TrainConfig, rewards: Sequence[str], modes: Sequence[str], placements: Sequence[str], cores: int
) -> dict[str, Any]:
    """Run every mode in every placement under every kind of reward.  Writes overlap.json and overlap-REWARD.png."""
    configs = {
        f"{reward}/{placement}/{mode}": switched(placed(rewarded(config, reward), placement, cores), mode)
        for reward in rewards
        for placement in placements
        for mode in modes
    }
    say_what_is_left_out(suite, config)
    runs = suite.run(configs)
    by_reward = {reward: compare(_of(reward, configs), _of(reward, runs)) for reward in rewards}
    rows = [{"reward": reward, **row} for reward, found in by_reward.items() for row in found["results"]]
    result = {"results": rows, "rewards": by_reward, **work_figures(runs)}
    suite.write("overlap", config, {"cores": cores, **result}, runs)
    for reward, found in by_reward.items():
        draw_steps(found["results"], suite.out / f"overlap-{reward}.png")
    require_same_work(config, result)
    return result


def rewarded(config: TrainConfig, reward: str) -> TrainConfig:
    """The configuration with another kind of reward alone.

    verifier: its own rules, or where it has none the length of the response.  model, process: its own reward model, or where
    it has none one of the actor's shape.
    """
    if reward == "verifier":
        rules = [part for part in config.rewards if not part.reads_model]
        length = RewardPart(kind="verifier", name="length", buffer_tokens=config.rollout.max_response_tokens)
        return config.model_copy(update={"rewards": rules or [length], "reward": None})
    kind: Any = reward
    return config.model_copy(update={"rewards": [RewardPart(kind=kind)], "reward": config.reward or _like(config)})


def _like(config: TrainConfig) -> RoleConfig:
    """A reward model of the actor's shape with weights of its own, which mean nothing."""
    actor = config.actor
    if actor.init is not None:
        return RoleConfig(init=actor.init, init_seed=SEED, dtype=actor.dtype)
    return RoleConfig(checkpoint=actor.checkpoint, fresh_head=True, dtype=actor.dtype)


def _of(reward: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """What belongs to one kind of reward, by name PLACEMENT/MODE."""
    return {name.removeprefix(f"{reward}/"): each for name, each in named.items() if name.startswith(f"{reward}/")}
