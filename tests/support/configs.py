"""Configurations of runs that are not started."""

from pathlib import Path
from typing import Any, TypeVar

from oppo_megatron.config.run import RunConfig, TrainConfig

RunT = TypeVar("RunT", bound=RunConfig)


def put(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.0.c` in nested sections, made where they are missing."""
    *sections, last = key.split(".")
    for section in sections:
        settings = settings[int(section)] if isinstance(settings, list) else settings.setdefault(section, {})
    settings[last] = value


def least_config(run_dir: Path, **sections: Any) -> TrainConfig:
    least = {
        "run_dir": run_dir, "tokenizer": {"path": "t"}, "data": {"path": "d"}, "actor": {"checkpoint": "a"},
        "critic": {"checkpoint": "a"}, "rewards": [{"kind": "verifier", "name": "gsm8k"}],
        "rollout": {"batch_size": 8, "max_response_tokens": 100},
    }  # fmt: skip
    return TrainConfig.model_validate(least | sections)


def run_of(config: dict[str, Any], kind: type[RunT] = TrainConfig) -> RunT:  # type: ignore[assignment]
    """The configuration of a run; `resume` in `checkpoint` stands for `--resume`, `kv_layout` in `runtime` for what a GPU has."""
    checkpoint = dict(config.get("checkpoint", {}))
    resumes = checkpoint.pop("resume", False)
    runtime = dict(config.get("runtime", {}))
    layout = runtime.pop("kv_layout", "auto")
    run = kind(**{**config, "checkpoint": checkpoint, "runtime": runtime})
    run = run.model_copy(update={"runtime": run.runtime.with_kv_layout(layout)})
    return run.resumed() if resumes else run
