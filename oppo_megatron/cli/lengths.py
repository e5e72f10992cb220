"""Response and prompt lengths on the command line, and of a predicted batch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from oppo_megatron.cli.parser import count
from oppo_megatron.config.derived import usual_prompt_tokens
from oppo_megatron.config.ppo import ForcedLimits, log_normal
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.errors import ConfigError
from oppo_megatron.sim.runs.step_costs import run_prompt_tokens


def even_lengths(config: TrainConfig) -> list[int]:
    """Evenly spaced over the forced distribution, longest last; else the maximum for all."""
    count, most = config.rollout.batch_size, config.rollout.max_response_tokens
    forced = config.rollout.lengths
    if forced is None:
        return [most] * count
    quantile = forced_quantile(forced, most) or log_normal(forced)
    return [max(1, min(most, round(quantile((i + 0.5) / count)))) for i in range(count)]


def forced_limits(config: TrainConfig) -> Callable[[int], int] | None:
    forced, most = config.rollout.lengths, config.rollout.max_response_tokens
    return None if forced is None else ForcedLimits.of(forced, most, config.seed, forced_quantile(forced, most))


def check_lengths(config: TrainConfig) -> None:
    most, forced = config.rollout.max_response_tokens, config.rollout.lengths
    if forced is not None and forced.median is not None and forced.median > most:
        raise ConfigError(
            f"half of the responses have more than {forced.median:g} tokens, but rollout.max_response_tokens is {most}, which "
            "would cut them; raise it, or lower the median"
        )


def add_length_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--trace", type=Path, metavar="FILE.csv", help="force the response lengths of a recorded trace, scaled")
    lengths.add_argument("--lognormal", type=_median_sigma, metavar="MEDIAN,SIGMA", help="force log-normal response lengths")
    parser.add_argument("--trace-column", metavar="NAME", help="the column of --trace that has the lengths")


def add_prompt_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt-tokens", type=count, metavar="N",
        help="of all prompts (default: as in a run that calibrates, else half of data.max_prompt_tokens)",
    )  # fmt: skip


def prompt_tokens(args: argparse.Namespace, config: TrainConfig) -> int:
    """The requested prompt length, the calibration run's, or half the maximum. Raises ConfigError."""
    longest, asked, run = config.data.max_prompt_tokens, args.prompt_tokens, getattr(args, "calibrate", None)
    if asked is not None and asked > longest:
        raise ConfigError(f"--prompt-tokens {asked}: prompts have 1 to data.max_prompt_tokens = {longest}")
    measured = None if run is None else run_prompt_tokens(run)
    return int(asked or min(longest, measured or usual_prompt_tokens(config)))


def length_settings(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.trace is not None and args.lognormal is not None:
        raise ConfigError("--trace and --lognormal exclude each other; drop one of them")
    if args.trace_column is not None and args.trace is None:
        raise ConfigError(f"--trace-column {args.trace_column} names a column of no file; give --trace, too")
    if args.trace is not None:
        return {"forced_lengths": [str(args.trace), args.trace_column] if args.trace_column else str(args.trace)}
    if args.lognormal is not None:
        return {"forced_lengths": list(args.lognormal)}
    return None


def forced_lengths(args: argparse.Namespace) -> list[str]:
    return [f"rollout.{name}={json.dumps(value)}" for name, value in (length_settings(args) or {}).items()]


def _median_sigma(text: str) -> tuple[float, float]:
    try:
        median, sigma = map(float, text.split(","))
        if isfinite(median) and isfinite(sigma):
            return median, sigma
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not MEDIAN,SIGMA, two finite numbers, as in 64,1.0")
