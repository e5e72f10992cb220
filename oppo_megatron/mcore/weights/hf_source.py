"""Sources of Hugging Face tensors: a directory of safetensors, or random numbers keyed by a tensor's name."""

from __future__ import annotations

import difflib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.mcore.model_shape import ModelShape
from oppo_megatron.mcore.naming.hf_layout import LM_HEAD, SCALAR_HEAD, Head, hf_tensors
from oppo_megatron.mcore.weights.dist_source import DistSource
from oppo_megatron.modeldir.adapters import refuse_adapters
from oppo_megatron.modeldir.headers import is_inside
from oppo_megatron.modeldir.megatron import find_megatron, read_mapping

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
_SHOWN_PROBLEMS = 8


class TensorSource(Protocol):
    """Tensors by their Hugging Face name.  Shapes are known without reading data."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype | None:
        """None: stored as something else than a plain floating-point number (quantised, say)."""
        ...

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """The given region (a slice per dimension) of one tensor, on the CPU, in the dtype that it is stored in."""
        ...


class SafetensorsSource:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names, of a directory.

    Opening reads the headers of all files, so that a missing, truncated or damaged file is met before any work is done.
    """

    def __init__(self, directory: Path | str, file: str | None = None):
        """`file`: the only one, by another name than `model.safetensors`."""
        self.directory = Path(directory)
        _require_directory(self.directory)
        self._file_of = {}
        files = _files(self.directory) if file is None else {self.directory / file: None}
        for path, names in files.items():
            opened = _open(path)
            held = set(opened.keys())
            if absent := sorted(set(names or ()) - held):
                raise CheckpointError(
                    f"{path}: {INDEX_FILE} says it holds {absent[0]}, which it does not. Download the checkpoint again."
                )
            self._file_of.update(dict.fromkeys(names or held, opened))

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        return DTYPES.get(self._slice(name).get_dtype())

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._slice(name)[region]
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.directory}: no tensor {name}.{_nearest(name, self.names())}")
        return self._file_of[name].get_slice(name)


class DrawnSource(ABC):
    """Tensors that start from random numbers, a function of the seed and each tensor's name: the same in every layout."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int):
        self._shapes, self._seed = shapes, seed

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype | None:
        return torch.float32

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tensor = torch.zeros(self._shapes[name], dtype=torch.float32)
        self.draw(name, tensor, generator)
        return tensor[region]

    @abstractmethod
    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the whole tensor, which is zero."""


class RandomSource(DrawnSource):
    """The tensors of a model that starts from random numbers: matrices normal(0, init_std), norms one, biases zero."""

    def __init__(self, shape: ModelShape, seed: int, head: Head):
        super().__init__(hf_tensors(shape, head), seed)
        self._std = shape.init_std

    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if tensor.dim() > 1:
            tensor.normal_(0.0, self._std, generator=generator)
        elif not name.endswith(".bias"):
            tensor.fill_(1.0)


class FreshHead:
    """A causal LM's tensors with a random scalar head over them; its own `lm_head` is left unread."""

    def __init__(self, source: TensorSource, shape: ModelShape, seed: int):
        self._body = source
        self._head = RandomSource(shape, seed, "scalar")

    def names(self) -> Collection[str]:
        return {*self._body.names(), SCALAR_HEAD} - {LM_HEAD}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name).shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        return self._of(name).dtype(name)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        return self._of(name).read(name, region)

    def _of(self, name: str) -> TensorSource:
        return self._head if name == SCALAR_HEAD else self._body


def open_weights(model: ModelConfig, head: Head, shape_file: Path | None = None) -> tuple[ModelShape, TensorSource]:
    """Shape and checked source of the weights that a `ModelConfig` names.  Reads headers only.

    `fresh_head` lets a causal LM be loaded with a new scalar head; a head that the checkpoint has is kept.  `shape_file`:
    the `config.json` of a Megatron checkpoint that has none.
    Raises ConfigError if neither `checkpoint` nor `init` is given, CheckpointError if the weights do not fit the shape.
    """
    source: TensorSource
    if model.checkpoint is not None:
        shape, source = open_directory(model.checkpoint, shape_file)
        if head == "scalar" and model.fresh_head and SCALAR_HEAD not in source.names():
            source = FreshHead(source, shape, model.init_seed)
    elif model.init is not None:
        hf = read_mapping(model.init, "the model configuration") if isinstance(model.init, Path) else model.init
        shape = ModelShape.from_hf(hf, str(model.init) if isinstance(model.init, Path) else "init")
        source = RandomSource(shape, model.init_seed, head)
    else:
        raise ConfigError(
            "a model has neither checkpoint nor init: give a Hugging Face directory, or a shape to initialise."
        )
    require_source(shape, source, head, str(model.checkpoint or "init"))
    return shape, source


def open_directory(directory: Path, shape_file: Path | None = None) -> tuple[ModelShape, TensorSource]:
    """Shape and tensors of a Hugging Face or Megatron directory; `shape_file` says the shape of the latter."""
    _require_directory(directory)
    refuse_adapters(directory)
    megatron = find_megatron(directory, shape_file)
    if megatron is None:
        return read_shape(directory), SafetensorsSource(directory)
    shape = ModelShape.from_hf(read_mapping(megatron.shape, "the checkpoint's configuration"), str(megatron.shape))
    return shape, DistSource(megatron, shape)


def check_source(shape: ModelShape, source: TensorSource, head: Head) -> list[str]:
    """One sentence for each tensor that is missing, of the wrong shape, or has no place in the model.  Headers only."""
    names, expected = set(source.names()), hf_tensors(shape, head)
    if head == "lm" and SCALAR_HEAD in names:
        return [f"{SCALAR_HEAD} makes this a *ForSequenceClassification. An actor or reference needs a *ForCausalLM."]
    problems = []
    for name, size in expected.items():
        if name not in names:
            problems.append(_missing(name, names))
        elif source.shape(name) != size:
            remedy = _ONE_LABEL if name == SCALAR_HEAD else "Use the config.json that belongs to these weights."
            problems.append(f"{name} has shape {list(source.shape(name))}, config.json asks for {list(size)}. {remedy}")
        elif source.dtype(name) is None:
            problems.append(
                f"{name} is not stored as one of {sorted(DTYPES)}. Use the checkpoint that is not quantised."
            )
    for name in sorted(names - expected.keys()):
        # Older Llama checkpoints store the rotary frequencies, which follow from config.json.
        if name.startswith("model.") and not name.endswith("rotary_emb.inv_freq"):
            problems.append(
                f"{name} has no place in the model of config.json. Use the config.json that belongs to these weights."
            )
    return problems


def require_source(shape: ModelShape, source: TensorSource, head: Head, where: str) -> None:
    """Raise CheckpointError with what `check_source` finds."""
    problems = check_source(shape, source, head)
    if problems:
        more = [f"... and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
        lines = "\n".join(f"  - {p}" for p in problems[:_SHOWN_PROBLEMS] + more)
        raise CheckpointError(f"{where}: the weights do not fit the model:\n{lines}")


def read_shape(directory: Path | str) -> ModelShape:
    """The shape in a Hugging Face directory's `config.json`."""
    _require_directory(Path(directory))
    path = Path(directory) / "config.json"
    return ModelShape.from_hf(read_mapping(path, "the checkpoint's configuration"), str(path))


def side_files(directory: Path) -> list[Path]:
    """The files of tokenizer and generation settings in a Hugging Face directory, which go where the weights go."""
    return [directory / name for name in SIDE_FILES if (directory / name).is_file()]


_ONE_LABEL = "A reward or value head has one label: train or export the checkpoint with num_labels 1."


def _missing(name: str, names: Collection[str]) -> str:
    if name == SCALAR_HEAD:
        return (
            f"{SCALAR_HEAD} is missing: this is not a *ForSequenceClassification. Give one, or set fresh_head: true "
            "(`oppo convert`: --fresh-head-seed N) to start a new scalar head on this causal LM."
        )
    return f"{name} is missing.{_nearest(name, names)}"


def _nearest(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3)
    return (
        f" Nearest names: {', '.join(near)}."
        if near
        else " Use a checkpoint that this model family's transformers class saved."
    )


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"{directory} {what}: a checkpoint is a directory with config.json and safetensors. Correct the path."
        )


def _files(directory: Path) -> Mapping[Path, Sequence[str] | None]:
    """Each file of the checkpoint with the tensors it is to hold (None: all it has)."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: None}
    index = directory / INDEX_FILE
    if not index.is_file():
        raise CheckpointError(_no_safetensors(directory))
    weight_map = read_mapping(index, "the checkpoint's index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(map(is_inside, weight_map.values())):
        raise CheckpointError(
            f"{index}: no weight_map. An index maps each tensor to a file of its directory; download it again."
        )
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(directory / file, []).append(name)
    if missing := sorted(path.name for path in files if not path.is_file()):
        raise CheckpointError(
            f"{directory}: {missing} named by {INDEX_FILE} missing, of {len(files)} files. Download them."
        )
    return files


def _no_safetensors(directory: Path) -> str:
    if pickles := sorted(path.name for path in directory.glob("*.bin")):
        return (
            f"{directory}: only pickled weights ({pickles[0]}), which can run code when loaded and are refused. "
            "Convert them: load the directory with transformers and save_pretrained it again."
        )
    found = sorted(path.name for path in directory.iterdir())[:_SHOWN_PROBLEMS]
    return f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; it holds {found}. Download them or correct the path."


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: {path.stat().st_size} bytes that are no whole safetensors file ({error}). It is truncated or "
            "damaged (or a git-lfs pointer): download it again."
        ) from error
