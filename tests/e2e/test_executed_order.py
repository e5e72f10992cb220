"""What was executed is what was scheduled: trace.json against schedules.txt, rank by rank and round by round."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule, parse_action, parse_schedule
from tests.support.layouts import deep
from tests.support.ppo import Workspace
from tests.support.ranks import run_ranks

PLACEMENTS: dict[str, dict[str, Any]] = {
    "one process": {"mode": "single"},
    "streamed": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"tp": 2}},
    "woven": {"mode": "colocated", "actor": {"pp": 2}},
    "woven, two replicas": {"mode": "colocated", "actor": {"pp": 2, "dp": 2}, "scorer": {"pp": 4}},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("order"))


def read_schedules(run: Path) -> list[Schedule]:
    """One a round, in their order."""
    parts = re.split(r"^# round \d+, step \d+\n", (run / "schedules.txt").read_text(), flags=re.MULTILINE)
    return [parse_schedule(part) for part in parts[1:]]


def executed_actions(run: Path) -> dict[int, list[Action]]:
    """The traced actions of each rank, in the order of their starts."""
    events = [e for e in json.loads((run / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    actions: dict[int, list[Action]] = {}
    for event in sorted(events, key=lambda e: (e["pid"], e["ts"])):
        if re.search(r" m\d+ c\d+", event["name"]):
            actions.setdefault(event["pid"], []).append(parse_action(event["pid"], event["name"]))
    return actions


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "woven" else []) for name in PLACEMENTS]
)
def test_ranks_do_what_the_schedule_says_in_its_order(workspace: Workspace, name: str) -> None:
    changes = {"overlap.intra": True, "logging.trace": "actions", "overlap.weave": [2, "auto"]}
    config = deep(workspace, name.replace(" ", "-"), placement=PLACEMENTS[name], steps=2, **changes)
    counts = run_ranks(world_size(TrainConfig(**config)), "tests.e2e.jobs:train_counted", config=config, fan_out=1)
    run = Path(config["run_dir"])
    schedules, executed = read_schedules(run), executed_actions(run)
    assert len(schedules) > 4 and executed
    assert (run / "costs.json").exists() == (name != "streamed"), "one process weaves, too: its ranks do both"
    skipped = 0
    for rank, done in executed.items():
        planned = [action for schedule in schedules for action in schedule.of(rank)]
        assert len(set(planned)) == len(planned)
        assert [action for action in planned if action in set(done)] == done
        for action in set(planned) - set(done):
            # Only decode micro-steps may be void, with their messages, and then so are all later ones.
            assert action.step is not None, f"{action} of rank {rank} was not done"
            assert not any(
                a.op is Op.DECODE and a.chunk == action.chunk and a.micro_batch == action.micro_batch
                and a.step is not None and a.step > action.step
                for a in done
            )  # fmt: skip
            skipped += 1
    assert skipped, "every run has sequences that end within a chunk"
    for rank, (num_rounds, in_rounds, in_steps) in enumerate(counts):
        assert num_rounds == len(schedules)
        sends = [action for action in executed[rank] if action.op is Op.SEND]
        assert in_rounds.calls["isend"] == sum(1 + (action.payload is Payload.CHUNK) for action in sends)
        assert in_steps.pickled == 0, "numbers go as tensors"
