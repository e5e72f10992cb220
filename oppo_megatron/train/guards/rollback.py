"""Rollback: the run returns to the last checkpoint when a guard demands it, and continues with other prompts.

Runs are deterministic, so the same prompts would cause the same breach.  Prompts admitted since the checkpoint are left out,
and so are the prompts of the rejected batch that the checkpoint has in flight.  `rollbacks.jsonl` of the run directory has a
line per rollback, written before any rank ends; every later start obeys all lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.errors import CheckpointError
from oppo_megatron.rundir.directory import RunDirectory, atomic_writer, encode_json
from oppo_megatron.rundir.metrics_log import iter_json_lines


class RollBack(Exception):
    """Raised on every rank after the rollback is on disk; the ranks end, and are to be started again."""


@dataclass(frozen=True)
class Rollback:
    """One line.  `left_out` are positions in the stream of prompts, `rows` their rows in the data set, in the same order.

    `num_written` counts the rejected batches that the run has kept so far.
    """

    step: int
    reason: str
    checkpoint: str
    left_out: list[int]
    rows: list[int]
    num_written: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Rollback:
        """Raises CheckpointError for a line that is not a rollback."""
        kinds = {"step": int, "reason": str, "checkpoint": str, "left_out": list, "rows": list, "num_written": int}
        if line.keys() != kinds.keys() or any(type(line[name]) is not kind for name, kind in kinds.items()):
            raise CheckpointError(f"rollbacks.jsonl has a line that is not a rollback: {line!r:.80}; restore the file")
        if any(type(position) is not int for position in line["left_out"]):
            raise CheckpointError("rollbacks.jsonl: left_out has an entry that is not a position; restore the file")
        return cls(**line)

    def describe(self) -> str:
        """A line for the console."""
        return f"step {self.step}: {self.reason}: back to {self.checkpoint}; {len(self.left_out)} prompts are left out"


class Rollbacks:
    """Rollbacks of a run, the same on every rank; `checkpoint` is this process's last one, with its position in the stream."""

    def __init__(self, run: RunDirectory, prompts: PromptStream, done: Sequence[Rollback] = ()):
        self._run, self._prompts, self.done = run, prompts, list(done)
        self.checkpoint: tuple[str, int] | None = None

    @classmethod
    def of_run(cls, run: RunDirectory, prompts: PromptSet, seed: int, shuffle: bool, *, resumed: bool) -> Rollbacks:
        """Read the rollbacks of a resumed run.  Every rank makes the call; rank 0 reads."""
        lines: list[Any] = [None]
        if resumed and dist.get_rank() == 0 and run.rollbacks.exists():
            lines = [list(iter_json_lines(run.rollbacks))]
        dist.broadcast_object_list(lines, src=0)
        return cls(run, PromptStream(prompts, seed, shuffle=shuffle), [Rollback.of(line) for line in lines[0] or []])

    def __len__(self) -> int:
        return len(self.done)

    def describe(self) -> list[str]:
        """A line for each."""
        return [rollback.describe() for rollback in self.done]

    @property
    def left_out(self) -> frozenset[int]:
        """Positions in the stream of prompts."""
        return frozenset(position for each in self.done for position in each.left_out)

    @property
    def num_written(self) -> int:
        """Rejected batches kept up to the last rollback."""
        return max((each.num_written for each in self.done), default=0)

    def summary(self) -> dict[str, int]:
        """Fields of `summary.json`."""
        return {"rollbacks": len(self), "prompts_left_out": len(self.left_out)}

    def require(self, count: int) -> None:
        """Raises CheckpointError if a checkpoint has seen more rollbacks than the file has."""
        if count > len(self):
            raise CheckpointError(
                f"{self._run.rollbacks} has {len(self)} rollbacks, but the checkpoint was written after {count}: prompts that "
                "were left out would be trained; restore the file next to the checkpoints"
            )

    def obstacle(self, most: int) -> str | None:
        """Reason why the run cannot go back (again), if there is one."""
        if len(self) >= most:
            times = "time" if most == 1 else "times"
            return f"the run has gone back {most} {times} already, and may not do so again"
        if self.checkpoint is None:
            return "the run should go back to a checkpoint, but has none yet; lower checkpoint.every_steps"
        return None

    def go_back(
        self, step: int, reason: str, rejected: Sequence[int], position: int, num_written: int, *, keeper: bool
    ) -> None:
        """Write the rollback on the keeper, and raise RollBack on every rank.

        `rejected` are the sequences of the batch that broke a rule; prompts before `position` have been admitted.
        """
        assert self.checkpoint is not None
        name, start = self.checkpoint
        left_out = sorted((set(range(start, position)) | set(rejected)) - self.left_out)
        rows = [self._prompts.at(each).row for each in left_out]
        rollback = Rollback(step, reason, name, left_out, rows, num_written)
        if keeper:
            with atomic_writer(self._run.rollbacks) as file:
                file.writelines(encode_json(asdict(each)) + "\n" for each in [*self.done, rollback])
        with waiting_for(f"rollback, step {step}"):
            dist.barrier()
        raise RollBack(rollback.describe())
