"""Configuration rules, and the files that it names; `layout/checks.py` checks ranks and layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from oppo_megatron.config.data import RowsConfig
from oppo_megatron.config.derived import adapters, scorers
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.paths import check_exists, check_files, irregular_path
from oppo_megatron.config.ppo import RolloutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.run_rules import supervised_rules, train_rules
from oppo_megatron.config.supervised import DPOConfig, SupervisedConfig
from oppo_megatron.modeldir.headers import check_adapter


def check_train(config: TrainConfig, *, inputs: bool = True, models: bool = True) -> list[str]:
    """Return every broken rule. `inputs`, `models`: require tokenizer and rows, or the models' folders, to exist."""
    roles: list[tuple[str, ModelConfig]] = [("actor", config.actor), *scorers(config)]
    data = [("data", config.data)] + ([("evaluation.data", config.evaluation.data)] if config.evaluation else [])
    return [
        *check_run_dir(config),
        *train_rules(config),
        *check_trace(config.rollout),
        *(problem for name, role in roles if models for problem in _check_source_files(name, role)),
        *(check_exists("tokenizer.path", config.tokenizer.path) if inputs else []),
        *(problem for name, rows in data if inputs for problem in check_rows(name, rows)),
        *(problem for name, lora in adapters(config).items() for problem in check_adapter(name, lora)),
    ]


def check_supervised(config: SupervisedConfig) -> list[str]:
    """Return every broken rule of a supervised run's settings."""
    data = [("data", config.data)]
    if config.evaluation is not None and config.evaluation.data is not None:
        data.append(("evaluation.data", config.evaluation.data))
    return [
        *check_run_dir(config),
        *supervised_rules(config),
        *(problem for name, model in config.models.items() for problem in _check_source_files(name, model)),
        *(_check_reference_file(config) if isinstance(config, DPOConfig) else ()),
        *check_exists("tokenizer.path", config.tokenizer.path),
        *(problem for name, rows in data for problem in check_rows(name, rows)),
        *(problem for name, lora in adapters(config).items() for problem in check_adapter(name, lora)),
    ]


def check_run_dir(config: TrainConfig | SupervisedConfig) -> list[str]:
    if config.run_dir.exists() and not config.run_dir.is_dir():
        return [f"run_dir `{config.run_dir}` is a file, but must be a folder; name another"]
    existing = next(path for path in (config.run_dir, *config.run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [f"run_dir `{config.run_dir}`: nothing can be written in `{existing}`; choose a folder that you may write"]
    return []


def check_trace(rollout: RolloutConfig) -> list[str]:
    trace = None if rollout.lengths is None else rollout.lengths.trace
    return [] if trace is None else check_exists("rollout.forced_lengths", trace)


def check_stop_ids(rollout: RolloutConfig, vocab_size: int) -> list[str]:
    """Check that stop ids are in the actor's vocabulary."""
    return [
        f"rollout.stop has {i}, but the actor's vocabulary ends at {vocab_size - 1}; correct or remove it"
        for i in rollout.stop_token_ids
        if i >= vocab_size
    ]


def check_source(name: str, model: ModelConfig) -> list[str]:
    """Check that exactly one of checkpoint and init is given, and exists."""
    return [*model.rules(name)] or _check_source_files(name, model)


def _check_source_files(name: str, model: ModelConfig) -> list[str]:
    if (model.checkpoint is None) == (model.init is None):
        return []
    if model.checkpoint is not None:
        return check_exists(f"{name}.checkpoint", model.checkpoint)
    return [] if model.init is None or isinstance(model.init, dict) else check_exists(f"{name}.init", model.init)


def check_data(name: str, data: RowsConfig, templates: Sequence[str]) -> list[str]:
    return [*data.rules(name, templates), *check_rows(name, data)]


def check_rows(name: str, data: RowsConfig) -> list[str]:
    paths = data.path if isinstance(data.path, list) else [data.path]
    return [problem for path in paths for problem in check_files(f"{name}.path", path)]


def _check_reference_file(config: DPOConfig) -> Iterator[str]:
    path = config.reference_logprobs
    if path is None or not path.exists():
        return
    if path.is_dir():
        yield f"reference_logprobs is {path}, which is a folder; name a file in it, as in {path / 'reference.safetensors'}"
    elif problem := irregular_path("reference_logprobs", path, "name a regular file, or one that is not there yet"):
        yield problem
