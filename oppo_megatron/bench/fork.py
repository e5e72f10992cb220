"""What forking saves: runs in which a prompt's cache is computed once for its group, and runs in which by each response."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from oppo_megatron.bench.figures import figures, speedups, steady
from oppo_megatron.bench.pictures import draw_forks
from oppo_megatron.bench.suite import Runs, Suite, all_lines, require_same_work, work_figures
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError

COLUMNS = {
    "prompt tokens": "prompt_tokens", "fork": "fork", "s/step": "step_s", "min": "min_step_s", "max": "max_step_s",
    "decode": "decode_s", "exp. scoring": "score_exposed_s", "train": "train_s", "prefilled": "prefilled_tokens",
    "forked": "forked_tokens", "total s": "total_s", "x apart": "speedup_step_s", "x apart (run)": "speedup_total_s",
}  # fmt: skip


def bench_fork(suite: Suite, configs: Mapping[int, TrainConfig]) -> dict[str, Any]:
    """Run each configuration, by the tokens of its prompts, with forks and without.  Writes fork.json and fork.png.

    Raises ConfigError where the responses are no groups.
    """
    base = next(iter(configs.values()))
    if base.rollout.group_size == 1:
        raise ConfigError(
            "rollout.group_size is 1: a prompt has one response, and no cache is forked; give rollout.group_size=8, or an "
            "algorithm.preset of groups"
        )
    runs = suite.run(
        {
            f"{tokens}/{'forked' if fork else 'apart'}": with_fork(config, fork)
            for tokens, config in configs.items()
            for fork in (True, False)
        }
    )
    result = {"results": rows(runs), **work_figures(runs)}
    suite.write("fork", base, result, runs)
    draw_forks(result["results"], suite.out / "fork.png")
    require_same_work(base, result)
    return result


def with_fork(config: TrainConfig, fork: bool) -> TrainConfig:
    """The configuration with `debug.fork` on or off."""
    return config.model_copy(update={"debug": config.debug.model_copy(update={"fork": fork})})


def rows(runs: Runs) -> list[dict[str, Any]]:
    """A row a run, by name TOKENS/forked or TOKENS/apart.

    Tokens are means over all steps: the first one prefills what is carried to later ones, too.
    """
    found = {}
    for name, turns in runs.items():
        tokens, kind = name.split("/")
        seconds = [line["step_s"] for line in steady(all_lines(turns))]
        lines = [line for run in turns for line in run.lines]
        found[name] = {
            "prompt_tokens": int(tokens),
            "fork": "yes" if kind == "forked" else "no",
            "min_step_s": min(seconds),
            "max_step_s": max(seconds),
            **{key: fmean(line[key] for line in lines) for key in ("prefilled_tokens", "forked_tokens")},
            **figures(all_lines(turns)),
        }
    for row in found.values():
        row |= speedups(row, found.get(f"{row['prompt_tokens']}/apart"), "speedup")
    return list(found.values())
