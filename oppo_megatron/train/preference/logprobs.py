"""Log-probs of answers under a frozen model, by the tokens of prompt and answer, and the file that keeps them.

The file is a safetensors file: `keys` [N, 16] (the first half of a SHA-256 of prompt and answer) and `logprobs` [N] in float64,
nats, summed over the answer's tokens.  Its metadata identify the reference by a fingerprint.  Data, columns, chat template,
tokenizer and truncation are all in the keys: if one of them changes, its rows are not found and are computed.

Legend: N answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oppo_megatron.config.model import LearningModelConfig, LoraConfig, ModelConfig
from oppo_megatron.errors import DataError
from oppo_megatron.mcore.batch import Answered
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rundir.manifest import describe, list_files

WEIGHTS = (".safetensors", ".distcp", ".pt")
NAMES = ("config.json", "adapter_config.json", ".metadata", "metadata.json")


def reference_fingerprint(model: ModelConfig) -> str:
    """Return the SHA-256 of a model's shape, type and weights, and of the adapters that it starts with.

    Every rank makes the call, reads a share of the files, and gets the same.  Fresh adapters add nothing to a model's outputs.
    """
    lora = model.lora if isinstance(model, LearningModelConfig) else None
    known: dict[str, Any] = {"dtype": model.dtype, "shape": read_hf_config(model)}
    if model.checkpoint is None:
        known["seed"] = model.init_seed
    else:
        known["weights"] = _checksums(model.checkpoint)
    if lora is not None and lora.adapter is not None:
        known["adapter"] = _checksums(lora.adapter), _of_adapters(lora)
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _of_adapters(lora: LoraConfig) -> list[Any]:
    return [lora.rank, lora.alpha, lora.projections]


def _checksums(folder: Path) -> list[tuple[str, str]]:
    """Return name and SHA-256 of each file with weights or a description of them, sorted by name."""
    names = [name for name in list_files(folder) if Path(name).suffix in WEIGHTS or Path(name).name in NAMES]
    mine = {name: describe(folder / name).sha256 for name in names[dist.get_rank() :: dist.get_world_size()]}
    parts: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return sorted((name, checksum) for part in parts for name, checksum in part.items())


KIND = "oppo_megatron reference log-probs 1"
KEY_BYTES = 16


def key_of(prompt: Sequence[int], answer: Sequence[int]) -> bytes:
    """Key of an answer."""
    length = len(prompt).to_bytes(8, "little")
    return hashlib.sha256(length + array("q", prompt).tobytes() + array("q", answer).tobytes()).digest()[:KEY_BYTES]


class LogprobTable:
    """Log-probs of answers, each the sum over its tokens."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, float] = {}

    def of(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        return self.by_key[key_of(prompt, answer)]

    def missing(self, answers: Iterable[Answered]) -> dict[bytes, Answered]:
        """Return the answers without a log-prob, each once, in order."""
        found = ((key_of(*each), each) for each in answers)
        return {key: each for key, each in found if key not in self.by_key}


class UnusableFileError(DataError):
    """A file of log-probs that cannot be read, or belongs to another reference."""


def write_logprobs(path: Path, table: Mapping[bytes, float], reference: str) -> None:
    """Write the complete file at once; `reference` is the fingerprint.  Raises OSError."""
    keys = torch.frombuffer(bytearray(b"".join(table)), dtype=torch.uint8).view(-1, KEY_BYTES)
    logprobs = torch.tensor(list(table.values()), dtype=torch.float64)
    metadata = {"kind": KIND, "reference": reference, "sha256": _checksum(keys, logprobs)}
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with aside.open("wb") as file:
            file.write(save({"keys": keys, "logprobs": logprobs}, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_logprobs(path: Path, reference: str) -> dict[bytes, float]:
    """Read the log-probs of a reference.  Raises UnusableFileError for a damaged file, or another reference."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise UnusableFileError(f"{path} is not a file of reference log-probs ({KIND})")
            keys, logprobs = file.get_tensor("keys"), file.get_tensor("logprobs")
    except (SafetensorError, OSError) as error:
        raise UnusableFileError(f"{path} is not a readable file of reference log-probs ({error})") from error
    if metadata.get("sha256") != _checksum(keys, logprobs):
        raise UnusableFileError(f"{path} is damaged: its numbers are not those that were written")
    if metadata.get("reference") != reference:
        raise UnusableFileError(
            f"{path} is of another reference: its weights, shape or type have the fingerprint "
            f"{metadata.get('reference', 'none')[:12]}, this run's reference {reference[:12]}"
        )
    packed = keys.numpy().tobytes()
    cuts = range(0, len(packed), KEY_BYTES)
    return {packed[cut : cut + KEY_BYTES]: value for cut, value in zip(cuts, logprobs.tolist(), strict=True)}


def _checksum(keys: torch.Tensor, logprobs: torch.Tensor) -> str:
    return hashlib.sha256(keys.numpy().tobytes() + logprobs.numpy().tobytes()).hexdigest()
