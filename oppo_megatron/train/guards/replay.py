"""Repeats one update of actor and critic, in one process, from a rejected batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.decode_gap import GapLimit
from oppo_megatron.algorithms.experience import Experience
from oppo_megatron.cluster.hosts import show_hosts
from oppo_megatron.cluster.world import World, choose_device, open_world
from oppo_megatron.config.derived import max_context, num_updates
from oppo_megatron.config.model import PlacementConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.control.guards import Breach, Rules, gravest
from oppo_megatron.errors import ConfigError, NumericsError
from oppo_megatron.layout.shape import check_use
from oppo_megatron.mcore.model import Head
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.guards.rejected import Facts, RejectedBatch
from oppo_megatron.train.roles import Topology, TrainedRole, build_topology, build_trained_role
from oppo_megatron.train.update import History, UpdateSettings


@dataclass(frozen=True)
class Replayed:
    """Statistics of the update, those of the run beside them, and what the guards say of the new ones."""

    figures: dict[str, float]
    recorded: dict[str, float | None]
    breach: Breach | None

    def table(self) -> list[str]:
        """A line for each figure: its name, the run's value, the replay's."""
        names = list(dict.fromkeys([*self.figures, *self.recorded]))
        rows = [(name, _shown(self.recorded.get(name)), _shown(self.figures.get(name))) for name in names]
        return [f"{name:<24}{run:>16}{again:>16}" for name, run, again in [("figure", "run", "replay"), *rows]]


def one_process(config: TrainSettings) -> TrainConfig:
    """The same configuration with every role whole on one rank."""
    tree = config.model_dump()
    tree["placement"] = PlacementConfig(mode="single").model_dump()
    for name in ("actor", "critic", "reference", "reward"):
        if tree[name] is not None:
            tree[name] |= {"parallel": None, "ranks": None}
    tree["actor"]["generate"] = None
    for name, role in config.trained.items():
        tree[name]["train"] = TrainingLayoutConfig(recompute=role.train.recompute).model_dump()
    return TrainConfig.model_validate(tree)


def replay(rejected: RejectedBatch, config: TrainConfig) -> Replayed:
    """Build actor and critic of a configuration by `one_process` and update them once with the batch, in a world of one.

    Raises ConfigError where the batch is none for these models.
    """
    _require_fit(rejected, config)
    choose_device(config.runtime)
    with open_world(config.runtime, {}) as world:
        show_hosts(world.hosts)
        return _replay(rejected, config, world)


def _require_fit(rejected: RejectedBatch, config: TrainConfig) -> None:
    largest = max(token for each in rejected.batch for token in (*each.prompt.tokens, *each.tokens))
    longest = max(len(each.prompt.tokens) + len(each.tokens) for each in rejected.batch)
    problems = []
    for name, role in config.trained.items():
        shape = read_hf_config(role)
        if wrong := check_use(name, shape, longest, None):
            problems += wrong
        elif largest >= shape["vocab_size"]:
            problems.append(
                f"the batch has token id {largest}, but {name} has {shape['vocab_size']}; use a model of the run's family"
            )
    if longest > max_context(config):
        problems.append(
            f"the batch has a sequence of {longest} tokens, but data.max_prompt_tokens and rollout.max_response_tokens allow "
            f"{max_context(config)}; give those of the run"
        )
    if config.algorithm.critic and rejected.scored.values_T is None:
        problems.append(
            f"the batch has no values, but algorithm.preset {config.algorithm.preset} updates a critic; name its run's preset"
        )
    problems += _greedy_problems(rejected, config)
    if len(rejected.batch) % config.rollout.group_size:
        problems.append(
            f"rollout.group_size is {config.rollout.group_size}, but the batch has {len(rejected.batch)} rollouts; give its run's"
        )
    if config.ppo.kl.mode != "none" and rejected.scored.reference_logp_T is None:
        problems.append(
            f"the batch has no reference log-probs, but ppo.kl.mode is {config.ppo.kl.mode}; name its run's preset or mode"
        )
    if len(rejected.batch) < config.ppo.minibatches:
        problems.append(
            f"ppo.minibatches is {config.ppo.minibatches}, but the batch has {len(rejected.batch)} rollouts; lower it"
        )
    if problems:
        raise ConfigError(problems)


def _greedy_problems(rejected: RejectedBatch, config: TrainConfig) -> list[str]:
    """What keeps its greedy responses from being the baseline, if one is asked for."""
    greedy, size = rejected.scored.greedy, config.rollout.group_size
    if not config.algorithm.greedy:
        return []
    if greedy is None:
        return ["the batch has no greedy responses, but algorithm.baseline is greedy; name its run's preset"]
    if len(greedy.scores_G) * size != len(rejected.batch):
        return [
            f"rollout.group_size is {size}, but the batch has {len(rejected.batch)} rollouts and {len(greedy.scores_G)} greedy "
            "responses, one for each group; give its run's"
        ]
    return []


def _replay(rejected: RejectedBatch, config: TrainConfig, world: World) -> Replayed:
    facts, topology = rejected.facts, build_topology(config, world.device)
    tensors = {name: x for name, x in vars(rejected.scored).items() if isinstance(x, torch.Tensor)}
    moved: dict[str, Any] = {name: x.to(world.device) for name, x in tensors.items()}
    greedy = rejected.scored.greedy
    moved["greedy"] = None if greedy is None else greedy.to(world.device)
    scored = replace(rejected.scored, **moved, group_size=config.rollout.group_size)
    algorithm = Algorithm.of(config)
    history = History.of(facts.history)
    experience = algorithm.experience(scored, facts.kl_coefficient, check=False, seen=history.seen)
    actor = Actor(
        _role("actor", "lm", config, world, topology, facts, warmed=0),
        algorithm,
        config.rollout.temperature,
        gap_limit=GapLimit.of(config.guards.logprob_gap, config.actor.dtype, config.rollout.temperature),
    )
    critic = None
    if config.algorithm.critic:
        critic = Critic(_role("critic", "scalar", config, world, topology, facts, history.warmed), algorithm)
    figures, breach = _update(rejected, experience, actor, critic, config, world)
    return Replayed(figures, facts.figures, breach)


def _role(
    name: str, head: Head, config: TrainConfig, world: World, topology: Topology, facts: Facts, warmed: int
) -> TrainedRole:
    """`warmed`: optimizer steps that it has made without the actor."""
    groups, training = topology.groups[name], topology.training[name]
    assert groups is not None and training is not None, "a world of one has every role"
    made = facts.history.get("updates")  # older batches have none; where steps were skipped, these have made none
    if made is None:
        made = facts.policy_version * config.ppo.epochs * config.ppo.minibatches
    role = build_trained_role(
        config.trained[name],
        groups,
        training,
        head=head,
        max_length=max_context(config),
        device=world.device,
        path=config.runtime.decode_path,
        layers=config.runtime.layers,
        num_updates=num_updates(config, name, facts.total_steps),
    )
    role.trained.resume_schedule(int(made) + warmed)
    return role


def _update(
    rejected: RejectedBatch, experience: Experience, actor: Actor, critic: Critic | None, config: TrainConfig, world: World
) -> tuple[dict[str, float], Breach | None]:
    rules = Rules(config.guards, config.guards.logprob_gap.in_numbers(config.actor.dtype, config.rollout.temperature))
    settings = UpdateSettings.of(config, rejected.facts.step, world.device, rejected.facts.policy_version)
    coefficient = rejected.facts.kl_coefficient
    figures = experience.stats.figures()
    found = [rules.check(figures)]
    updates: dict[str, Callable[[], dict[str, float]]] = {}
    if rejected.facts.step > config.ppo.critic_warmup_steps:
        updates["grad_norm"] = partial(actor.update, rejected.batch, experience, coefficient, settings)
    if critic is not None:
        updates["critic_grad_norm"] = partial(critic.update, rejected.batch, experience, settings)
    for name, update in updates.items():
        try:
            made = update()
        except NumericsError as error:
            made = {name: float("nan")}
            found.append(rules.non_finite(name, float("nan"), str(error)))
        figures |= made
        found.append(rules.check(made))
    return figures, gravest(found)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
