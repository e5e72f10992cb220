"""What a run of so many ranks has of groups and messages, counted without making any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from oppo_megatron.bench.dry_run import DryRun
from oppo_megatron.bench.planning import Cluster
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import role_placements, training_placements
from oppo_megatron.schedule.actions import Op, Payload
from oppo_megatron.schedule.groups import calls_of, groups_by_rank, run_groups
from oppo_megatron.schedule.planning.planner import PlannedRound

COLUMNS = {
    "mode": "mode", "ranks": "ranks", "groups of a rank": "groups", "calls of new_group": "calls",
    "messages a round": "messages", "of them chunks": "chunks", "to ranks": "peers",
}  # fmt: skip
"""Of the rank that has most: groups that it belongs to; messages that the actor's output rank sends in a round, gathers among
them, and to how many ranks (no rank sends more chunks)."""


def count_all(cluster: Cluster, modes: Sequence[str], ranks: Sequence[int], sequences: int) -> Iterator[dict[str, Any]]:
    """A row for each number of ranks.  Raises ConfigError before the first where one does not fit."""
    cases = [(mode, number, cluster.config(mode, number, sequences)) for mode in modes for number in ranks]
    for mode, number, config in cases:
        groups = run_groups(role_placements(config), training_placements(config))
        yield {
            "mode": mode, "ranks": number,
            "groups": max(groups_by_rank(groups).values()), "calls": calls_of(groups),
            **_messages(config, cluster),
        }  # fmt: skip


def _messages(config: TrainConfig, cluster: Cluster) -> dict[str, int]:
    """Those of the first step's longest round, of the actor's output rank."""
    first = config.model_copy(update={"steps": 1})
    run = _Counted(first, cluster.prompt_tokens)
    run.run()
    return run.most


class _Counted(DryRun):
    """A dry run that looks at the messages of its rank.  A chunk is two of them, a header and a payload; so is a gather."""

    most: dict[str, int] = {"messages": 0}

    def _plan(self, *args: Any) -> PlannedRound:
        planned = super()._plan(*args)
        own = planned.schedule.of(self.planner.rank or 0)
        sends = Counter(action.payload for action in own if action.op is Op.SEND)
        gathers = sum(action.op is Op.GATHER for action in own)
        messages = sends.total() + sends[Payload.CHUNK] + 2 * gathers
        if messages > self.most["messages"]:
            peers = {action.peer for action in own if action.op is Op.SEND}
            self.most = {"messages": messages, "chunks": 2 * sends[Payload.CHUNK], "peers": len(peers)}
        return planned
