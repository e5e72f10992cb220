"""The reference's log-probs of answers, read from a file or computed once into it, so no reference model is kept.

The file has `keys` [N, 16] (first half of a SHA-256 of prompt and answer) and `logprobs` [N] (float64, nats, summed over the
answer's tokens); its metadata hold the reference's fingerprint.  Rows that changed have new keys and are recomputed.  Written
after every block, so a pass can resume.  Legend: N answers.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from oppo_megatron.algorithms.supervised_losses import sequence_sums
from oppo_megatron.clock import ByTime
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import LearningModelConfig, ModelConfig
from oppo_megatron.config.supervised import DPOConfig
from oppo_megatron.errors import DataError
from oppo_megatron.mcore.batch import Answered, MicroBatch, pack_responses
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.mcore.vocab import OutputRows
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.rundir.directory import RunDirectory, atomic_writer
from oppo_megatron.rundir.manifest import describe, list_files
from oppo_megatron.train.score_exchange import sum_over_ranks

Load = Callable[[ModelConfig], RoleModel]

WEIGHTS = (".safetensors", ".distcp", ".pt")
NAMES = ("config.json", "adapter_config.json", ".metadata", "metadata.json")
KIND = "oppo_megatron reference log-probs 1"
KEY_BYTES = 16
BLOCK = 4096
"""Answers per write of the file."""


def reference_fingerprint(model: ModelConfig) -> str:
    """SHA-256 of a model's shape, type, weights and initial adapters (unless fresh).  Collective: ranks divide the files."""
    lora = model.lora if isinstance(model, LearningModelConfig) else None
    known: dict[str, Any] = {"dtype": model.dtype, "shape": read_hf_config(model)}
    if model.checkpoint is not None:
        known["weights"] = _checksums(model.checkpoint)
    if lora is not None and lora.adapter is not None:
        known["adapter"] = _checksums(lora.adapter), [lora.rank, lora.alpha, lora.projections]
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _checksums(folder: Path) -> list[tuple[str, str]]:
    names = [name for name in list_files(folder) if Path(name).suffix in WEIGHTS or Path(name).name in NAMES]
    mine = {name: describe(folder / name).sha256 for name in names[dist.get_rank() :: dist.get_world_size()]}
    parts: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return sorted((name, checksum) for part in parts for name, checksum in part.items())


def key_of(prompt: Sequence[int], answer: Sequence[int]) -> bytes:
    length = len(prompt).to_bytes(8, "little")
    return hashlib.sha256(length + array("q", prompt).tobytes() + array("q", answer).tobytes()).digest()[:KEY_BYTES]


Table = dict[bytes, float]
"""Log-probs by key."""


def missing_answers(table: Table, answers: Iterable[Answered]) -> dict[bytes, Answered]:
    found = ((key_of(*each), each) for each in answers)
    return {key: each for key, each in found if key not in table}


class UnusableFileError(DataError):
    pass


def write_logprobs(path: Path, table: Table, reference: str) -> None:
    keys = torch.frombuffer(bytearray(b"".join(table)), dtype=torch.uint8).view(-1, KEY_BYTES)
    logprobs = torch.tensor(list(table.values()), dtype=torch.float64)
    metadata = {"kind": KIND, "reference": reference, "sha256": _checksum(keys, logprobs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path, "wb") as file:
        file.write(save({"keys": keys, "logprobs": logprobs}, metadata))


def read_logprobs(path: Path, reference: str) -> Table:
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


def _checksum(keys: Tensor, logprobs: Tensor) -> str:
    return hashlib.sha256(keys.numpy().tobytes() + logprobs.numpy().tobytes()).hexdigest()


class ReferencePass:
    """Fills `table`.  Collective of the world; `owner` has the file."""

    def __init__(self, config: DPOConfig, table: Table, world: World, owner: int, note: Callable[[str], None]):
        self.config, self.table, self.world, self.owner, self.note = config, table, world, owner, note
        self.path = config.reference_logprobs or RunDirectory(config.run_dir).reference
        with world.activity.doing("checksums of the reference's weights"):
            self.fingerprint = reference_fingerprint(config.reference or config.model)

    def make(self, answers: Iterable[Answered], load: Load) -> RoleModel:
        """Get the log-probs of `answers`; return the model to train."""
        own = self.config.reference
        found: list[Any] = [self._read() if dist.get_rank() == self.owner else None]
        dist.broadcast_object_list(found, src=self.owner)
        if isinstance(found[0], DataError):
            raise found[0]
        self.table.update(found[0])
        missing = missing_answers(self.table, answers)
        if own is None:
            model = load(self.config.model)
            self._compute(model, missing)
            return model
        if missing:
            self._compute(load(own), missing)
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return load(self.config.model)

    def _read(self) -> Table | DataError:
        """Replace an unusable file of the run, but refuse a configured one."""
        if not self.path.exists():
            return {}
        try:
            known = read_logprobs(self.path, self.fingerprint)
        except UnusableFileError as error:
            if self.config.reference_logprobs is not None:
                return DataError(
                    f"reference_logprobs: {error}; name another file, which the run creates, or remove this one, which "
                    "replaces it"
                )
            self.note(f"{error}: computed anew")
            return {}
        self.note(f"reference log-probs: {len(known)} answers found in {self.path}")
        return known

    def _compute(self, model: RoleModel, missing: Mapping[bytes, Answered]) -> None:
        started, left = time.monotonic(), iter(missing.items())
        done, by_time = 0, ByTime(self.note)

        def report(share: float) -> None:
            within = int(share * min(BLOCK, len(missing) - done))
            by_time(f"reference log-probs: about {done + within} of {len(missing)} answers computed")

        while block := dict(islice(left, BLOCK)):
            with self.world.activity.doing("log-probs of the reference"):
                budget = self.config.runtime.micro_batch_tokens
                values = answer_sums(model, list(block.values()), budget, self.world, report)
            self.table.update(zip(block, values, strict=True))
            done += len(block)
            if dist.get_rank() == self.owner:
                try:
                    write_logprobs(self.path, self.table, self.fingerprint)
                except OSError as error:
                    raise DataError(
                        f"reference_logprobs: {self.path} cannot be written ({error.strerror}); name a file in a folder that "
                        "this user may write, on a disk that is not full"
                    ) from error
            took_s = time.monotonic() - started
            self.note(f"reference log-probs: {done} of {len(missing)} answers computed in {took_s:.1f} s, in {self.path}")


def answer_logprobs(batch: MicroBatch, output: OutputRows) -> Tensor:
    return sequence_sums(output.figures(batch.targets_R).logp_R, batch.counts)


def answer_sums(
    model: RoleModel, answers: Sequence[Answered], budget: int, world: World, report: Callable[[float], None]
) -> list[float]:
    """`answer_logprobs` of all answers, divided among replicas.  `report` gets this rank's finished share."""
    groups = model.groups
    device = next(model.parameters()).device
    mine = range(groups.dp_rank, len(answers), groups.dp)
    finished: list[int] = []

    def finish(batch: MicroBatch, output: OutputRows) -> Tensor:
        finished.extend(batch.index)
        report(min(1.0, len(finished) / len(mine)))
        return answer_logprobs(batch, output)

    batched = pack_responses([answers[i][0] for i in mine], [answers[i][1] for i in mine], budget, device)
    sums = forward_rows(model, batched, finish)
    values = [0.0] * len(answers)
    if groups.speaks:
        for batch, sums_S in zip(batched, sums, strict=True):
            for place, value in zip(batch.index, sums_S.tolist(), strict=True):
                values[mine[place]] = value
    with waiting_for("log-probs of the reference", world.activity):
        return sum_over_ranks(values, world.device)
