"""Loads and checks the configuration of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oppo_megatron.config.describe import COMMANDS, SUPERVISED
from oppo_megatron.config.load import load_config, read_tree
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.files import data_files, file_rows
from oppo_megatron.data.length_trace import trace_problems
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.preflight.validate import service_problems, supervised_problems, train_problems


def guess_kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the command to which most keys belong; among equals, one with all required keys.

    `sft` and `rm` have the same keys: parts of rows with chosen answers or steps mean `rm`, `data.turns` means `sft`.
    """
    tree = read_tree(path, overrides)
    keys = set(tree)
    kind = max(COMMANDS, key=lambda kind: (len(keys & COMMANDS[kind].model_fields.keys()), not _lacking(kind, keys)))
    data = tree.get("data")
    return "rm" if kind == "sft" and isinstance(data, Mapping) and "turns" not in data and _is_for_rm(data) else kind


def _is_for_rm(data: Mapping[str, Any]) -> bool:
    """True if parts with a column of their own, or else the first row, have chosen answers or steps."""
    of_rm, named, paths = {"chosen", "completions", "labels"}, data.get("columns"), data.get("path")
    if isinstance(named, Mapping) and named:
        return not of_rm.isdisjoint(named)
    path = paths[0] if isinstance(paths, list) and paths else paths
    if isinstance(path, str):
        with suppress(OSError, DataError):  # the check of the data reports it
            for file in data_files(Path(path), lambda note: None)[:1]:
                _, row = next(file_rows(file), (0, {}))
                return isinstance(row, Mapping) and not of_rm.isdisjoint(row) and "completion" not in row
    return False


def require_kind(kind: str, path: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError for an empty file, or one with the required keys of another command only."""
    read_tree(path)  # an error in the file itself is reported alone
    try:
        keys, other = set(read_tree(path, overrides)), guess_kind(path, overrides)
    except ConfigError:
        return  # an invalid override is reported with all other problems
    if not keys:
        raise ConfigError(
            f"{path} is empty; write the settings of `oppo {kind}` into it, or begin with one that `oppo config --init` writes"
        )
    both_supervised = {kind, other} <= SUPERVISED.keys()
    if not both_supervised and other != kind and _lacking(kind, keys) and not _lacking(other, keys):
        raise ConfigError(
            f"{path} is a configuration for `oppo {other}`, by its keys, and not for `oppo {kind}`; run `oppo {other} {path}`, "
            "or name another file"
        )


def _lacking(kind: str, keys: set[str]) -> set[str]:
    if kind == "serve":
        return set() if keys & {"rewards", "reward"} else {"rewards"}
    return {name for name, field in COMMANDS[kind].model_fields.items() if field.is_required()} - keys


def load_settings(
    kind: str, path: Path, overrides: Sequence[str], *, inputs: bool = True, models: bool = True
) -> TrainSettings | SupervisedConfig:
    """Return the checked configuration, not yet placed. `inputs`, `models`: require that they exist."""

    def problems(config: TrainSettings) -> list[str]:
        traced = trace_problems(config.rollout.lengths, config.rollout.max_response_tokens)
        return [*train_problems(config, inputs=inputs, models=models), *traced]

    require_kind(kind, path, overrides)
    if kind == "train":
        return load_config(TrainSettings, path, overrides, check=problems)
    return load_config(SUPERVISED[kind], path, overrides, check=supervised_problems)


def load_checked(kind: str, path: Path, overrides: Sequence[str], *, inputs: bool = True) -> TrainConfig | SupervisedConfig:
    """`load_settings` with the placement. Raises ConfigError for mode auto, too."""
    settings = load_settings(kind, path, overrides, inputs=inputs)
    config = settings.resolved() if isinstance(settings, TrainSettings) else settings
    if config is None:
        raise ConfigError(
            f"{path}: placement.mode is auto, which `oppo train` measures before a run, but this command does not; measure "
            "with `oppo plan measure CONFIG` and write the placement that it prints, or add placement.mode=single"
        )
    return config


def load_train(path: Path, overrides: Sequence[str], *, inputs: bool = True) -> TrainConfig:
    """`load_checked` for commands that support only PPO."""
    config = load_checked("train", path, overrides, inputs=inputs)
    assert isinstance(config, TrainConfig)
    return config


def load_service(path: Path, overrides: Sequence[str]) -> ServeConfig:
    require_kind("serve", path, overrides)
    return load_config(ServeConfig, path, overrides, check=service_problems)
