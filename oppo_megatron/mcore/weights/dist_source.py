"""Hugging Face tensors from a Megatron `torch_dist` checkpoint of any layout, a saved piece at a time.

Unpickling can call any function: the index (`.metadata`) is read with a table of classes, pieces with `weights_only`.
"""

from __future__ import annotations

import functools
import io
import pickle
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.hf_layout import FLOATS, LM_HEAD, SCALAR_HEAD, Part, Tensor, param_shapes, stage_parts, summary
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.experts import SAVED
from oppo_megatron.modeldir.megatron import TORCH_INDEX, MegatronFolder

INDEX = ".metadata"
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint._extension": set(),
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_dtype"},
    "torch": {"Size", "device", "float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool", "strided"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def read_plain_index(path: Path) -> Any:
    """Return torch's `Metadata`.  Raises CheckpointError for other classes."""
    try:
        index = _PlainUnpickler(io.BytesIO(path.read_bytes())).load()
        files = {str(info.relative_path) for info in index.storage_data.values()}
    except Exception as error:  # whatever bytes may lead the pickle machine to
        raise CheckpointError(
            f"{path}: not an index of weights that can be read ({type(error).__name__}: {str(error):.200}); use another "
            "checkpoint, or restore the file from a copy"
        ) from error
    for name in files:
        if PurePosixPath(name).name != name or not (path.parent / name).is_file():
            raise CheckpointError(
                f"{path}: names {name!r:.100}, which is not a file in its folder; use another checkpoint, or copy this one whole"
            )
    return index


def reason_of(error: BaseException) -> str:
    """Return one line, without torch's advice to unpickle unsafely."""
    text = str(error)
    if "weights_only" not in text:
        return next(iter(text.splitlines()), type(error).__name__)
    named = re.search(r"GLOBAL (\S+)", text)
    what = f"it names {named[1]}" if named else "it does not hold tensors alone"
    return f"{what}: it is damaged, or made to run code; do not load it with weights_only=False"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in it")
        return super().find_class(module, name)


LAYERS = "decoder.layers."
HEAD = "output_layer.weight"
ALIGNER_HEAD, ALIGNER_BIAS = "rm_head.weight", "rm_head.bias"
_RENAMED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_RENAMED_EXPERTS = {"input_layernorm.": _RENAMED["input_layernorm."], **{f"mlp.{ours}": f"mlp.{s}" for ours, s in SAVED.items()}}
NO_WEIGHT = re.compile(r"optimizer\.|chained_|rng_state|rerun_state|opt_param_scheduler|.*(\._extra_state|_extra_state$)")


def saved_names(param: str, shape: ModelShape) -> tuple[tuple[str, int | None], ...]:
    """Return possible keys, with the layer's number if stacked."""
    if not param.startswith(LAYERS):
        return ((param, None),)
    number, _, name = param.removeprefix(LAYERS).partition(".")
    for ours, saved in (_RENAMED if shape.experts is None else _RENAMED_EXPERTS).items():
        if name.startswith(ours):
            name = saved + name.removeprefix(ours)
            break
    return (f"{LAYERS}{name}", int(number)), (f"{LAYERS}{number}.{name}", None)


WORD_EMBEDDING = "embedding.word_embeddings.weight"
DTYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))
CODES = {dtype: code for code, dtype in DTYPES.items()}
_PADDED = (WORD_EMBEDDING, HEAD)


@dataclass(frozen=True)
class _Place:
    part: Part
    key: str
    layer: int | None


class DistSource:
    """Opening compares the index with the shape; vocabulary padding is omitted."""

    def __init__(self, folder: MegatronFolder, shape: ModelShape):
        self._folder = folder.weights
        self._index = read_plain_index(self._folder / TORCH_INDEX)
        saved = {name: entry for name, entry in self._index.state_dict_metadata.items() if hasattr(entry, "chunks")}
        self._prefix = _prefix(saved, folder)
        self._saved = {
            name.removeprefix(self._prefix): entry
            for name, entry in saved.items()
            if name.startswith(self._prefix) and not NO_WEIGHT.match(name.removeprefix(self._prefix))
        }
        self._pieces = {(key.fqn, tuple(key.offset or ())): info for key, info in self._index.storage_data.items()}
        self._places = dict(self._find(shape))
        dtypes = {name: self._saved[place.key].properties.dtype for name, place in self._places.items()}
        self.tensors = {
            name: Tensor(place.part.hf_shape, CODES.get(dtypes[name], str(dtypes[name]))) for name, place in self._places.items()
        }
        self._load = functools.lru_cache(maxsize=2)(self._load_piece)  # q, k and v, or gate and up, lie in one piece
        if ALIGNER_BIAS in self._saved:
            bias = self._region(ALIGNER_BIAS, tuple((0, size) for size in self._saved[ALIGNER_BIAS].size))
            if bool(bias.any()):
                raise CheckpointError(
                    f"{self._folder}: the bias of its scalar head is {float(bias.flatten()[0]):g}, but a scalar head has none "
                    "here: every score would lack it. Train the head without, or set it to 0 and shift the rewards"
                )

    def read(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        place = self._places[name]
        (start, stop), *columns = (cut.indices(size)[:2] for cut, size in zip(region, place.part.hf_shape, strict=True))
        columns = columns[::-1] if place.part.turned else columns
        layer = () if place.layer is None else ((place.layer, place.layer + 1),)
        spans = [(*layer, (rows.start, rows.stop), *columns) for rows in place.part.spans(start, stop)]
        found = torch.cat([self._region(place.key, span) for span in spans], dim=len(layer))
        filed: torch.Tensor = place.part.as_filed(found[0] if layer else found)
        return filed

    def _find(self, shape: ModelShape) -> Iterator[tuple[str, _Place]]:
        parts = {part.hf_name: part for head in ("lm", "scalar") for part in stage_parts(shape, head)}
        shapes = {part.param: () for part in parts.values()} | param_shapes(
            [part for name, part in parts.items() if name not in (LM_HEAD, SCALAR_HEAD)]
        )
        problems: list[str] = []
        depths: dict[str, int | None] = {}  # expected layers of each key, None: not stacked
        for name, part in parts.items():
            place = self._place_of(name, part, shape)
            if place is None:
                continue
            depths[place.key] = shape.num_layers if place.layer is not None else None
            if place.layer is not None and place.layer >= self._saved[place.key].size[0]:
                continue
            size = tuple(self._saved[place.key].size)[0 if place.layer is None else 1 :]
            due = part.hf_shape if name in (LM_HEAD, SCALAR_HEAD) else shapes[part.param]
            if size == due or (part.param in _PADDED and size[1:] == due[1:] and size[0] > due[0]):
                yield name, place
            else:
                layer = "" if place.layer is None else f" (layer {place.layer})"
                problems.append(f"{place.key}{layer} has shape {list(size)}, config.json asks for {list(due)}")
        for key in sorted(self._saved.keys() - depths.keys() - {ALIGNER_BIAS}):
            tied = ", which ties it to the embeddings (tie_word_embeddings)" if key == HEAD else ""
            problems.append(f"{key} has no place in the model of config.json{tied}")
        for key, layers in depths.items():
            if layers is not None and self._saved[key].size[0] != layers:
                problems.append(f"{key} holds {self._saved[key].size[0]} layers, config.json asks for {layers}")
        if problems:
            raise CheckpointError(
                f"{self._folder}: the weights do not fit the model:\n{summary(problems)}\n"
                "Use the config.json that belongs to them."
            )

    def _place_of(self, name: str, part: Part, shape: ModelShape) -> _Place | None:
        if name == SCALAR_HEAD and ALIGNER_HEAD in self._saved:
            return _Place(part, ALIGNER_HEAD, None)
        for key, layer in saved_names(part.param, shape):
            if key in self._saved:
                if name in (LM_HEAD, SCALAR_HEAD) and (self._saved[key].size[0] == 1) != (name == SCALAR_HEAD):
                    return None  # one key for both heads: its rows distinguish them
                return _Place(part, key, layer)
        return None

    def _region(self, key: str, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
        entry = self._saved[key]
        out = torch.empty([stop - start for start, stop in spans], dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            both = [
                (max(start, offset), min(stop, offset + size))
                for (start, stop), offset, size in zip(spans, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in both):
                continue
            piece = self._load(f"{self._prefix}{key}", tuple(chunk.offsets), tuple(chunk.sizes))
            target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(both, spans, strict=True))
            source = tuple(slice(a - offset, b - offset) for (a, b), offset in zip(both, chunk.offsets, strict=True))
            out[target] = piece[source]
            filled += prod(b - a for a, b in both)
        if filled != out.numel():
            raise CheckpointError(
                f"{self._folder}: its pieces give {filled} of {out.numel()} elements of {key}; copy the whole folder "
                "again, or save it again"
            )
        return out

    def _load_piece(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        info = self._pieces.get((name, offsets))
        if info is None or getattr(info, "transform_descriptors", None):
            how = "is nowhere in it" if info is None else "is compressed, which is not read"
            raise CheckpointError(f"{self._folder}: the piece of {name} at {list(offsets)} {how}; save it again")
        path = self._folder / info.relative_path
        with path.open("rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
        try:
            tensor: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever damaged bytes lead torch's readers to
            raise CheckpointError(
                f"{path}: the piece of {name} at {list(offsets)} cannot be read ({type(error).__name__}: {reason_of(error)}); "
                "copy the file again"
            ) from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes:
            raise CheckpointError(f"{path}: the piece of {name} at {list(offsets)} is not what the index says; copy it again")
        return tensor


def _prefix(saved: Collection[str], folder: MegatronFolder) -> str:
    """Return `model.` in NeMo, the role in our runs, nothing in Megatron-LM."""
    found = [name.removesuffix(WORD_EMBEDDING) for name in saved if name.endswith(WORD_EMBEDDING)]
    prefixes = sorted(prefix for prefix in found if not prefix.startswith("optimizer."))
    if folder.prefix is not None:
        prefixes = [prefix for prefix in prefixes if prefix == folder.prefix]
    if len(prefixes) == 1:
        return prefixes[0]
    if prefixes:
        raise CheckpointError(f"{folder.weights}: holds several models ({', '.join(prefixes)}); save the one that is meant alone")
    whose = "" if folder.prefix is None else f" of {folder.prefix.removesuffix('.')}"
    raise CheckpointError(
        f"{folder.weights}: no tensor {folder.prefix or ''}{WORD_EMBEDDING}: it does not hold the whole model{whose} (only its "
        "adapters, perhaps, or another kind of model); name one that does"
    )
