"""Loads and checks the configuration of a command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oppo_megatron.config.describe import COMMANDS, SUPERVISED
from oppo_megatron.config.load import load_config, read_tree
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.length_trace import trace_problems
from oppo_megatron.errors import ConfigError
from oppo_megatron.preflight.validate import service_problems, supervised_problems, train_problems

OF_RM = {"chosen", "completions", "labels"}
MOST_CHARACTERS = 1 << 20


def guess_kind(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the command to which most keys belong; among equals, one with all required keys.

    `sft` and `rm` have the same keys: columns or a first row with chosen answers or steps mean `rm`.
    """
    tree = read_tree(path, overrides)
    keys = set(tree)
    kind = max(COMMANDS, key=lambda kind: (len(keys & COMMANDS[kind].model_fields.keys()), not _lacking(kind, keys)))
    data = tree.get("data")
    return "rm" if kind == "sft" and isinstance(data, Mapping) and OF_RM & _columns(data) else kind


def _columns(data: Mapping[str, Any]) -> set[str]:
    """Return the parts with a column of their own, and the columns of the first row if the data is one JSONL file."""
    named = data.get("columns")
    found = set(named) if isinstance(named, Mapping) else set[str]()
    path = Path(str(data.get("path")))
    if path.suffix == ".jsonl" and path.is_file():
        with suppress(OSError, ValueError), path.open(encoding="utf-8") as file:
            found |= set(json.loads(file.readline(MOST_CHARACTERS)))
    return found


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
    """Return a command's checked configuration, not yet placed.  `inputs`, `models`: require that they exist."""

    def problems(config: TrainSettings) -> list[str]:
        traced = trace_problems(config.rollout.lengths, config.rollout.max_response_tokens)
        return [*train_problems(config, inputs=inputs, models=models), *traced]

    require_kind(kind, path, overrides)
    if kind == "train":
        return load_config(TrainSettings, path, overrides, check=problems)
    return load_config(SUPERVISED[kind], path, overrides, check=supervised_problems)


def load_checked(kind: str, path: Path, overrides: Sequence[str], *, inputs: bool = True) -> TrainConfig | SupervisedConfig:
    """`load_settings` for commands that need the placement.  Raises ConfigError for mode auto, too."""
    settings = load_settings(kind, path, overrides, inputs=inputs)
    config = settings.settled() if isinstance(settings, TrainSettings) else settings
    if config is None:
        raise ConfigError(
            f"{path}: placement.mode is auto, which `oppo train` settles before a run, but this command does not; measure "
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
