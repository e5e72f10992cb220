"""Whether runs that are compared did the same work, told by the tokens that they decoded.

With forced lengths every run of as many steps decodes the same tokens, however it carries them from step to step: what was
decoded and not trained yet is trained by the end.  Without them a policy that trains on other batches says other things.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oppo_megatron.bench.outcomes import BenchError
from oppo_megatron.bench.suite import Runs
from oppo_megatron.config.run import TrainConfig


def work_figures(runs: Runs) -> dict[str, Any]:
    """`decoded_tokens` of each run by name, one number a repeat, and whether all are the same: `same_work`."""
    tokens = {name: [sum(line["tokens"] for line in run.lines) for run in turns] for name, turns in runs.items()}
    return {"same_work": len({count for counts in tokens.values() for count in counts}) <= 1, "decoded_tokens": tokens}


def work_lines(result: Mapping[str, Any]) -> list[str]:
    """What `work_figures` found, in words."""
    tokens = result["decoded_tokens"]
    if result["same_work"]:
        return [f"the same work: {next(iter(tokens.values()))[0]} decoded tokens in every run"]
    found = ", ".join(f"{name} {' '.join(map(str, counts))}" for name, counts in tokens.items())
    return [
        f"NOT the same work (decoded tokens: {found}): seconds and totals do not compare, tokens/s do; force lengths with "
        "--lognormal or --trace"
    ]


def require_same_work(config: TrainConfig, result: Mapping[str, Any]) -> None:
    """Raises BenchError where lengths were forced, and runs did other work all the same."""
    if config.debug.forced_lengths is not None and not result["same_work"]:
        raise BenchError(f"lengths were forced, but this is {work_lines(result)[0].partition(';')[0]}")
