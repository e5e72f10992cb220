"""The runs of `oppo bench machine`: one rank without overlaps, with one core and with all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainConfig
    from oppo_megatron.sim.pricing.engine_fit import Observed

ALONE = [
    "placement={mode: single}", "overlap.intra=false", "overlap.inter=false", "runtime.device=cpu", "logging.console=off",
    "evaluation=null", "checkpoint.every_minutes=0", "checkpoint.final=nothing",
]  # fmt: skip
SIGMA = 1.0
"""Of log-normal lengths where the configuration forces none; their median is a quarter of the longest."""


def fit_runs(path: Path, overrides: Sequence[str], folder: Path, steps: int, measured: Mapping[str, Any]) -> None:
    """Make the runs, fit the engine to their steps, show the errors, and add it to measured.json."""
    from oppo_megatron.rundir.directory import write_json
    from oppo_megatron.sim.clusters.reading import read_cluster
    from oppo_megatron.sim.clusters.sources import measured as measured_by
    from oppo_megatron.sim.pricing.engine_fit import PARAMETERS, fit_engine

    cluster = read_cluster(folder / "cluster.yaml")
    observed: list[Observed] = []
    for cores in sorted({1, cluster.gpus_per_node}):
        print(f"{steps} steps on one rank with {cores} of {cluster.gpus_per_node} cores ...", flush=True)
        config = _configured(path, overrides, folder, steps, cores)
        _make(config)
        observed += _observed(config)
    fit = fit_engine(cluster, observed, measured_by("runs of `oppo bench machine`"))
    constants = {name: getattr(fit.engine, name) for name in PARAMETERS}
    write_json(folder / "measured.json", {**measured, "engine": constants})
    print("engine: " + ", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    print("mean errors: " + ", ".join(f"{phase} {100 * error:.1f} %" for phase, error in fit.errors.items()))


def _configured(path: Path, overrides: Sequence[str], folder: Path, steps: int, cores: int) -> TrainConfig:
    from oppo_megatron.cli.run import load_train
    from oppo_megatron.data.random_prompts import write_random_prompts

    given = load_train(path, [*overrides, *ALONE], inputs=False)
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    tokenizer, prompts = write_random_prompts(inputs, given.data.max_prompt_tokens)
    own = [f"steps={steps}", f"runtime.threads_per_rank={cores}", f"run_dir={folder / f'{cores}-cores'}"]
    own += [f"tokenizer.path={tokenizer}", f"data.path={prompts}"]
    if given.debug.lengths is None:
        own.append(f"debug.forced_lengths=[{max(1, given.rollout.max_response_tokens // 4)},{SIGMA}]")
    return load_train(path, [*overrides, *ALONE, *own])


def _make(config: TrainConfig) -> None:
    """Raises WorldError where the run does not come to its end."""
    from oppo_megatron.cli.launch import launch
    from oppo_megatron.errors import WorldError

    code = launch("train", config, 1, in_process=False)
    if code:
        raise WorldError(f"the run in {config.run_dir} ended with exit code {code}; its error is above")


def _observed(config: TrainConfig) -> Iterator[Observed]:
    """The steps of a run after the first, which warms up."""
    from oppo_megatron.config.derived import batch_rows
    from oppo_megatron.config.forced_limits import ForcedLimits
    from oppo_megatron.data.length_trace import forced_quantile
    from oppo_megatron.rundir.directory import RunDirectory
    from oppo_megatron.rundir.metrics_log import read_metrics
    from oppo_megatron.sim.pricing.decoding import Decoding
    from oppo_megatron.sim.pricing.engine_fit import Observed

    forced, most, rows = config.debug.lengths, config.rollout.max_response_tokens, batch_rows(config)
    assert forced is not None
    limit_of = ForcedLimits.of(forced, most, config.seed, forced_quantile(forced, most))
    for step, line in enumerate(read_metrics(RunDirectory(config.run_dir).metrics)[1:], start=1):
        lengths = tuple(limit_of(seq_id) for seq_id in range(step * rows, (step + 1) * rows))
        seconds = {
            "decode": line["decode_s"], "score": line["score_busy_s"], "update": line["train_s"],
            "critic update": line.get("critic_update_s"),
        }  # fmt: skip
        yield Observed(
            config,
            Decoding(config.data.max_prompt_tokens, lengths),
            {name: value for name, value in seconds.items() if value},
        )
