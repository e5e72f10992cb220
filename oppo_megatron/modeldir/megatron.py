"""Finds the folder of a Megatron checkpoint that a path names, and the model's `config.json`.

A `torch_dist` checkpoint is a folder with `metadata.json`, torch's index `.metadata` and `*.distcp` files.  A path may name it
directly, or the folders that its writers put around it:

    Megatron-LM     DIR/latest_checkpointed_iteration.txt, DIR/iter_0000010/
    NeMo            DIR/model_weights/ of an unpacked .nemo; a trainer's megatron_gpt-step=... is such a folder itself
    our runs        checkpoints/step-000010/models/actor/: that role's config.json; the weights of all roles lie above it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.config.paths import missing_within
from oppo_megatron.errors import CheckpointError
from oppo_megatron.nesting import read_json

TORCH_INDEX, BACKENDS = ".metadata", "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
NEMO_WEIGHTS = "model_weights"
PLACES = (NEMO_WEIGHTS, "weights", "models")
"""Folders around the weights in NeMo 1, NeMo 2 and our runs."""
SHAPE = "config.json"


@dataclass(frozen=True)
class MegatronFolder:
    """`weights`: folder of index and tensors; `prefix`: of keys, None: derived from them."""

    weights: Path
    shape: Path
    prefix: str | None = None


def find_megatron(directory: Path, shape: Path | None = None) -> MegatronFolder | None:
    """Return what `directory` names, or None; `shape`: a given `config.json`.  Raises CheckpointError."""
    if any(directory.glob("*.safetensors")):
        return None
    above = directory.parent
    if is_index(above) and not is_index(directory) and (directory / SHAPE).is_file():  # a role's folder in a run's checkpoint
        _check_backend(above)
        return MegatronFolder(above, shape or directory / SHAPE, f"{directory.name}.")
    weights = _weights(directory)
    if weights is None:
        return None
    _check_backend(weights)
    return MegatronFolder(weights, shape or _shape(directory, weights))


def is_index(directory: Path) -> bool:
    """True if this is a `dist_checkpointing` folder."""
    return (directory / BACKENDS).is_file() or (directory / TORCH_INDEX).is_file()


def _weights(directory: Path) -> Path | None:
    tracked = (directory / TRACKER).is_file()
    for folder in (directory, *(directory / name for name in PLACES if not tracked)):
        if is_index(folder):
            if roles := sorted(path.parent.name for path in folder.glob(f"*/{SHAPE}")):
                names = " or ".join(f"`{folder / role}`" for role in roles)
                raise CheckpointError(f"`{folder}` holds the models of a run; name the one that is meant: {names}")
            return folder
    if tracked:
        return _iteration(directory)
    if legacy := sorted(path.name for path in directory.glob("mp_rank_*")):
        raise CheckpointError(
            f"`{directory}` holds {legacy[0]}, a checkpoint of one file a rank, which is a pickle and is not read; save it in "
            "the format torch_dist (Megatron-LM: --ckpt-convert-format torch_dist)"
        )
    return None


def _iteration(directory: Path) -> Path:
    tracker = directory / TRACKER
    text = tracker.read_text(encoding="utf-8", errors="replace")[:64].strip()
    if text != "release" and not (text.isascii() and text.isdecimal()):
        raise CheckpointError(f"`{tracker}` holds {text!r}, but must name an iteration or `release`; name iter_* itself")
    folder = directory / (text if text == "release" else f"iter_{int(text):07d}")
    if is_index(folder):
        return folder
    if folder.is_dir() and any(folder.glob("mp_rank_*")):
        _weights(folder)  # says what it is
    raise CheckpointError(f"`{tracker}` names {folder.name}, which holds no torch_dist checkpoint; name another iter_* itself")


def _check_backend(weights: Path) -> None:
    if not (weights / BACKENDS).is_file():
        raise CheckpointError(
            f"`{weights}` has an index ({TORCH_INDEX}) but no {BACKENDS}, megatron-core's record of how it was saved; if it was "
            'torch_dist, write {"sharded_backend": "torch_dist", "sharded_backend_version": 1} into it'
        )
    backend = read_mapping(weights / BACKENDS, "Megatron's description").get("sharded_backend")
    if backend != "torch_dist":
        raise CheckpointError(
            f"`{weights}` was saved by {backend!r:.40}, but torch_dist alone is read; load and save it with the program that "
            "wrote it (NeMo: model.dist_ckpt_format=torch_dist)"
        )
    if not (weights / TORCH_INDEX).is_file():
        raise CheckpointError(f"`{weights}` has {BACKENDS} but no index ({TORCH_INDEX}); copy the whole folder again")


def _shape(directory: Path, weights: Path) -> Path:
    for folder in dict.fromkeys((directory, weights, weights.parent)):
        if (folder / SHAPE).is_file():
            return folder / SHAPE
    raise CheckpointError(
        f"`{directory}` has no {SHAPE}: Megatron's checkpoints do not say the model's shape (what its args say is a pickle, "
        f"which is not read). Copy the Hugging Face {SHAPE} of this model into it (`oppo convert`: or give --config)"
    )


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object.  Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(missing_within(what, path))
    try:
        content = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"`{path}` ({what}) is not valid JSON ({error}); fetch or save it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` ({what}) holds {type(content).__name__}, not a JSON object; fetch or save it again")
    return content
