"""The cost of the loop itself, besides the models: scheduler, buffer, planner, checker, stream and controllers.

It is measured twice: by part in a dry run without models, and in real runs, where each rank times its planning and booking
(`planning_s` of the metrics).  A step of tiny models at the requested batch shows its largest possible share.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Mapping, Sequence
from io import StringIO
from statistics import median
from typing import Any

from oppo_megatron.bench.dry_run import PARTS, DryRun
from oppo_megatron.bench.figures import median_of, share, steady
from oppo_megatron.bench.pictures import draw_overhead
from oppo_megatron.bench.scaling import with_batch
from oppo_megatron.bench.suite import Runs, Suite, all_lines
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.report.utilization import untraced_percent

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
}
DRY_STEPS = 8
COLUMNS = {
    "run": "run", "B": "batch_size", "s/step": "step_s", "planning ms/step": "planning_ms", "% of the step": "planning_percent",
    "outside any span %": "untraced_percent",
}  # fmt: skip


def bench_overhead(suite: Suite, config: TrainConfig, batch: int, *, profile: bool = False) -> dict[str, Any]:
    """The dry run at `batch` rollouts a step, tiny models at `batch`, and the configuration as it is.

    `profile`: the dry run is repeated under cProfile, and the result has its `profile`.  Writes overhead.json and
    overhead.png.
    """
    unit = config.ppo.minibatches * config.rollout.group_size
    if batch % unit:
        raise ConfigError(
            f"--batch is {batch}, but must be a multiple of {unit} (ppo.minibatches {config.ppo.minibatches} times "
            f"rollout.group_size {config.rollout.group_size}); give --batch {max(1, batch // unit) * unit}"
        )
    large = with_batch(config, batch)
    dry = dry_figures(_dry_run(large).run())
    suite.say(f"--- dry run at B = {batch}: {dry['total_ms']:.1f} ms/step")
    configs = {"tiny": tiny(large), "own": config}
    runs = suite.run(configs)
    result = {"batch": batch, "dry": dry, "filtered": config.filter is not None, **compare(configs, runs, dry, batch)}
    suite.write("overhead", config, result, runs)
    draw_overhead(dry, suite.out / "overhead.png")
    return result | ({"profile": _profiled(large)} if profile else {})


def tiny(config: TrainConfig) -> TrainConfig:
    """The configuration with models of one narrow layer, so that the loop's own share is as large as it can be.

    Raises ConfigError for weights, which cannot be replaced.
    """
    changes: dict[str, Any] = {}
    for name in ("actor", "critic", "reward", "reference"):
        role = getattr(config, name)
        if role is None:
            continue
        if role.init is None:
            raise ConfigError(
                f"{name}.checkpoint is given, but the tiny models are random ones; give {name}.init instead"
            )
        shape = {key: value for key, value in read_hf_config(role).items() if key != "head_dim"}
        changes[name] = role.model_copy(update={"init": {**shape, **TINY}})
    return config.model_copy(update=changes)


def dry_figures(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Milliseconds a step by part: medians over the steps after the first; all steps as they were."""
    later = steps[1:] or steps
    parts = {part: 1e3 * median(step[part] for step in later) for part in PARTS}
    return {
        "parts_ms": parts,
        "total_ms": 1e3 * median(sum(step.values()) for step in later),
        "steps": [dict(step) for step in steps],
    }


def compare(configs: Mapping[str, TrainConfig], runs: Runs, dry: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """A row a real run, and what the dry run's milliseconds are of a step of the configuration's models at `batch`.

    That step is taken to be as many times as long as the batch is larger: decoding many sequences at once takes less, so
    where the batch cannot be run the percentage is a lower bound.
    """
    rows: list[dict[str, Any]] = []
    for name, turns in runs.items():
        lines = steady(all_lines(turns))
        planning = median_of(lines, "planning_s")
        rows.append(
            {
                "run": name,
                "batch_size": configs[name].rollout.batch_size,
                "step_s": median_of(lines, "step_s"),
                "planning_ms": None if planning is None else 1e3 * planning,
                "planning_percent": share(lines, "planning_s", "step_s"),
                "untraced_percent": untraced_percent([run.path for run in turns]),
            }
        )
    own = rows[-1]
    scaled_s = own["step_s"] * batch / own["batch_size"]
    return {"results": rows, "scaled_step_s": scaled_s, "scaled_percent": dry["total_ms"] / 10 / scaled_s}


def remarks(result: Mapping[str, Any]) -> list[str]:
    """The lines beside the table."""
    dry, batch = result["dry"], result["batch"]
    own = result["results"][-1]
    parts = ", ".join(f"{part} {ms:.1f}" for part, ms in dry["parts_ms"].items())
    return [
        f"without models, B = {batch}: {dry['total_ms']:.1f} ms/step ({parts})",
        *(["the dry run has no rewards, and so no filter: every group is kept"] if result["filtered"] else []),
        f"that is {result['scaled_percent']:.3f} % of a step of the configuration's models at B = {batch}, if {batch} rollouts "
        f"take {batch / own['batch_size']:g} times as long as {own['batch_size']}: {result['scaled_step_s']:.1f} s",
    ]


def _dry_run(config: TrainConfig) -> DryRun:
    return DryRun(config.model_copy(update={"steps": DRY_STEPS}), config.data.max_prompt_tokens)


def _profiled(config: TrainConfig, lines: int = 20) -> str:
    """The functions of the dry run that take the most time themselves."""
    profiler = cProfile.Profile()
    profiler.runcall(_dry_run(config).run)
    text = StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()
