"""Fixed deltas and rules for delta: seconds a step, and the cost of carrying rollouts (the paper's Figure 7a)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oppo_megatron.bench.figures import figures, mean_of, speedups, steady
from oppo_megatron.bench.limit import run_with_limits
from oppo_megatron.bench.pictures import draw_deltas
from oppo_megatron.bench.suite import Lines, Suite, all_lines, require_same_work, work_figures
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.delta_controllers import RULES
from oppo_megatron.errors import ConfigError

MOVING_RULES = tuple(rule for rule in RULES if rule != "fixed")
REWARD_RULES = {"eq4", "algorithm1"}
COMPARED_RULES = tuple(rule for rule in MOVING_RULES if rule != "eq4_literal")
COLUMNS = {
    "delta": "delta", "mean": "delta_mean", "last": "delta_last", "s/step": "step_s", "total s": "total_s",
    "x delta 0": "speedup_total_s", "tokens/s": "tokens_per_s", "carried": "carried", "stale %": "stale_percent",
    "waste %": "waste_percent", "gap %": "gap_percent", "length gap": "length_gap", "ess": "ess", "reward": "reward",
}  # fmt: skip


def bench_delta(
    suite: Suite, config: TrainConfig, fixed: Sequence[int], rules: Sequence[str], limit_cores: int | None = None
) -> dict[str, Any]:
    """Run the configuration with each fixed delta and each rule.  Writes delta.json and delta.png.

    `limit_cores`: add the least time that the work can take on so many cores; None: no limit.
    """
    configs = delta_configs(config, fixed, rules)
    runs, limits = run_with_limits(suite, configs, limit_cores)
    rows = [row(name, all_lines(turns)) for name, turns in runs.items()]
    plain = next((each for each in rows if each["delta"] == "fixed-0"), None)
    for each in rows:
        each |= speedups(each, plain, "speedup")
    steps = len(next(iter(runs.values()))[0].lines)
    result = {"steps": steps, "results": rows, **work_figures(runs), **limits}
    suite.write("delta", config, result, runs)
    draw_deltas({name: turns[0].lines for name, turns in runs.items()}, suite.out / "delta.png")
    require_same_work(config, result)
    return result


def delta_configs(config: TrainConfig, fixed: Sequence[int], rules: Sequence[str]) -> dict[str, TrainConfig]:
    """The configurations by name; a rule begins and is bounded as configured."""
    if not config.overlap.inter:
        raise ConfigError("overlap.inter is false: then delta is 0 whatever its rule; set overlap.inter=true")
    delta = config.overlap.delta
    changes: dict[str, dict[str, Any]] = {
        f"fixed-{size}": {"rule": "fixed", "initial": size, "max": max(size, delta.max)} for size in fixed
    }
    changes |= {rule: {"rule": rule} for rule in rules}
    configs = {}
    for name, change in changes.items():
        overlap = config.overlap.model_copy(update={"delta": delta.model_copy(update=change)})
        configs[name] = config.model_copy(update={"overlap": overlap})
    return configs


def row(name: str, runs: Sequence[Lines]) -> dict[str, Any]:
    """The figures of a rule.  All except times are means over the steps after the first.

    `length_gap`: tokens by which the trained responses are shorter than all that were submitted, the carried ones counted
    with what they have; `gap_percent`: the same as a share; `waste_percent`: share of the decode batch that ran empty;
    `ess`: effective sample size of the batch as a share of its tokens, before the update.
    """
    lines = steady(runs)
    stale, waste, gap = (mean_of(lines, key) for key in ("stale_token_fraction", "tail_waste", "length_gap"))
    gaps = [line["submitted_len_mean"] - line["trained_len_mean"] for line in lines]
    return {
        "delta": name,
        **figures(runs),
        "delta_mean": mean_of(lines, "delta"),
        "delta_last": [run[-1]["delta"] for run in runs],
        "carried": mean_of(lines, "carried"),
        "stale_percent": None if stale is None else 100 * stale,
        "waste_percent": None if waste is None else 100 * waste,
        "gap_percent": None if gap is None else 100 * gap,
        "length_gap": sum(gaps) / len(gaps),
        "ess": mean_of(lines, "ess"),
        "reward": mean_of(lines, "reward_mean"),
    }


def remarks(config: TrainConfig, result: Mapping[str, Any]) -> list[str]:
    """The lines below the table."""
    steps, needed = result["steps"], 2 * config.overlap.delta.window
    if steps > needed or not REWARD_RULES & {row["delta"] for row in result["results"]}:
        return []
    return [
        f"{steps} steps are too few for a rule that compares rewards to move delta: it waits for 2 x "
        f"overlap.delta.window = {needed} of them; give more --steps, or a smaller window"
    ]
