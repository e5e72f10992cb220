"""The actor's update with prompts that are read once per group, and once per response: seconds, paired in one process.

    python -m benchmarks.shared_prompts [--model SHAPE.json] [--prompts 64,256,1024] [--responses 64-128] [--group 8]

Every pair of updates starts from the same weights and trains the same groups by GRPO.  `tokens`: of the update's forward
passes.  Seconds on a CPU are the processor's, so that other work on the machine adds little.  `gap`: the largest relative
difference of the two gradient norms.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import run_script, whole_numbers
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import ScoredBatch
from oppo_megatron.bench.decode import now
from oppo_megatron.cluster.world import choose_device, open_world
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.model import LearningModelConfig, OptimizerConfig, RuntimeConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.mcore.batch import read_tokens
from oppo_megatron.mcore.groups import RoleGroups, build_groups
from oppo_megatron.mcore.roles import load_training
from oppo_megatron.mcore.training import TrainedModel, Undo
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.report.comparison import format_table
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.update import UpdateSettings, divide, each_alone, families

TABLE = {
    "prompt": "prompt", "tokens": "own_tokens", "shared": "shared_tokens", "own s": "own_s", "shared s": "shared_s",
    "x": "times", "x, each pair": "pairs", "gap": "gap",
}  # fmt: skip


def rollouts(args: argparse.Namespace, prompt_tokens: int, vocab: int) -> list[Rollout]:
    """Random groups; responses of even lengths."""
    dice = torch.Generator().manual_seed(prompt_tokens)

    def tokens(num: int) -> list[int]:
        return torch.randint(vocab, (num,), generator=dice).tolist()

    found = []
    for group in range(args.groups):
        prompt, (least, most) = tuple(tokens(prompt_tokens)), args.responses
        for place in range(args.group):
            row, length = len(found), least + (most - least) * place // max(1, args.group - 1)
            numbers = (torch.randn(length, generator=dice) / 4 - 9).tolist()
            found.append(
                Rollout(Prompt(row, group, "", prompt), row, tokens(length), numbers, numbers, [0] * length, 0, 1, "eos")
            )
    return found


def scored(batch: list[Rollout], group: int) -> ScoredBatch:
    logp_T = torch.tensor([x for rollout in batch for x in rollout.logprobs])
    scores_B = torch.randn(len(batch), generator=torch.Generator().manual_seed(1))
    lengths = [len(rollout.tokens) for rollout in batch]
    return ScoredBatch(logp_T, None, None, scores_B, lengths, torch.zeros(len(batch), dtype=torch.bool), group)


def clock(device: torch.device) -> float:
    return time.process_time() if device.type == "cpu" else now(device)


def measure(args: argparse.Namespace, groups: RoleGroups, device: torch.device) -> list[dict[str, Any]]:
    longest = max(args.prompts) + args.responses[1]
    config = LearningModelConfig(init=args.model, dtype=args.dtype)
    (model,) = chunks = load_training(config, None, groups, head="lm", max_length=longest, device=device)
    trained = TrainedModel(chunks, OptimizerConfig(lr=1e-5), total_steps=1000)
    ppo = PPOConfig.model_validate({"kl": {"mode": "none"}, "entropy_coefficient": 0.0})
    algorithm = Algorithm(AlgorithmConfig(preset="grpo"), ppo, args.group, longest)
    actor, rows = Actor(TrainedRole(trained, model, None), algorithm, 1.0), []
    own = UpdateSettings(1, 1, args.micro_batch_tokens, seed=1, step=1, device=device, group_size=args.group)
    sides = {"own": own, "shared": replace(own, sharing=args.group)}
    for prompt_tokens in args.prompts:
        batch = rollouts(args, prompt_tokens, model.shape.vocab_size)
        experience = algorithm.experience(scored(batch, args.group), 0.0)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        gap = 0.0
        for turn in range(args.repeats + 1):
            norms = []
            for name in sorted(sides, reverse=turn % 2 == 1):
                undo, began = Undo(trained), clock(device)
                norms.append(actor.update(batch, experience, 0.0, sides[name])["grad_norm"])
                seconds[name].append(clock(device) - began)
                undo.restore()
            gap = max(gap, abs(norms[0] / norms[1] - 1))
        pairs = [mine / ours for mine, ours in zip(*(each[1:] for each in seconds.values()), strict=True)]  # the first warms up
        row: dict[str, Any] = {"prompt": prompt_tokens, "times": median(pairs), "pairs": pairs, "gap": gap}
        for name, settings in sides.items():
            (units,) = divide(batch, each_alone(range(len(batch))), 1, args.micro_batch_tokens, settings.sharing)
            row[f"{name}_tokens"] = sum(read_tokens(families(batch, unit, settings.sharing)) for unit in units)
            row[f"{name}_s"] = median(seconds[name][1:])
        rows.append(row)
        print(format_table(TABLE, rows[-1:]), flush=True)
    return rows


def span(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not (least.isdigit() and (most or least).isdigit() and 1 <= int(least) <= int(most or least)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of lengths; give one like 64-128")
    return int(least), int(most or least)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=Path("examples/benchmark/model_15m.json"), help="shape of the actor")
    parser.add_argument("--prompts", type=whole_numbers, default=[64, 256, 1024], help="tokens of prompts")
    parser.add_argument("--responses", type=span, default=(64, 128), metavar="LEAST-MOST", help="tokens of responses")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--groups", type=int, default=2, help="prompts per update")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of updates, after one that warms up")


def bench(args: argparse.Namespace) -> int:
    runtime = RuntimeConfig(device=args.device)
    choose_device(runtime)
    with open_world(runtime, {}) as world:
        groups = build_groups([0], 1, 1, "bench")
        assert groups is not None
        rows = measure(args, groups, world.device)
    print("\n" + format_table(TABLE, rows))
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_script("benchmarks.shared_prompts", __doc__, add_arguments, bench, arguments)


if __name__ == "__main__":
    sys.exit(main())
