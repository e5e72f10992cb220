"""The state of a decoding round on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oppo_megatron.chunks import Chunk, ChunkRow, ChunkRows
from oppo_megatron.engine.growing import Drawn, Growing
from oppo_megatron.engine.taking_up import TakenUp
from oppo_megatron.schedule.actions import Action
from oppo_megatron.schedule.planning.book import ReplicaWork
from oppo_megatron.schedule.planning.merge import StopSignal, merge_rows
from oppo_megatron.schedule.rounds import Batch


@dataclass
class DecodeRound:
    """A round of one replica's `work`, which its cache has `taken` up; it began at clock `start`, with the sequences `growing`.

    `local`: this rank's knowledge of the batch's completion within the round; `stop`: the signal that the merge uses.
    The rest is by micro-batch: `lanes` are its running sequences, `steps` its decode steps, `ended` its first void step,
    `hidden` the stage's last output, `drawn` the tokens of its last step.
    """

    work: ReplicaWork
    taken: TakenUp
    growing: dict[int, Growing]
    index: int
    start: int
    halt: bool
    local: StopSignal
    stop: StopSignal
    merged: Chunk | None = None
    ready: tuple[int, int] | None = None  # (step, micro-batch) whose tokens completed the batch
    lanes: list[list[Growing]] = field(init=False)
    steps: list[int] = field(init=False)
    rows: list[ChunkRow] | ChunkRows = field(init=False)
    ended: dict[int, int] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    drawn: dict[int, Drawn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lanes = [[self.growing[g.seq_id] for g in batch] for batch in self.work.decode]
        self.steps = [max(g.new for g in batch) for batch in self.work.decode]
        self.rows = [g.row for g in self.growing.values()]

    @property
    def prefill(self) -> Sequence[Batch]:
        """Prompts, or stale sequences, by micro-batch."""
        return self.work.prefill

    def live(self, action: Action) -> bool:
        """Whether a micro-step is not void."""
        return action.step is None or action.step < self.ended.get(action.micro_batch, action.step + 1)

    def num_tokens(self, action: Action) -> int:
        """Tokens that go through the stage."""
        if action.step is not None:
            return len(self.lanes[action.micro_batch])
        return sum(g.new for g in self.prefill[action.micro_batch])

    def hear(self, seq_id: int, where: tuple[int, int]) -> None:
        """A sequence has finished at `where`, (step, micro-batch)."""
        self.local.finish(seq_id)
        if self.local.ready and self.ready is None:
            self.ready = where

    def merge(self) -> Chunk:
        """The round's chunk."""
        if self.merged is None:
            self.merged = merge_rows(self.index, self.start, self.rows, self.stop)
            self.merged.halt = self.halt
        return self.merged
