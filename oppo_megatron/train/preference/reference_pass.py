"""The reference's log-probs: read from a file, or computed once into it.  The reference model is not kept afterwards.

The file is written after every block of answers, so that an interrupted pass continues from there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.clock import ByTime
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import ModelConfig
from oppo_megatron.config.supervised import PreferenceConfig
from oppo_megatron.data.supervised_rows import Passed, batches
from oppo_megatron.errors import DataError
from oppo_megatron.mcore.batch import Answered, MicroBatch, pack_responses
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import forward_rows
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.preference.logprobs import (
    UnusableFileError,
    read_logprobs,
    reference_fingerprint,
    write_logprobs,
)
from oppo_megatron.train.preference.tasks import Preferences, answer_logprobs
from oppo_megatron.train.score_exchange import sum_over_ranks

RowT = TypeVar("RowT", bound=tuple[list[int], ...])
Load = Callable[[ModelConfig], RoleModel]
BLOCK = 4096
"""Answers between two writes of the file."""


class ReferencePass(Generic[RowT]):
    """One rank's part; every rank of the world makes the calls.  `owner`: the rank that reads and writes the file."""

    def __init__(
        self, config: PreferenceConfig, task: Preferences[RowT], world: World, owner: int, note: Callable[[str], None]
    ):
        self.config, self.task, self.world, self.owner, self.note = config, task, world, owner, note
        self.path = config.reference_logprobs or RunDirectory(config.run_dir).reference
        with world.activity.doing("checksums of the reference's weights"):
            self.fingerprint = reference_fingerprint(config.referred)

    def _needed(self, rows: Sequence[RowT], held: Sequence[RowT], passed: Passed) -> list[Answered]:
        """Return the answers of all rows, and of the mismatched rows of every batch from `passed` on."""
        config, task = self.config, self.task
        others = [*task.mismatched(held)]
        if task.has_mismatched:
            order = batches(
                len(rows), config.batch_size, config.seed, config.epochs, config.steps, config.data.shuffle, passed
            )
            others += [other for index in order for other in task.mismatched([rows[i] for i in index])]
        return [answer for row in (*rows, *held, *others) for answer in task.answers(row)]

    def make(self, rows: Sequence[RowT], held: Sequence[RowT], passed: Passed, load: Load) -> RoleModel:
        """Get the log-probs that the run needs from `passed` on; return the model to train, made by `load`."""
        own = self.config.reference
        self._read()
        missing = self.task.reference.missing(self._needed(rows, held, passed))
        if own is None:
            model = load(self.config.model)
            self._compute(model, missing)
            return model
        if missing:
            reference = load(own)
            self._compute(reference, missing)
            del reference
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        return load(self.config.model)

    def _read(self) -> None:
        """Read the file.  An unusable file in the run directory is replaced; a file named by the configuration is refused."""
        found: list[Any] = [None]
        if dist.get_rank() == self.owner:
            found[0] = self._read_here()
        dist.broadcast_object_list(found, src=self.owner)
        if isinstance(found[0], DataError):
            raise found[0]
        self.task.reference.by_key.update(found[0])

    def _read_here(self) -> Mapping[bytes, float] | DataError:
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
        """Compute the missing answers' log-probs block by block, and write the file after each."""
        if not missing:
            return
        started, left, table = time.monotonic(), iter(missing.items()), self.task.reference.by_key
        done, by_time = 0, ByTime(self.note)
        while block := dict(islice(left, BLOCK)):
            with self.world.activity.doing("log-probs of the reference"):
                values = answer_sums(
                    model, list(block.values()), self.config.runtime.micro_batch_tokens, self.world,
                    partial(self._report, by_time, done, len(missing)),
                )  # fmt: skip
            table.update(zip(block, values, strict=True))
            done += len(block)
            if dist.get_rank() == self.owner:
                self._write(table)
            took_s = time.monotonic() - started
            self.note(
                f"reference log-probs: {done} of {len(missing)} answers computed in {took_s:.1f} s, in {self.path}"
            )

    def _report(self, by_time: ByTime, before: int, total: int, share: float) -> None:
        """Report progress within a block: `share` of it, after the first `before` answers of `total`."""
        by_time(
            f"reference log-probs: about {before + int(share * min(BLOCK, total - before))} of {total} answers computed"
        )

    def _write(self, table: Mapping[bytes, float]) -> None:
        try:
            write_logprobs(self.path, table, self.fingerprint)
        except OSError as error:
            raise DataError(
                f"reference_logprobs: {self.path} cannot be written ({error.strerror}); name a file in a folder that this user "
                "may write, on a disk that is not full"
            ) from error


def answer_sums(
    model: RoleModel,
    answers: Sequence[Answered],
    budget: int,
    world: World,
    report: Callable[[float], None] = lambda share: None,
) -> list[float]:
    """Return the log-prob of each answer, summed over its tokens, the same on every rank; replicas share the answers.

    `report` is called after each micro-batch of this rank with the share of its answers that is done.
    """
    groups = model.groups
    device = next(model.parameters()).device
    mine = range(groups.dp_rank, len(answers), groups.dp)
    prompts, responses = [answers[i][0] for i in mine], [answers[i][1] for i in mine]

    finished: list[int] = []

    def finish(batch: MicroBatch, logits_RV: Tensor) -> Tensor:
        finished.extend(batch.index)
        report(min(1.0, len(finished) / len(mine)))
        return answer_logprobs(batch, logits_RV, model.vocab)

    batched = pack_responses(prompts, responses, budget, device)
    sums = forward_rows(model, batched, finish)
    values = [0.0] * len(answers)
    if groups.is_last_stage and groups.tp_rank == 0:  # one rank for each replica
        for batch, sums_S in zip(batched, sums, strict=True):
            for place, value in zip(batch.index, sums_S.tolist(), strict=True):
                values[mine[place]] = value
    with waiting_for("log-probs of the reference", world.activity):
        return sum_over_ranks(values, world.device)
