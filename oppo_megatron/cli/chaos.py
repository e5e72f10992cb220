"""`oppo chaos`: tests whether a run on this machine and its disks survives ranks that are killed at random moments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from oppo_megatron.cli.lengths import count
from oppo_megatron.cli.parser import add_config_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, help="a configuration of `oppo train`, with `steps`")
    parser.add_argument("--kills", type=count, default=30, metavar="N", help="how often; default %(default)s")
    parser.add_argument(
        "--seed", type=int, default=1, metavar="S", help="whom and when, drawn from it; default %(default)s"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), metavar="DIR", help="default %(default)s")
    parser.add_argument(
        "--prompt-tokens",
        type=count,
        metavar="N",
        help="prompts of N random tokens, in place of the configuration's data",
    )


def run(args: argparse.Namespace) -> int:
    from oppo_megatron.bench.chaos import COLUMNS, Chaos, phases
    from oppo_megatron.bench.figures import format_table
    from oppo_megatron.cli.bench.common import refuse_given_ranks
    from oppo_megatron.cli.run import load_train
    from oppo_megatron.errors import ConfigError

    refuse_given_ranks("oppo chaos")
    config = load_train(args.config, _overrides(args))
    if not config.checkpoint.every_steps:
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 1})})
    if config.steps is None:
        raise ConfigError("steps is not set; kills are spread over a number of steps that is known: give steps=N")
    train = [sys.executable, "-m", "oppo_megatron", "train"]
    result = Chaos(config, train, args.out, args.kills, args.seed).run()
    print(format_table(COLUMNS, result["kills"]))
    hit = ", ".join(f"{phase} {times}" for phase, times in phases(result).items())
    print(
        f"\n{len(result['kills'])} kills in {result['disturbed_s']:.0f} s (undisturbed {result['undisturbed_s']:.0f} s): {hit}"
    )
    print(
        *result["differences"] or ["final weights, rollouts and metrics equal those of the undisturbed run"], sep="\n"
    )
    return 1 if result["differences"] else 0


def _overrides(args: argparse.Namespace) -> list[str]:
    """What the comparison needs is set behind all others."""
    from oppo_megatron.data.random_prompts import write_random_prompts

    overrides = [*args.overrides, f"run_dir={args.out / 'disturbed'}"]
    overrides += ["logging.rollouts=true", "logging.trace=false", "logging.console=off"]
    if args.prompt_tokens is not None:
        tokenizer, prompts = write_random_prompts(args.out / "inputs", args.prompt_tokens)
        overrides += [f"tokenizer.path={tokenizer}", f"data.path={prompts}"]
        overrides.append(f"data.max_prompt_tokens={args.prompt_tokens}")
    return overrides
