"""Writes a Hugging Face directory tensor by tensor: the writer never holds more than one.

The safetensors format: 8 bytes with the length of a JSON header (little-endian), the header with dtype, shape and byte
range of each tensor, then the bytes.  Shapes are known before any tensor arrives, so the header can be written first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from oppo_megatron.clock import by_time
from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.mcore.weights.hf_source import DTYPES
from oppo_megatron.modeldir.headers import INDEX_FILE, SINGLE_FILE
from oppo_megatron.rundir.manifest import sync_folder

MAX_SHARD_BYTES = 2 << 30
_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileNames:
    """Names of the file that describes the tensors, and of the tensors' file if there is only one."""

    config: str
    single: str


MODEL_FILES = FileNames("config.json", SINGLE_FILE)


class HfWriter:
    """Context manager that writes `tensors` (name and shape, in the order of writing) into `directory`.

    Everything goes to a temporary directory next to it, is synced to disk and renamed at the end: the directory is whole or
    does not exist.  An error in the `with` block leaves nothing.  Raises CheckpointError if the directory is not empty.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, tuple[int, ...]],
        config: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        extra_files: Iterable[Path] = (),
        names: FileNames = MODEL_FILES,
    ):
        self._directory = directory
        self._partial = aside(directory)
        self._tensors = tensors
        self._config = config
        self._dtype = dtype
        self._extra_files = list(extra_files)
        self._config_file = names.config
        self._shards = _plan_shards(tensors, dtype.itemsize, max_shard_bytes, names.single)
        self._coming = [(file, name) for file, names in self._shards.items() for name in names]
        self._file: IO[bytes] | None = None
        self._progress = by_time()

    def __enter__(self) -> HfWriter:
        require_empty(self._directory)
        shutil.rmtree(self._partial, ignore_errors=True)  # of a run that was stopped while it wrote
        self._partial.mkdir(parents=True)
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, cast to the directory's dtype."""
        file, expected = self._coming.pop(0)
        assert (name, tuple(tensor.shape)) == (expected, self._tensors[expected]), (name, tensor.shape, expected)
        if name == self._shards[file][0]:
            self._start_shard(file)
        assert self._file is not None
        total = len(self._tensors)
        self._progress(f"{self._directory}: {total - len(self._coming)} of {total} tensors written")
        flat = tensor.detach().to("cpu", self._dtype).contiguous().flatten()
        self._file.write(flat.view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:  # a full disk may refuse the last bytes, too
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _finish(self) -> None:
        self._end_shard()
        assert not self._coming, f"tensors that never came: {self._coming[:3]}"
        if len(self._shards) > 1:
            self._write_json(INDEX_FILE, self._index())
        for path in self._extra_files:
            with path.open("rb") as source, (self._partial / path.name).open("wb") as copy:
                shutil.copyfileobj(source, copy)
                _sync(copy)
        self._write_json(self._config_file, self._config)
        sync_folder(self._partial)
        os.replace(self._partial, self._directory)
        sync_folder(self._directory.parent)

    def _start_shard(self, file: str) -> None:
        self._end_shard()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name in self._shards[file]:
            end = start + prod(self._tensors[name]) * self._dtype.itemsize
            shape = list(self._tensors[name])
            header[name] = {"dtype": _CODES[self._dtype], "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = (self._partial / file).open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _end_shard(self) -> None:
        if self._file is not None:
            _sync(self._file)
            self._file.close()
            self._file = None

    def _index(self) -> dict[str, Any]:
        num_elements = sum(prod(shape) for shape in self._tensors.values())
        weight_map = {name: file for file, names in self._shards.items() for name in names}
        return {"metadata": {"total_size": num_elements * self._dtype.itemsize}, "weight_map": weight_map}

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        with (self._partial / name).open("wb") as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")
            _sync(file)


def aside(directory: Path) -> Path:
    """Temporary path of a directory until it is whole."""
    return directory.with_name(f".{directory.name}.partial")


def require_empty(directory: Path) -> None:
    """Raises CheckpointError if weights would overwrite something."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not empty: weights are never overwritten. Remove or rename it."
        )


def hf_config(shape: ModelShape, head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of a model of this shape with this head."""
    config = {key: value for key, value in shape.hf.items() if key not in ("torch_dtype", *_LABEL_KEYS)}
    config["architectures"] = [shape.causal_lm_class if head == "lm" else shape.classifier_class]
    config["dtype"] = str(dtype).removeprefix("torch.")
    if head == "scalar":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


_LABEL_KEYS = ("num_labels", "id2label", "label2id", "problem_type")


def _plan_shards(
    tensors: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int, single: str
) -> dict[str, Sequence[str]]:
    """File names with the tensors of each: at most `max_bytes`, and at least one tensor."""
    shards: list[list[str]] = []
    size = 0
    for name, shape in tensors.items():
        num_bytes = prod(shape) * itemsize
        if not shards or size + num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    if len(shards) == 1:
        return {single: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
