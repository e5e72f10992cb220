"""Sources of Hugging Face tensors: safetensors, or random numbers keyed by tensor names."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.hf_layout import LM_HEAD, SCALAR_HEAD, Head, hf_tensors
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.layout.stored_weights import FLOATS, Tensor, nearest, summary, weight_problems
from oppo_megatron.mcore.weights.dist_source import DistSource
from oppo_megatron.modeldir.adapters import refuse_adapters
from oppo_megatron.modeldir.headers import Stored, stored_tensors, weight_files
from oppo_megatron.modeldir.megatron import find_megatron, read_mapping

DTYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip

BLOCK_ROWS = 1 << 13


class TensorSource(Protocol):
    """Tensors by their Hugging Face name; shapes are known without reading data."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype | None:
        """Dtype of a tensor; None if not floating point."""
        ...

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Return a region (a slice per dimension), on the CPU, in its stored dtype."""
        ...


class SafetensorsSource:
    """The safetensors of a directory; opening reads all headers."""

    def __init__(self, directory: Path | str, file: str | None = None):
        self.directory = Path(directory)
        _require_directory(self.directory)
        self._stored = stored_tensors(weight_files(self.directory) if file is None else {self.directory / file: None})
        self._opened = {path: safe_open(path, framework="pt") for path in {stored.file for stored in self._stored.values()}}

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype | None:
        return DTYPES.get(self._find(name).dtype)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._opened[self._find(name).file].get_slice(name)[region]
        return tensor

    def _find(self, name: str) -> Stored:
        if name not in self._stored:
            raise CheckpointError(f"{self.directory}: no tensor {name}.{nearest(name, self.names())}")
        return self._stored[name]


class DrawnSource(ABC):
    """Random tensors that depend only on seed and name, not on the layout."""

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
        """Fill the whole tensor, initially zero."""


class RandomSource(DrawnSource):
    """Random weights: matrices normal(0, init_std), norms one, biases zero."""

    def __init__(self, shape: ModelShape, seed: int, head: Head):
        super().__init__(hf_tensors(shape, head), seed)
        self._std = shape.init_std

    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if tensor.dim() > 1:
            tensor.normal_(0.0, self._std, generator=generator)
        elif not name.endswith(".bias"):
            tensor.fill_(1.0)


class OverlaidSource:
    """A source with tensors `over` read from other sources, by their names there."""

    def __init__(self, base: TensorSource, over: Mapping[str, tuple[TensorSource, str]], without: Collection[str] = ()):
        self._base, self._over = base, over
        self._names = {*base.names(), *over} - set(without)

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        source, stored = self._over.get(name, (self._base, name))
        return source.shape(stored)

    def dtype(self, name: str) -> torch.dtype | None:
        source, stored = self._over.get(name, (self._base, name))
        return source.dtype(stored)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        source, stored = self._over.get(name, (self._base, name))
        return source.read(stored, region)


class FreshHead(OverlaidSource):
    """A causal LM with a random scalar head; its `lm_head` is not read."""

    def __init__(self, source: TensorSource, shape: ModelShape, seed: int):
        super().__init__(source, {SCALAR_HEAD: (RandomSource(shape, seed, "scalar"), SCALAR_HEAD)}, without=(LM_HEAD,))


def open_weights(
    model: ModelConfig, head: Head, shape_file: Path | None = None, *, seed: int = 0, fresh_head: bool = False
) -> tuple[ModelShape, TensorSource]:
    """Return shape and checked source of a model's weights, reading only headers.

    `shape_file`: a Megatron checkpoint's missing `config.json`.  `seed`: of random weights.  `fresh_head`: draw a missing scalar
    head.  Raises ConfigError without `checkpoint` and `init`,
    CheckpointError if the weights do not fit.
    """
    source: TensorSource
    if model.checkpoint is not None:
        shape, source = open_directory(model.checkpoint, shape_file)
        if head == "scalar" and fresh_head and SCALAR_HEAD not in source.names():
            source = FreshHead(source, shape, seed)
    elif model.init is not None:
        hf = read_mapping(model.init, "the model configuration") if isinstance(model.init, Path) else model.init
        shape = ModelShape.from_hf(hf, str(model.init) if isinstance(model.init, Path) else "init")
        source = RandomSource(shape, seed, head)
    else:
        raise ConfigError("a model has neither checkpoint nor init: give a Hugging Face directory, or a shape to initialise.")
    require_source(shape, source, head, str(model.checkpoint or "init"))
    return shape, source


def open_directory(directory: Path, shape_file: Path | None = None) -> tuple[ModelShape, TensorSource]:
    _require_directory(directory)
    refuse_adapters(directory)
    megatron = find_megatron(directory, shape_file)
    if megatron is None:
        return read_shape(directory), SafetensorsSource(directory)
    shape = ModelShape.from_hf(read_mapping(megatron.shape, "the checkpoint's configuration"), str(megatron.shape))
    return shape, DistSource(megatron, shape)


def check_source(shape: ModelShape, source: TensorSource, head: Head) -> list[str]:
    """Return a sentence for each tensor that is missing, misshapen or foreign."""

    def equal(one: str, other: str) -> bool:
        rows = source.shape(one)[0]
        blocks = ((slice(start, start + BLOCK_ROWS),) for start in range(0, rows, BLOCK_ROWS))
        return all(torch.equal(source.read(one, block), source.read(other, block)) for block in blocks)

    return weight_problems(shape, head, stored_of(source), equal)


def stored_of(source: TensorSource) -> dict[str, Tensor]:
    return {name: Tensor(source.shape(name), source.dtype(name) is not None) for name in source.names()}


def require_source(shape: ModelShape, source: TensorSource, head: Head, where: str) -> None:
    if problems := check_source(shape, source, head):
        raise CheckpointError(f"{where}: the weights do not fit the model:\n{summary(problems)}")


def read_shape(directory: Path | str) -> ModelShape:
    _require_directory(Path(directory))
    path = Path(directory) / "config.json"
    return ModelShape.from_hf(read_mapping(path, "the checkpoint's configuration"), str(path))


def side_files(directory: Path) -> list[Path]:
    return [directory / name for name in SIDE_FILES if (directory / name).is_file()]


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"{directory} {what}: a checkpoint is a directory with config.json and safetensors. Correct the path."
        )
