"""Sources of Hugging Face tensors: safetensors, or random numbers keyed by tensor names."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from oppo_megatron.config.model import ModelConfig, weight_seed
from oppo_megatron.errors import CheckpointError, ConfigError
from oppo_megatron.layout.experts import TURNED, size_apart, tensors_apart
from oppo_megatron.layout.hf_layout import (
    BLOCKS,
    LM_HEAD,
    SCALAR_HEAD,
    SCALES,
    Head,
    Tensor,
    dense,
    hf_tensors,
    size_of_rows,
    stored_names,
    summary,
    weight_problems,
)
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.weights.dist_source import DistSource
from oppo_megatron.modeldir.adapters import refuse_adapters
from oppo_megatron.modeldir.headers import stored_tensors, weight_files
from oppo_megatron.modeldir.megatron import find_megatron, read_mapping

SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip

BLOCK_ROWS = 1 << 13


class TensorSource(Protocol):
    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Shapes and dtypes by Hugging Face name."""

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Return a region on the CPU, as stored."""


class SafetensorsSource:
    def __init__(self, directory: Path | str, file: str | None = None):
        directory = Path(directory)
        _require_directory(directory)
        stored = stored_tensors(weight_files(directory) if file is None else {directory / file: None})
        opened = {path: safe_open(path, framework="pt") for path in {each.file for each in stored.values()}}
        self._files = {name: opened[each.file] for name, each in stored.items()}
        self.tensors = {name: Tensor(each.shape, each.dtype) for name, each in stored.items()}

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_slice(name)[region]
        return tensor


class JoinedExperts:
    """Tensors of all experts from files with a tensor per expert."""

    def __init__(self, base: TensorSource, shape: ModelShape):
        self._base, self.tensors, self._parts = base, dict(base.tensors), dict[str, list[str]]()
        for name, size in {**hf_tensors(shape, "lm"), **hf_tensors(shape, "scalar")}.items():
            parts = tensors_apart(shape.family, name, size)
            fitting = (part in base.tensors and base.tensors[part].shape == size_apart(size, parts[part]) for part in parts)
            if name not in base.tensors and all(fitting):  # others are named by `weight_problems`
                self.tensors[name] = [Tensor(size, self.tensors.pop(part).dtype) for part in parts][0]
                self._parts[name] = list(parts)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        parts = self._parts.get(name, [name])
        if len(parts) == 1:
            return self._base.read(parts[0], region)
        whole, rest, count = (slice(None), slice(None)), (slice(None), *region[1:]), self.tensors[name].shape[0]
        size = len(parts) // count
        each = [[self._base.read(part, whole) for part in parts[e * size :][:size]] for e in range(count)[region[0]]]
        return torch.stack([torch.cat(matrices) for matrices in each])[rest]


class DenseExperts:
    """bfloat16 matrices of experts whose files have them in MXFP4 (`dense`): the lower half of a byte comes first."""

    def __init__(self, base: TensorSource):
        self._base, self.tensors = base, dense(base.tensors)

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        if name in self._base.tensors:
            return self._base.read(name, region)
        rest, experts = (slice(None), *region[1:]), range(self.tensors[name].shape[0])[region[0]]
        return torch.cat([self._matrix(name, slice(e, e + 1)) for e in experts])[rest]

    def _matrix(self, name: str, expert: slice) -> torch.Tensor:
        all_of_it = slice(None)
        halves = self._base.read(name + BLOCKS, (expert, all_of_it, all_of_it, all_of_it))
        exponents = self._base.read(name + SCALES, (expert, all_of_it, all_of_it)).int() - 127
        numbers = PAIRS.index_select(0, halves.flatten().int()).view(torch.bfloat16).view(*exponents.shape, -1)
        return numbers.mul_(exponents.exp2().bfloat16().unsqueeze(-1)).flatten(-2).transpose(1, 2)  # without rounding


FP4 = torch.tensor([sign * x for sign in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
PAIRS = torch.cartesian_prod(FP4, FP4).flip(1).bfloat16().view(torch.int32).flatten()
"""The two numbers of each byte, in bfloat16, as one int32."""


class SplitTensors:
    """Projections from files that join them (`stored_names`)."""

    def __init__(self, base: TensorSource, shape: ModelShape):
        self._base, self.tensors, self._places = base, dict(base.tensors), dict[str, tuple[str, int]]()
        sizes = hf_tensors(shape, "lm")
        for stored, names in stored_names(shape, sizes).items():
            whole = size_of_rows([sizes[name] for name in names])
            if len(names) > 1 and stored in base.tensors and base.tensors[stored].shape == whole:  # others: `weight_problems`
                dtype, first = self.tensors.pop(stored).dtype, 0
                for name in names:
                    self.tensors[name], self._places[name] = Tensor(sizes[name], dtype), (stored, first)
                    first += sizes[name][0]

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        stored, first = self._places.get(name, (name, 0))
        start, stop, _ = region[0].indices(self.tensors[name].shape[0])
        return self._base.read(stored, (slice(first + start, first + stop), *region[1:]))


class DrawnSource(ABC):
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int):
        self.tensors, self._seed = {name: Tensor(shape, "F32") for name, shape in shapes.items()}, seed

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tensor = torch.zeros(self.tensors[name].shape, dtype=torch.float32)
        self.draw(name, tensor, generator)
        return tensor[region]

    @abstractmethod
    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the tensor, initially zero."""


class RandomSource(DrawnSource):
    """Matrices and sinks normal(0, init_std), biases 0, norms such that they multiply by 1."""

    def __init__(self, shape: ModelShape, seed: int, head: Head):
        super().__init__(hf_tensors(shape, head), seed)
        self._std, self._norm = shape.init_std, 1.0 - shape.traits.norm_offset

    def draw(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            return
        if tensor.dim() > 1 or name.endswith(".sinks"):
            tensor.normal_(0.0, self._std, generator=generator)
        else:
            tensor.fill_(self._norm)


class OverlaidSource:
    """`over`: tensors of other sources, by their names there."""

    def __init__(self, base: TensorSource, over: Mapping[str, tuple[TensorSource, str]], without: Collection[str] = ()):
        self._sources = {name: (base, name) for name in base.tensors if name not in without} | dict(over)
        self.tensors = {name: source.tensors[stored] for name, (source, stored) in self._sources.items()}

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        source, stored = self._sources[name]
        return source.read(stored, region)


class FreshHead(OverlaidSource):
    """A causal LM with a random scalar head, without `lm_head`."""

    def __init__(self, source: TensorSource, shape: ModelShape, seed: int):
        super().__init__(source, {SCALAR_HEAD: (RandomSource(shape, seed, "scalar"), SCALAR_HEAD)}, without=(LM_HEAD,))


def open_weights(
    model: ModelConfig, head: Head, shape_file: Path | None = None, *, seed: int = weight_seed("actor"), fresh_head: bool = False
) -> tuple[ModelShape, TensorSource]:
    """Return shape and weights, reading only headers.  Raises CheckpointError if they do not fit.

    `shape_file`: a Megatron checkpoint's `config.json`; `seed`: of random weights; `fresh_head`: draw a missing scalar head.
    """
    source: TensorSource
    if model.checkpoint is not None:
        shape, source = open_directory(model.checkpoint, shape_file)
        if head == "scalar" and fresh_head and SCALAR_HEAD not in source.tensors:
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
        shape, source = read_shape(directory), SafetensorsSource(directory)
        if shape.traits.joined:
            return shape, SplitTensors(source, shape)
        if shape.family in TURNED:
            return shape, DenseExperts(source)
        return shape, source if shape.experts is None else JoinedExperts(source, shape)
    shape = ModelShape.from_hf(read_mapping(megatron.shape, "the checkpoint's configuration"), str(megatron.shape))
    return shape, DistSource(megatron, shape)


def require_source(shape: ModelShape, source: TensorSource, head: Head, where: str) -> None:
    """Raise CheckpointError naming missing, misshapen or foreign tensors."""

    def equal(one: str, other: str) -> bool:
        rows = source.tensors[one].shape[0]
        blocks = ((slice(start, start + BLOCK_ROWS),) for start in range(0, rows, BLOCK_ROWS))
        return all(torch.equal(source.read(one, block), source.read(other, block)) for block in blocks)

    if problems := weight_problems(shape, head, source.tensors, equal):
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
        raise CheckpointError(f"{directory} {what}: a checkpoint is a folder with config.json and safetensors; correct the path")
