"""Reads the index of a `torch_dist` checkpoint (`.metadata`), a pickle of torch's, as data only.

A pickle can call any function that it names.  This reader allows only the classes of torch's own index
(torch/distributed/checkpoint/metadata.py), so that torch's reader never sees another.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path, PurePosixPath
from typing import Any

from oppo_megatron.errors import CheckpointError

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
    """torch's `Metadata`.  Raises CheckpointError for an index that is not torch's, names other classes, or files outside."""
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
    """The error of torch's readers in one line, without its advice to read a refused pickle unsafely."""
    text = str(error)
    if "weights_only" not in text:
        return next(iter(text.splitlines()), type(error).__name__)
    named = re.search(r"GLOBAL (\S+)", text)
    what = f"it names {named[1]}" if named else "it does not hold tensors alone"
    return f"{what}: it is damaged, or made to run code; do not load it with weights_only=False"


class _PlainUnpickler(pickle.Unpickler):
    """Allows only the classes of `ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in it")
        return super().find_class(module, name)
