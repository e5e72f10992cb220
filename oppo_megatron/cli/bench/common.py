"""Common parts of the benchmarks of whole runs: arguments, the resulting configuration, the start of runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oppo_megatron.cli.lengths import add_length_arguments, count, counts, forced_lengths
from oppo_megatron.cli.parser import add_config_arguments

if TYPE_CHECKING:
    from oppo_megatron.bench.suite import Suite
    from oppo_megatron.config.run import TrainConfig


def add_run_arguments(
    parser: argparse.ArgumentParser,
    kind: str,
    *,
    config: Literal["?"] | None = None,
    prompts: Sequence[int] | None = None,
) -> None:
    """CONFIG, which may be left out where `config` is `?`, overrides, and what all benchmarks of whole runs take.

    `prompts`: lengths of prompts, where several are compared.
    """
    add_config_arguments(parser, nargs=config)
    parser.add_argument("--steps", type=count, metavar="N", help="PPO steps a run; default: the configuration's")
    parser.add_argument(
        "--repeats", type=count, default=1, metavar="N", help="runs of each, in turn (A B C A B C); default 1"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench") / kind, metavar="DIR", help="default %(default)s"
    )
    several = "" if prompts is None else f", each length in runs of its own; default {','.join(map(str, prompts))}"
    parser.add_argument(
        "--prompt-tokens",
        type=count if prompts is None else counts,
        default=prompts,
        metavar="N" if prompts is None else "N,N",
        help=f"prompts of N random tokens, in place of the configuration's data{several}",
    )
    parser.set_defaults(figures=f"{kind}.json", resume=None)
    add_length_arguments(parser)


def add_resume_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help="take the runs that an interrupted attempt has finished in --out as they are, and make the others",
    )


def add_limit_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit",
        action="store_true",
        help="measure the machine's peaks (seconds) and print the least time that the work can take",
    )


def limit_cores(args: argparse.Namespace) -> int | None:
    """The cores that a limit counts, where --limit asks for one."""
    from oppo_megatron.cores import usable_cores

    return usable_cores() if args.limit else None


def load_base(args: argparse.Namespace, inputs: str = "inputs") -> TrainConfig:
    """The checked configuration with the changes that the common arguments ask for; random prompts lie in `OUT/inputs`.

    Raises ConfigError, also where an earlier benchmark lies in `--out`: its figures and inputs are not written over.
    """
    refuse_given_ranks("oppo bench")
    refuse_figures(args.out / args.figures)
    from oppo_megatron.bench.suite import bare
    from oppo_megatron.cli.run import load_train
    from oppo_megatron.data.random_prompts import write_random_prompts

    overrides = [*args.overrides, f"run_dir={args.out}", *forced_lengths(args)]
    if args.steps is not None:
        overrides.append(f"steps={args.steps}")
    if args.prompt_tokens is not None:
        tokenizer, prompts = write_random_prompts(args.out / inputs, args.prompt_tokens)
        overrides += [f"tokenizer.path={tokenizer}", f"data.path={prompts}"]
        overrides.append(f"data.max_prompt_tokens={args.prompt_tokens}")
    return bare(load_train(args.config, overrides))


def refuse_given_ranks(command: str) -> None:
    """Raises ConfigError where another launcher has started this process as a rank."""
    from oppo_megatron.cli.launch import external_ranks
    from oppo_megatron.errors import ConfigError

    ranks = external_ranks(os.environ)
    if ranks is not None:
        raise ConfigError(
            f"the launcher has started {ranks['WORLD_SIZE']} ranks, but `{command}` starts those of each run itself; call it "
            "without torchrun or srun"
        )


def refuse_figures(path: Path) -> None:
    """Raises ConfigError where an earlier benchmark has written there."""
    from oppo_megatron.errors import ConfigError

    if path.exists():
        raise ConfigError(
            f"{path} holds the figures of an earlier benchmark, which are not written over; name another folder with --out"
        )


def new_suite(args: argparse.Namespace) -> Suite:
    """Runs started on this machine, each in processes of its own."""
    import functools

    from oppo_megatron.bench.suite import Suite
    from oppo_megatron.cli.launch import launch

    return Suite(args.out, args.repeats, functools.partial(launch, in_process=False), resume=args.resume)


def chosen(option: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """`names`, or all known names if None or `all` is given.  Raises ConfigError for an unknown name."""
    from oppo_megatron.errors import ConfigError

    asked = [name for name in names or ["all"] if name != "all"]
    if unknown := [name or "''" for name in asked if name not in known]:
        raise ConfigError(f"{option} names {', '.join(unknown)}; choose from {', '.join(known)}, or all")
    return list(dict.fromkeys(known if "all" in (names or ["all"]) else asked))


def whole_numbers(text: str) -> list[int]:
    """Numbers from 0 on with commas between them."""
    parts = text.split(",")
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of at least 0, as in 0,4,8")
    return [int(part) for part in parts]


def numbers(text: str) -> list[float]:
    """Positive numbers with commas between them."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers, as in 0.5,1,2")
    return found


def names(text: str) -> list[str]:
    """Names with commas between them."""
    return text.split(",")
