"""Repeats one update from a batch that a guard rejected, in one process.

python -m tools.replay RUN/rejected/step-N.safetensors [a.b=c ...] [--config C.yaml]

Legend: B rollouts, P their prompt tokens, T their response tokens (both packed), G greedy responses.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import run_script
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, GreedyRows, ScoredBatch
from oppo_megatron.algorithms.packed import GapLimit
from oppo_megatron.cluster.hosts import show_hosts
from oppo_megatron.cluster.world import World, choose_device, open_world
from oppo_megatron.config.derived import max_context, num_updates
from oppo_megatron.config.load import load_config
from oppo_megatron.config.model import PlacementConfig, TrainingLayoutConfig
from oppo_megatron.config.paths import missing_path
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.control.guards import Breach, Rules, first, non_finite
from oppo_megatron.errors import ConfigError, DataError, NumericsError
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.shape import check_use
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.rundir.metrics_log import iter_json_lines
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.guard import FORMAT, TENSORS, Facts, RejectedBatch
from oppo_megatron.train.roles import Topology, TrainedRole, build_topology, build_trained_role
from oppo_megatron.train.update import History, UpdateSettings

OPTIONAL = ("reference_logp_T", "values_T", "step_rewards_T")
"""Tensors that may be empty: there was no such role, or scores are of whole responses."""
SOMETIMES = ("step_rewards_T", "greedy_scores_G", "greedy_lengths_G", "greedy_truncated_G")
"""Tensors that may be missing, if whole responses are scored or no response is greedy."""
NUMBERS: dict[str, type | tuple[type, ...]] = {
    "step": int, "seed": int, "total_steps": int, "policy_version": int, "kl_coefficient": (int, float), "config": str,
    "reason": str, "figures": dict, "history": dict,
}  # fmt: skip
LEAST: dict[str, int] = {"step": 1, "total_steps": 1}  # the others' least value is 0


def read_rejected(path: Path) -> RejectedBatch:
    """Read a batch written by `write`; `path` is either file.  Raises DataError for damaged or other files."""
    path = path.with_suffix(".safetensors")
    lines = list(iter_json_lines(path.with_suffix(".jsonl")))
    head = {"history": {}} | (lines[0] if lines else {})  # may be missing
    if head.get("format") != FORMAT:
        raise _unusable(path, f"its .jsonl does not begin with format {FORMAT!r}")
    _check_head(path, head)
    try:
        tensors = {name: torch.empty(0, dtype=TENSORS[name]) for name in SOMETIMES} | load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unusable(path, str(error)) from error
    _check_tensors(path, tensors, len(lines) - 1)
    rollouts = _rollouts(path, tensors, lines[1:])
    scored = ScoredBatch(
        behaviour_logp_T=tensors["behaviour_logp_T"].float(),
        reference_logp_T=tensors["reference_logp_T"] if len(tensors["reference_logp_T"]) else None,
        values_T=tensors["values_T"] if len(tensors["values_T"]) else None,
        scores_B=tensors["scores_B"],
        lengths_B=tensors["lengths_B"].tolist(),
        truncated_B=tensors["truncated_B"],
        step_rewards_T=tensors["step_rewards_T"] if len(tensors["step_rewards_T"]) else None,
        greedy=GreedyRows(*(tensors[name] for name in SOMETIMES[1:])) if len(tensors["greedy_scores_G"]) else None,
        tokens_T=torch.tensor([x for rollout in rollouts for x in rollout.tokens]),
        versions_T=torch.tensor([x for rollout in rollouts for x in rollout.versions]),
    )
    return RejectedBatch(Facts(**{name: head[name] for name in NUMBERS}), rollouts, scored)


def _check_head(path: Path, head: Mapping[str, Any]) -> None:
    for name in NUMBERS:
        if not _is_sound(name, head.get(name)):
            raise _unusable(path, f"{name} is {head.get(name)!r:.60}")
    if head["step"] > head["total_steps"]:
        raise _unusable(path, f"its step {head['step']} is beyond total_steps {head['total_steps']}")


def _is_sound(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, NUMBERS[name]):
        return False
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode() == value
    if isinstance(value, dict):
        return all(x is None or (isinstance(x, (int, float)) and abs(x) < math.inf) for x in value.values())
    return isinstance(value, (int, float)) and LEAST.get(name, 0) <= value < 2**63


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], num_rollouts: int) -> None:
    for name, dtype in TENSORS.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != dtype or tensor.dim() != 1:
            raise _unusable(path, f"{name} is missing or of another kind")
    counts = {"B": num_rollouts, "P": 0, "T": 0, "G": len(tensors["greedy_scores_G"])}
    if counts["G"] and num_rollouts % counts["G"]:
        raise _unusable(path, f"{num_rollouts} rollouts are not whole groups of {counts['G']} prompts")
    for name, axis in (("prompt_lengths_B", "P"), ("lengths_B", "T")):
        if bool((tensors[name] < 1).any()) or bool((tensors[name] > 2**31).any()):
            raise _unusable(path, f"{name} has a length below 1 or beyond reason")
        counts[axis] = int(tensors[name].sum())
    for name in ("prompt_tokens_P", "tokens_T", "versions_T"):
        if bool((tensors[name] < 0).any()):
            raise _unusable(path, f"{name} has a number below 0")
    for name in TENSORS:
        if name in OPTIONAL and not len(tensors[name]):
            continue
        if len(tensors[name]) != counts[name[-1]] or not num_rollouts:
            raise _unusable(path, f"{name} has {len(tensors[name])} entries, not {counts[name[-1]]}")


def _rollouts(path: Path, tensors: Mapping[str, Tensor], lines: Sequence[Mapping[str, Any]]) -> list[Rollout]:
    lengths = tensors["lengths_B"].tolist()
    prompts = tensors["prompt_tokens_P"].split(tensors["prompt_lengths_B"].tolist())
    parts = [tensors[name].split(lengths) for name in ("tokens_T", "versions_T", "behaviour_logp_T")]
    rollouts = []
    for i, (line, prompt, tokens, versions, logp) in enumerate(zip(lines, prompts, *parts, strict=True)):
        seq_id, text = line.get("seq_id"), line.get("prompt")
        if not isinstance(seq_id, int) or not isinstance(text, str):
            raise _unusable(path, f"line {i + 2} of its .jsonl has no seq_id or no prompt")
        record = Prompt(seq_id, -1, text, tuple(prompt.tolist()))
        rollouts.append(Rollout(record, i, tokens.tolist(), logp.tolist(), logp.tolist(), versions.tolist()))
    return rollouts


def _unusable(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is not a complete rejected batch ({why}); name a step-N.safetensors that a run wrote to `rejected/`, next to "
        "its .jsonl"
    )


@dataclass(frozen=True)
class Replayed:
    """Statistics of the update, the run's statistics, and the guards' verdict on the new ones."""

    figures: dict[str, float]
    recorded: dict[str, float | None]
    breach: Breach | None

    def table(self) -> list[str]:
        """Return a line per figure: its name, the run's value, the replay's."""
        names = list(dict.fromkeys([*self.figures, *self.recorded]))
        rows = [(name, _shown(self.recorded.get(name)), _shown(self.figures.get(name))) for name in names]
        return [f"{name:<24}{run:>16}{again:>16}" for name, run, again in [("figure", "run", "replay"), *rows]]


def one_process(config: TrainSettings) -> TrainConfig:
    """Return the same configuration with every role whole on one rank."""
    tree = config.model_dump()
    tree["placement"] = PlacementConfig(mode="single").model_dump()
    for name in ("actor", "critic", "reference", "reward"):
        if tree[name] is not None:
            tree[name] |= {"parallel": None, "ranks": None}
    for name, role in config.trained.items():
        tree[name]["train"] = TrainingLayoutConfig(recompute=role.train.recompute).model_dump()
    return TrainConfig.model_validate(tree)


def replay(rejected: RejectedBatch, config: TrainConfig) -> Replayed:
    """Build actor and critic of a configuration by `one_process` and update them once with the batch, in a world of one.

    Raises ConfigError if the batch does not fit these models.
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
            f"{max_context(config)}; give the run's"
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
    """Reasons why its greedy responses cannot be the baseline, if the configuration needs one."""
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
        gap_limit=GapLimit.of(config.guards, config.actor.dtype, config.rollout.temperature),
    )
    critic = None
    if config.algorithm.critic:
        critic = Critic(
            _role("critic", "scalar", config, world, topology, facts, history.warmed),
            algorithm,
            config.runtime.micro_batch_tokens,
        )
    figures, breach = _update(rejected, experience, actor, critic, config, world)
    return Replayed(figures, facts.figures, breach)


def _role(name: str, head: Head, config: TrainConfig, world: World, topology: Topology, facts: Facts, warmed: int) -> TrainedRole:
    """Build a role whose optimizer made `warmed` steps without the actor."""
    groups, training = topology.groups[name], topology.training[name]
    assert groups is not None and training is not None, "a world of one has every role"
    made = facts.history.get("updates")  # may be missing; skipped steps made none
    if made is None:
        made = facts.policy_version * config.ppo.epochs * config.ppo.minibatches
    role = build_trained_role(
        config.trained[name],
        groups,
        training,
        head=head,
        role=name,
        max_length=max_context(config),
        device=world.device,
        num_updates=num_updates(config, name, facts.total_steps),
    )
    role.trained.resume_schedule(int(made) + warmed)
    return role


def _update(
    rejected: RejectedBatch, experience: Experience, actor: Actor, critic: Critic | None, config: TrainConfig, world: World
) -> tuple[dict[str, float], Breach | None]:
    rules = Rules(config.guards, config.guards.gap_limit(config.actor.dtype, config.rollout.temperature))
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
            found.append(non_finite(name, float("nan"), str(error)))
        figures |= made
        found.append(rules.check(made))
    return figures, first(found)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch", type=Path, metavar="FILE", help="rejected/step-N.safetensors of a run directory")
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace the run's")
    parser.add_argument("--config", type=Path, metavar="C.yaml", help="a configuration in place of the run's")


def measure(args: argparse.Namespace) -> int:
    if not args.batch.is_file() and not args.batch.with_suffix(".jsonl").is_file():
        raise ConfigError(missing_path("the rejected batch", args.batch))
    rejected = read_rejected(args.batch)
    with tempfile.TemporaryDirectory(prefix="oppo-") as folder:
        own = Path(folder) / "config.yaml"
        own.write_text(rejected.facts.config, encoding="utf-8")
        config = one_process(load_config(TrainSettings, args.config or own, args.overrides))
    found = replay(rejected, config)
    print(f"step {rejected.facts.step}, {len(rejected.batch)} rollouts; the run: {rejected.facts.reason}")
    print("\n".join(found.table()))
    print(f"the replay: {'within all guards' if found.breach is None else found.breach.reason}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("tools.replay", __doc__, add_arguments, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
