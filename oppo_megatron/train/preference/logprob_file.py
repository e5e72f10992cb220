"""Log-probs of answers under a frozen model, by the tokens of prompt and answer, and the file that keeps them.

The file is a safetensors one: `keys` [N, 16] (the first half of a SHA-256 of prompt and answer) and `logprobs` [N] in float64,
nats, summed over the answer's tokens.  Its metadata name the reference by its fingerprint.  Data, columns, chat template,
tokenizer and cutting are all in the keys: where one of them is another, its rows are not found and are computed.

Legend: N answers.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oppo_megatron.errors import DataError
from oppo_megatron.mcore.batch import Answered

KIND = "oppo_megatron reference log-probs 1"
KEY_BYTES = 16

def key_of(prompt: Sequence[int], answer: Sequence[int]) -> bytes:
    """What an answer is found by."""
    length = len(prompt).to_bytes(8, "little")
    return hashlib.sha256(length + array("q", prompt).tobytes() + array("q", answer).tobytes()).digest()[:KEY_BYTES]


class LogprobTable:
    """Log-probs of answers, each the sum over its tokens."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, float] = {}

    def of(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        return self.by_key[key_of(prompt, answer)]

    def missing(self, answers: Iterable[Answered]) -> dict[bytes, Answered]:
        """Those that have none yet, each once, in their order."""
        found = ((key_of(*each), each) for each in answers)
        return {key: each for key, each in found if key not in self.by_key}


class UnusableFileError(DataError):
    """A file of log-probs that cannot be read, or is of another reference."""


def write_logprobs(path: Path, table: Mapping[bytes, float], reference: str) -> None:
    """The whole file, which appears at once; `reference`: its fingerprint.  Raises OSError."""
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
    """What is known of this reference.  Raises UnusableFileError for a damaged file, and one of another reference."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise UnusableFileError(f"{path} is no file of reference log-probs ({KIND})")
            keys, logprobs = file.get_tensor("keys"), file.get_tensor("logprobs")
    except (SafetensorError, OSError) as error:
        raise UnusableFileError(f"{path} is no readable file of reference log-probs ({error})") from error
    if metadata.get("sha256") != _checksum(keys, logprobs):
        raise UnusableFileError(f"{path} is damaged: its numbers are not those that were written")
    if metadata.get("reference") != reference:
        raise UnusableFileError(
            f"{path} is of another reference: its weights, shape or type have the fingerprint "
            f"{metadata.get('reference', 'none')[:12]}, those of this run {reference[:12]}"
        )
    packed = keys.numpy().tobytes()
    cuts = range(0, len(packed), KEY_BYTES)
    return {packed[cut : cut + KEY_BYTES]: value for cut, value in zip(cuts, logprobs.tolist(), strict=True)}


def _checksum(keys: torch.Tensor, logprobs: torch.Tensor) -> str:
    return hashlib.sha256(keys.numpy().tobytes() + logprobs.numpy().tobytes()).hexdigest()
