"""Finds a directory's policy: export, adapters, Megatron checkpoint, run or its checkpoint.  Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.explain import first_problem
from oppo_megatron.config.load import read_tree
from oppo_megatron.config.model import Dtype, ModelConfig, ParallelConfig, TrainedRoleConfig
from oppo_megatron.config.paths import missing_path
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from oppo_megatron.data.tokenizer import Tokenizer, load_tokenizer
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.shape import check_head, check_shape
from oppo_megatron.modeldir.adapters import ADAPTER_CONFIG, lora_of, read_adapter_config
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.modeldir.megatron import SHAPE, find_megatron
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.manifest import MANIFEST, find_damage, read_manifest

RUN_CONFIG, WEIGHTS, CHECKPOINTS, MODELS = "config.yaml", "weights", "checkpoints", "models"
ROLES = ("actor", "model")
"""Names of a run's policy weights: `oppo train`, supervised training."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
DEEPEST = 4
"""Folders between a run and the innermost one that may be named: checkpoints/step-000001/models/actor."""
RunConfig = TrainSettings | SupervisedConfig


@dataclass(frozen=True)
class Choice:
    """The user's choices; None: the directory's own."""

    tokenizer: Path | None = None
    chat_template: str | None = None
    base: Path | None = None
    dtype: Dtype | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    date: datetime | None = None


@dataclass(frozen=True)
class Policy:
    """`summary`: a line on the choice.  `adapters`: folder of a checkpoint of adapters, and their name; `model`: their base."""

    directory: Path
    summary: str
    model: TrainedRoleConfig
    hf_config: dict[str, Any]
    tokenizer: TokenizerConfig
    run: RunConfig | None = None
    adapters: tuple[Path, str] | None = None


@dataclass(frozen=True)
class _Weights:
    model: TrainedRoleConfig
    summary: str
    own: Path | None = None  # files here belong to the weights
    adapters: tuple[Path, str] | None = None


def find_policy(directory: Path, choice: Choice = Choice()) -> Policy:
    """Raises CheckpointError or ConfigError, with a remedy."""
    if not directory.exists():
        raise CheckpointError(missing_path("the policy", directory))
    if not directory.is_dir():
        raise CheckpointError(f"`{directory}` is a file; a policy is a directory: name the one that this file lies in")
    run_directory = _run_above(directory)
    run = None if run_directory is None else read_run(run_directory)
    if directory == run_directory:
        found = _of_run(directory, run, choice)
    elif CheckpointStore(directory).positions():
        found = _of_checkpoint(directory / CheckpointStore(directory).positions()[-1].name, run, choice)
    elif (directory / MANIFEST).is_file() and (directory / MODELS).is_dir():
        found = _of_checkpoint(directory, run, choice)
    else:
        found = _of_directory(directory, run, choice)
    hf_config = read_hf_config(found.model)
    where = str(found.model.checkpoint or directory)
    if problems := check_head(where, hf_config, scalar=False):
        raise CheckpointError(
            f"{problems[0]}: a reward model or critic generates no text; name the policy (of a run: its {WEIGHTS}/actor)"
        )
    return Policy(directory, found.summary, found.model, hf_config, _tokenizer(found, run, choice), run, adapters=found.adapters)


def read_run(directory: Path) -> RunConfig:
    """Settings of a run.  Raises ConfigError if another command or version wrote them."""
    tree = read_tree(directory / RUN_CONFIG)
    sections: dict[str, type[RunConfig]] = {"actor": TrainSettings, "dpo": DPOConfig, "separator": RewardModelConfig}
    kind = next((kind for name, kind in sections.items() if name in tree), SFTConfig)
    try:
        run = kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            f"`{directory / RUN_CONFIG}` is not the configuration of a run of this version ({first_problem(error)}); copy the "
            "folder of its weights away from it, and name that"
        ) from error
    return run.model_copy(update={"tokenizer": run.tokenizer.dated(RunDirectory(directory).kept_date)})


def run_of(directory: Path) -> RunConfig | None:
    """Settings of a directory's run, or None.  Raises as `read_run`."""
    above = _run_above(directory)
    return None if above is None else read_run(above)


def _run_above(directory: Path) -> Path | None:
    resolved = directory.resolve()
    for above, shown in zip((resolved, *resolved.parents[:DEEPEST]), (directory, *resolved.parents), strict=False):
        if (above / RUN_CONFIG).is_file() and any((above / name).exists() for name in ("metrics.jsonl", CHECKPOINTS)):
            return shown
    return None


def _of_run(directory: Path, run: RunConfig | None, choice: Choice) -> _Weights:
    for weights in (directory / WEIGHTS / "actor", directory / WEIGHTS):
        if any((weights / name).is_file() for name in (SHAPE, ADAPTER_CONFIG)):
            found = _of_directory(weights, run, choice)
            return replace(found, summary=f"final weights of the run {directory} ({found.summary})")
    positions = CheckpointStore(directory / CHECKPOINTS).positions()
    if not positions:
        raise CheckpointError(
            f"`{directory}` is a run without final weights and without a checkpoint; let it finish, or have it save "
            "(checkpoint.every_steps)"
        )
    return _of_checkpoint(directory / CHECKPOINTS / positions[-1].name, run, choice)


def _of_checkpoint(folder: Path, run: RunConfig | None, choice: Choice) -> _Weights:
    entries = read_manifest(folder)
    if damage := find_damage(folder, entries, checksums=False):
        raise CheckpointError(f"`{folder}`: {damage}; name another checkpoint of the run, or restore the file from a copy")
    role = next((name for name in ROLES if (folder / MODELS / name / SHAPE).is_file()), None)
    if role is None:
        raise CheckpointError(f"`{folder}` holds no policy (no {MODELS}/actor); name another checkpoint, or an export")
    position = Position.of(folder.name)
    summary = f"checkpoint {folder}" + ("" if position is None else f", after {position.step} steps")
    own = None if run is None else _role_of(run)
    if own is None or own.lora is None:
        return _Weights(_model(folder / MODELS / role, own, choice), summary)
    began = {} if choice.base is None else {"checkpoint": choice.base, "init": None}
    model = own.model_copy(update={"dtype": choice.dtype or own.dtype, **began})
    base = model.checkpoint or "the weights that the run drew"
    return _Weights(model, f"{summary}, adapters of {base}", adapters=(folder / MODELS, role))


def _of_directory(directory: Path, run: RunConfig | None, choice: Choice) -> _Weights:
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / SHAPE).is_file():
        return _of_adapters(directory, run, choice)
    if not (directory / SHAPE).is_file() and find_megatron(directory) is None:
        inner = sorted(p.name for p in directory.iterdir() if any((p / name).is_file() for name in (RUN_CONFIG, SHAPE)))
        remedy = f"name one of {', '.join(f'`{directory / name}`' for name in inner[:3])}" if inner else "name one of these"
        raise CheckpointError(
            f"`{directory}` holds no policy: neither a run ({RUN_CONFIG}) or its checkpoint, nor a Hugging Face or Megatron "
            f"folder ({SHAPE}), nor adapters ({ADAPTER_CONFIG}); {remedy}"
        )
    model = _model(directory, None if run is None else _role_of(run), choice)
    kind = "Hugging Face directory" if find_megatron(directory) is None else "Megatron checkpoint"
    return _Weights(model, f"{kind} {directory}", own=directory)


def _of_adapters(directory: Path, run: RunConfig | None, choice: Choice) -> _Weights:
    lora, found = lora_of(directory), read_adapter_config(directory)
    if found.get("task_type") == "SEQ_CLS":
        raise CheckpointError(
            f"`{directory}` holds the adapters of a reward model or critic, which generates no text; name the policy's (in a "
            f"run: {WEIGHTS}/actor)"
        )
    named = found.get("base_model_name_or_path")
    tried = [choice.base] if choice.base is not None else [Path(named), directory / named] if named else []
    base = next((path for path in tried if path.is_dir()), None)
    if base is None:
        said = f"`{tried[0]}`, which is not a directory here" if tried else "no base"
        raise CheckpointError(f"`{directory}` holds adapters and names {said}; give the directory of their base model (--base)")
    model = _model(base, None if run is None else _role_of(run), choice).model_copy(update={"lora": lora})
    return _Weights(model, f"adapters {directory} of {base}", own=directory)


def _model(directory: Path, own: TrainedRoleConfig | None, choice: Choice) -> TrainedRoleConfig:
    """Weights in the chosen dtype, else the run's, else the stored one."""
    dtype = choice.dtype or (None if own is None else own.dtype)
    if dtype is None:
        hf_config = read_hf_config(ModelConfig(checkpoint=directory))
        dtype = "bfloat16" if "bfloat16" in (hf_config.get("dtype"), hf_config.get("torch_dtype")) else "float32"
    return TrainedRoleConfig(checkpoint=directory, dtype=dtype)


def _role_of(run: RunConfig) -> TrainedRoleConfig:
    return run.actor if isinstance(run, TrainSettings) else TrainedRoleConfig(**run.model.model_dump())


def _tokenizer(found: _Weights, run: RunConfig | None, choice: Choice) -> TokenizerConfig:
    """The chosen one, else of the weights, the run, or the adapters' base."""
    template = choice.chat_template or (None if run is None else run.tokenizer.chat_template)
    of_run = None if run is None or not run.tokenizer.path.exists() else run.tokenizer.path
    path = choice.tokenizer or _with_tokenizer(found.own) or of_run or _with_tokenizer(found.model.checkpoint)
    if path is None:
        theirs = "" if run is None else f", and its run's, `{run.tokenizer.path}`, is not there"
        raise ConfigError(
            f"{found.summary}: they have no tokenizer{theirs}; name one with --tokenizer (a Hugging Face directory or a "
            "sentencepiece .model file)"
        )
    began = TokenizerConfig(path=path) if run is None else run.tokenizer
    arguments = {**began.template_arguments, **choice.template_arguments}
    now = choice.date or began.date or datetime.now()
    changed = began.model_copy(update={"path": path, "chat_template": template, "template_arguments": arguments})
    return changed.dated(now.replace(microsecond=0))


def _with_tokenizer(directory: Path | None) -> Path | None:
    return directory if directory and any((directory / name).is_file() for name in TOKENIZER_FILES) else None


def policy_tokenizer(policy: Policy) -> Tokenizer:
    """Load the tokenizer; `generation_config.json` of the initial model says where responses end."""
    began = None if policy.run is None else _role_of(policy.run).checkpoint
    return load_tokenizer(policy.tokenizer, began if began is not None and began.is_dir() else policy.model.checkpoint)


def require_layout(policy: Policy, parallel: ParallelConfig, max_length: int, vocab_size: int) -> None:
    """Raise CheckpointError if the model does not fit."""
    if problems := check_shape(str(policy.directory), policy.hf_config, parallel, max_length, vocab_size):
        raise CheckpointError("\n".join(problems))
