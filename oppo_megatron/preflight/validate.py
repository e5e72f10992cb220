"""Check settings, files and shapes before anything expensive starts; `layout/checks.py` checks ranks and layouts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.config.data import RowsConfig, TokenizerConfig
from oppo_megatron.config.derived import adapters, max_context, scorers
from oppo_megatron.config.model import HEADS_LEARNED, LearningModelConfig, ModelConfig, PlacementConfig
from oppo_megatron.config.overlap import OverlapConfig
from oppo_megatron.config.paths import check_exists, check_files, irregular_path
from oppo_megatron.config.ppo import RolloutConfig
from oppo_megatron.config.rewards import check_rewards
from oppo_megatron.config.run import TrainConfig, TrainSettings
from oppo_megatron.config.run_rules import supervised_rules, train_rules
from oppo_megatron.config.serve import ServeConfig
from oppo_megatron.config.supervised import DPOConfig, SupervisedConfig
from oppo_megatron.errors import CheckpointError, DataError
from oppo_megatron.layout.checks import check_auto_placement, check_layouts, check_supervised_layout
from oppo_megatron.layout.families import traits
from oppo_megatron.layout.hf_layout import SCALAR_HEAD, Head, Tensor, adapter_problems, weight_problems
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.layout.shape import ModelShape, check_head, check_model, check_use, is_classifier, projections
from oppo_megatron.modeldir.adapters import ADAPTER_WEIGHTS
from oppo_megatron.modeldir.headers import (
    Stored,
    check_adapter,
    check_weights,
    read_hf_config,
    same_content,
    stored_tensors,
    tokenizer_vocab_size,
    weight_files,
)
from oppo_megatron.modeldir.megatron import find_megatron
from oppo_megatron.modeldir.vocabularies import compare_tokenizers
from oppo_megatron.rundir.metrics_log import read_installs

SHOWN = 3
"""Mismatched tensors shown per role."""


@dataclass(frozen=True)
class Role:
    """A model's source, and whether it has a scalar head."""

    name: str
    model: ModelConfig
    scalar: bool


def train_problems(settings: TrainSettings, *, inputs: bool = True, models: bool = True) -> list[str]:
    """Return every problem, except of automatic placements. `inputs`, `models`: require rows, or models' folders, to exist."""
    resolved = settings.resolved()
    # Only the layout checks look at the placement.
    config = resolved or settings.with_placement(PlacementConfig(mode="single"))
    problems = check_train(config, inputs=inputs, models=models)
    vocab_size = _vocab_size(config.tokenizer, problems)
    shapes: dict[str, Mapping[str, Any]] = {}
    for role in train_roles(config):
        shape = _check_role(role, max_context(config), vocab_size, problems)
        if shape is not None:
            shapes[role.name] = shape
    problems += check_auto_placement(settings) if resolved is None else check_layouts(resolved, shapes)
    problems += check_shared_vocabulary(shapes)
    problems += compare_with_roles(config.tokenizer, train_roles(config))[0]
    if isinstance(vocab := shapes.get("actor", {}).get("vocab_size"), int):
        problems += check_stop_ids(settings.rollout, vocab)
    return list(dict.fromkeys(problems))


def supervised_problems(config: SupervisedConfig) -> list[str]:
    problems = check_supervised(config)
    vocab_size = _vocab_size(config.tokenizer, problems)
    shapes: dict[str, Mapping[str, Any]] = {}
    roles = [Role(name, model, scalar=config.SCALAR) for name, model in config.models.items()]
    for role in roles:
        shape = _check_role(role, config.max_tokens, vocab_size, problems)
        if shape is not None:
            shapes[role.name] = shape
            problems += check_supervised_layout(config, shape, role.name)
    sizes = [shapes.get(name, {}).get("vocab_size") for name in ("model", "reference")]
    if None not in sizes and sizes[0] != sizes[1]:
        problems.append(f"reference: its vocabulary has {sizes[1]} entries, the model's has {sizes[0]}; use one family")
    problems += compare_with_roles(config.tokenizer, roles)[0]
    return list(dict.fromkeys(problems))


def service_problems(config: ServeConfig) -> list[str]:
    problems, vocab_size = list(config.rules()), None
    if not config.streams:
        problems += check_rewards(config.rewards, has_reward_model=config.reward is not None)
    if config.reward is None:
        return problems
    problems += check_source("reward", config.reward)
    role = Role("reward", config.reward, scalar=True)
    if config.tokenizer is not None:
        problems += check_exists("tokenizer.path", config.tokenizer.path)
        vocab_size = _vocab_size(config.tokenizer, problems)
        problems += compare_with_roles(config.tokenizer, [role])[0]
    _check_role(role, config.max_tokens, vocab_size, problems)
    return problems


def compare_with_roles(tokenizer: TokenizerConfig, roles: Iterable[Role]) -> tuple[list[str], list[str]]:
    """Problems of directories with another tokenizer, and a line per comparison."""
    if not tokenizer.path.exists():
        return [], []  # reported by the cross-checks
    directories: dict[str, Path] = {}
    for role in roles:
        lora = role.model.lora if isinstance(role.model, LearningModelConfig) else None
        for setting, directory in (
            ("checkpoint", role.model.checkpoint),
            ("lora.adapter", None if lora is None else lora.adapter),
        ):
            if directory is not None and directory.is_dir() and directory not in directories.values():
                directories[f"{role.name}.{setting}"] = directory
    return compare_tokenizers(tokenizer.path, directories)


def train_roles(config: TrainConfig) -> Iterator[Role]:
    """Roles of a PPO run; for a null reference, the actor's initial weights."""
    for name, model in named_roles(config).items():
        yield Role(name, model, scalar=name in ("critic", "reward"))


def check_shared_vocabulary(shapes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Check that each scorer has every id that the actor can draw, and the reference the same ones."""
    actor = shapes.get("actor", {}).get("vocab_size")
    problems = []
    for name, shape in shapes.items():
        vocab = shape.get("vocab_size")
        if not isinstance(actor, int) or not isinstance(vocab, int):
            continue
        if name == "reference" and vocab != actor:
            problems.append(f"reference: its vocabulary has {vocab} entries, but must equal the actor's {actor}; use one family")
        elif vocab < actor:
            problems.append(
                f"{name}: its vocabulary has {vocab} entries, but the actor can draw any of {actor}; "
                "use models that share a tokenizer and pad their embeddings to the same size"
            )
    return problems


def _check_role(role: Role, context: int, vocab_size: int | None, problems: list[str]) -> Mapping[str, Any] | None:
    """Add faults of files and shape to `problems`; return config.json if usable."""
    if check_source(role.name, role.model):
        return None  # reported by the cross-checks
    try:
        hf_config = read_hf_config(role.model)
    except CheckpointError as error:
        problems.append(f"{role.name}: {error}")
        return None
    problems += check_use(role.name, hf_config, context, vocab_size)
    known = len(problems)
    lora = role.model.lora if isinstance(role.model, LearningModelConfig) else None
    if lora is not None and not check_model(role.name, hf_config) and traits(hf_config).joined:
        problems.append(
            f"{role.name}.lora: adapters of {hf_config['model_type']}, whose files join projections, are not supported; remove it"
        )
    elif lora is not None and not check_model(role.name, hf_config) and set(lora.projections) - projections(hf_config).keys():
        problems.append(
            f"{role.name}.lora.targets: {', '.join(lora.projections)}, but experts take no adapters; set it to some of "
            f"{', '.join(projections(hf_config))}"
        )
    if role.model.checkpoint is not None:
        if find_megatron(role.model.checkpoint) is None:  # only the tensors of a Megatron checkpoint show its head
            problems += check_head(role.name, hf_config, scalar=role.scalar)
        problems += check_weights(role.name, role.model.checkpoint)
    if check_model(role.name, hf_config):
        return None
    if len(problems) == known:
        problems += _check_tensors(role, ModelShape.from_hf(hf_config), new_head=not is_classifier(hf_config))
    return hf_config


def _check_tensors(role: Role, shape: ModelShape, *, new_head: bool) -> list[str]:
    """Megatron's tensors are checked on loading. `new_head`: a learned one may be missing."""
    head: Head = "scalar" if role.scalar else "lm"
    checkpoint, problems = role.model.checkpoint, []
    if checkpoint is not None and find_megatron(checkpoint) is None:
        stored = stored_tensors(weight_files(checkpoint))
        tensors = _tensors(stored)
        if new_head and role.scalar and role.name in HEADS_LEARNED:
            tensors = {SCALAR_HEAD: Tensor((1, shape.hidden_size), "F32")} | tensors
        problems = weight_problems(shape, head, tensors, lambda one, other: same_content(stored[one], stored[other]))
    where, lora = checkpoint, role.model.lora if isinstance(role.model, LearningModelConfig) else None
    if not problems and lora is not None and lora.adapter is not None and not check_adapter(role.name, lora):
        where, stored = lora.adapter, stored_tensors({lora.adapter / ADAPTER_WEIGHTS: None})
        problems = adapter_problems(shape, lora, head, _tensors(stored))
    if not problems:
        return []
    more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
    return [f"{role.name}: the weights in `{where}` do not fit its model: {' '.join(problems[:SHOWN])}{more}"]


def _tensors(stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    return {name: Tensor(each.shape, each.dtype) for name, each in stored.items()}


def _vocab_size(tokenizer: TokenizerConfig, problems: list[str]) -> int | None:
    if not tokenizer.path.exists():
        return None  # reported by the cross-checks
    try:
        return tokenizer_vocab_size(tokenizer.path)
    except CheckpointError as error:
        problems.append(f"tokenizer: {error}")
        return None


def check_train(config: TrainConfig, *, inputs: bool = True, models: bool = True) -> list[str]:
    """Return every broken rule. `inputs`, `models`: require tokenizer and rows, or the models' folders, to exist."""
    roles: list[tuple[str, ModelConfig]] = [("actor", config.actor), *scorers(config)]
    data = [("data", config.data)] + ([("evaluation.data", config.evaluation.data)] if config.evaluation else [])
    return [
        *check_run_dir(config),
        *train_rules(config),
        *check_trace(config.rollout),
        *check_replay(config.overlap),
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


def check_replay(overlap: OverlapConfig) -> list[str]:
    path = None if overlap.continuous is None else overlap.continuous.replay
    if path is None or (missing := check_exists("overlap.continuous.replay", path)):
        return [] if path is None else missing
    try:
        read_installs(path)
    except DataError as error:
        return [f"overlap.continuous.replay: {error}"]
    return []


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
    return [problem for source in data.sources for problem in check_files(f"{name}.path", source.path)]


def _check_reference_file(config: DPOConfig) -> Iterator[str]:
    path = config.reference_logprobs
    if path is None or not path.exists():
        return
    if path.is_dir():
        yield f"reference_logprobs is {path}, which is a folder; name a file in it, as in {path / 'reference.safetensors'}"
    elif problem := irregular_path("reference_logprobs", path, "name a regular file, or one that is not there yet"):
        yield problem
