"""Facts about a Hugging Face checkpoint and a tokenizer, read without loading them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from oppo_megatron.config.model import LoraConfig, ModelConfig
from oppo_megatron.config.paths import missing_path
from oppo_megatron.errors import CheckpointError
from oppo_megatron.modeldir.adapters import ADAPTER_WEIGHTS, adapter_problems, refuse_adapters
from oppo_megatron.modeldir.megatron import find_megatron, read_mapping
from oppo_megatron.nesting import read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
BLOCK_BYTES = 1 << 24


class Stored(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


def read_hf_config(model: ModelConfig) -> dict[str, Any]:
    """Read `config.json`.  Raises CheckpointError if missing."""
    if isinstance(model.init, dict):
        return model.init
    if model.init is not None:
        return read_mapping(model.init, "the model configuration")
    assert model.checkpoint is not None, "a role has a checkpoint or an init; checked before"
    if not model.checkpoint.exists():
        raise CheckpointError(missing_path("the checkpoint", model.checkpoint))
    if not model.checkpoint.is_dir():
        remedy = "name the folder that holds its config.json"
        if model.checkpoint.suffix == ".nemo":
            remedy = f"unpack it (tar -xf) and {remedy}"
        raise CheckpointError(f"checkpoint `{model.checkpoint}` is a file; {remedy}")
    refuse_adapters(model.checkpoint)
    megatron = find_megatron(model.checkpoint)
    path = model.checkpoint / "config.json" if megatron is None else megatron.shape
    return read_mapping(path, "the checkpoint's configuration")


def check_weights(name: str, directory: Path) -> list[str]:
    """Return problems of weight files: absent, truncated, not safetensors.  Skips Megatron checkpoints."""
    try:
        if find_megatron(directory) is not None:
            return []
        files = weight_files(directory)
    except CheckpointError as error:
        return [f"{name}: {error}"]
    problems = []
    for file in files:
        try:
            check_file(file)
        except CheckpointError as error:
            problems.append(f"{name}: {error}")
    return problems


def check_adapter(name: str, lora: LoraConfig) -> list[str]:
    if problems := adapter_problems(f"{name}.lora", lora):
        return problems
    try:
        if lora.adapter is not None:
            check_file(lora.adapter / ADAPTER_WEIGHTS)
    except CheckpointError as error:
        return [f"{name}.lora.adapter: {error}"]
    return []


def weight_files(directory: Path) -> dict[Path, list[str] | None]:
    """Return safetensors files, with tensors listed by the index (None: all)."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: None}
    index = directory / INDEX_FILE
    if not index.is_file():
        if pickles := sorted(entry.name for pattern in ("*.bin", "*.pt") for entry in directory.glob(pattern)):
            raise CheckpointError(
                f"`{directory}` has only pickled weights ({pickles[0]}), which can run code when loaded and are not read; load "
                "the model with transformers, and save it with save_pretrained (safe_serialization=True in version 4)"
            )
        found = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"`{directory}` has neither {SINGLE_FILE} nor {INDEX_FILE} (it holds {found}); fetch them or correct the path"
        )
    weight_map = read_mapping(index, "the checkpoint's index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{index}` has no `weight_map`; fetch the checkpoint again")
    files: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        inside = isinstance(file, str) and not Path(file).is_absolute() and ".." not in Path(file).parts
        if not (inside and file.isprintable()):
            raise CheckpointError(
                f"`{index}` maps a tensor to {file!r:.60}, which is not a file of its folder; fetch the checkpoint again"
            )
        named = files.setdefault(directory / file, [])
        assert named is not None
        named.append(name)
    return files


def stored_tensors(files: Mapping[Path, Collection[str] | None]) -> dict[str, Stored]:
    """Return all or the listed tensors by name.  Raises CheckpointError."""
    found = {}
    for file, names in files.items():
        check_file(file)
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = read_json(stream.read(size))
        header.pop("__metadata__", None)
        if absent := sorted(set(names or ()) - header.keys()):
            raise CheckpointError(f"`{file}`: {INDEX_FILE} says it holds {absent[0]}, but it does not; fetch it again")
        for name in names or header:
            start, stop = header[name]["data_offsets"]
            found[name] = Stored(header[name]["dtype"], tuple(header[name]["shape"]), file, 8 + size + start, stop - start)
    return found


def same_content(one: Stored, other: Stored) -> bool:
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.num_bytes if one.num_bytes == other.num_bytes else -1
        while left > 0:
            size = min(left, BLOCK_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return left == 0


def check_file(file: Path) -> None:
    """Raise CheckpointError if a header is incomplete or tensors do not fill the file."""
    if not file.is_file():
        raise CheckpointError(missing_path("the weight file", file))
    with file.open("rb"):  # the library calls a file that may not be read one that is not there
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise CheckpointError(
                f"`{file}` is truncated or damaged: its {file.stat().st_size} bytes are not a whole safetensors file "
                f"({reason}); fetch or save it again (a git-lfs pointer: `git lfs pull`)"
            ) from error


def tokenizer_vocab_size(path: Path) -> int | None:
    """Return the largest id + 1; None if unknown without loading.  Raises CheckpointError."""
    if path.is_file():
        return _sentencepiece_size(path)
    if (path / "tokenizer.json").is_file():
        tokenizer = read_mapping(path / "tokenizer.json", "the tokenizer")
        try:
            vocab = (tokenizer.get("model") or {}).get("vocab") or {}
            ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
            ids += [token["id"] for token in tokenizer.get("added_tokens") or []]
            return max(ids) + 1 if ids else None
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"`{path / 'tokenizer.json'}` is not a tokenizer ({type(error).__name__}: {error}); fetch or save it again"
            ) from error
    if (path / "tokenizer.model").is_file():
        return _sentencepiece_size(path / "tokenizer.model")
    return None


def _sentencepiece_size(path: Path) -> int:
    from sentencepiece import SentencePieceProcessor

    try:
        return int(SentencePieceProcessor(model_file=str(path)).vocab_size())
    except (RuntimeError, OSError) as error:
        raise CheckpointError(f"`{path}` is not a sentencepiece model; name a `.model` file or a Hugging Face folder") from error
