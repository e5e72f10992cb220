"""Executed lists, messages and bytes are those scheduled, and those of the simulation of every rank by itself."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.rank_run import RankRun
from benchmarks.simulation import simulate_rounds
from oppo_megatron.layout.placements import role_placements, world_size
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule, parse_action, parse_schedule
from oppo_megatron.schedule.links import GLOO
from oppo_megatron.schedule.plan import round_generator
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.setup import prompt_stream
from tests.e2e.jobs import Counted
from tests.support.configs import run_of
from tests.support.ppo import Workspace, deep, read_outcome
from tests.support.ranks import run_ranks

PLACEMENTS: dict[str, dict[str, Any]] = {
    "one process": {"mode": "single"}, "streamed": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"tp": 2}},
    "woven": {"mode": "colocated", "actor": {"pp": 2}},
    "woven, two replicas": {"mode": "colocated", "actor": {"pp": 2, "dp": 2}, "scorer": {"pp": 4}},
    "streamed, eight ranks": {"mode": "disaggregated", "actor": {"pp": 2, "dp": 2}, "scorer": {"tp": 2, "dp": 2}},
    "woven, eight ranks": {"mode": "colocated", "actor": {"tp": 2, "pp": 2, "dp": 2}},
}  # fmt: skip
LONG = [name for name in PLACEMENTS if name != "woven, two replicas"]
CARRIED = {
    "rollout.forced_lengths": [12, 0.8], "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 3, "max": 3},
}  # fmt: skip
"""Rollouts are carried from a step to the next; then only forced lengths tell how long all of them would have been."""


def read_schedules(run: Path) -> list[Schedule]:
    parts = re.split(r"^# round \d+, step \d+\n", (run / "schedules.txt").read_text(), flags=re.MULTILINE)
    return [parse_schedule(part) for part in parts[1:]]


def executed_actions(run: Path) -> dict[int, list[Action]]:
    events = [e for e in json.loads((run / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    actions: dict[int, list[Action]] = {}
    for event in sorted(events, key=lambda e: (e["pid"], e["ts"])):
        if re.search(r" m\d+ c\d+", event["name"]):
            actions.setdefault(event["pid"], []).append(parse_action(event["pid"], event["name"]))
    return actions


@dataclass(frozen=True)
class Executed:
    config: dict[str, Any]
    counts: list[Counted]

    @property
    def path(self) -> Path:
        return Path(self.config["run_dir"])

    @property
    def learns_costs(self) -> bool:
        """The woven order depends on measured times from the second step on."""
        config = run_of(self.config)
        return round_generator(config.overlap, Site(role_placements(config))) == "woven"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in PLACEMENTS]
)
def executed(request: pytest.FixtureRequest, workspace: Workspace) -> Iterator[Executed]:
    name = request.param
    changes = {"overlap.intra": True, "logging.trace": "actions", "overlap.weave": [2, "auto"]}
    changes |= CARRIED if "eight" in name else {}
    config = deep(workspace, name.replace(" ", "-"), placement=PLACEMENTS[name], steps=2, **changes)
    job, world = "tests.e2e.jobs:train_counted", world_size(run_of(config))
    with mock.patch("oppo_megatron.schedule.rounds.FAN_OUT", 1):  # in the simulation, as in the run
        yield Executed(config, run_ranks(world, job, config=config, fan_out=1))


def test_ranks_do_what_the_schedule_says_in_its_order(executed: Executed) -> None:
    run = executed.path
    schedules, actions = read_schedules(run), executed_actions(run)
    assert len(schedules) > 4 and actions
    assert executed.learns_costs != ("streamed" in run.name), "one process weaves, too: its ranks do both"
    skipped = 0
    for rank, done in actions.items():
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
    for rank, counted in enumerate(executed.counts):
        assert len(counted.rounds) == len(schedules)
        sends = [action for action in actions[rank] if action.op is Op.SEND]
        calls = sum(traffic.calls["isend"] for traffic in counted.rounds)
        assert calls == sum(1 + (action.payload is Payload.CHUNK) for action in sends)
        assert counted.steps.pickled == 0, "numbers go as tensors"


def test_ranks_do_what_each_of_them_plans_in_the_simulation(executed: Executed) -> None:
    """Each rank's list, message for message and byte for byte, though the simulation has no models: only the lengths."""
    schedules, actions = read_schedules(executed.path), executed_actions(executed.path)
    runs = [simulated_rank(executed, rank) for rank in range(len(executed.counts))]
    steps = [each.step for each in simulated_rank(executed, 0).rank_rounds()]
    number = steps.count(1) if executed.learns_costs else len(steps)
    assert number > 2 and (executed.learns_costs or number == len(schedules))
    rounds = list(simulate_rounds(runs[0].config, runs.__getitem__, 1, number, GLOO))
    for rank, counted in enumerate(executed.counts):
        live = [a for each in rounds for a in each.schedule.of(rank) if each.carried[rank].live(a)]
        assert live == actions[rank][: len(live)] and (executed.learns_costs or len(live) == len(actions[rank]))
        for each, real, gather in zip(rounds, counted.rounds, counted.gathers, strict=False):
            traffic = each.traffic[rank]
            assert (traffic.messages.total(), traffic.sent_bytes) == (real.calls["isend"], real.num_bytes["isend"])
            assert traffic.gathers == gather.calls.total() == gather.calls["all_gather"]
            assert traffic.num_bytes["gather"] == gather.num_bytes["all_gather"]
    for each, schedule in zip(rounds, schedules, strict=False):
        assert each.faults == [] and each.schedule == schedule
    assert sum(each.traffic[rank].sent_bytes for each in rounds for rank in each.traffic) > 0 or len(runs) == 1


def test_results_of_a_step_are_those_of_the_simulation(executed: Executed) -> None:
    run = simulated_rank(executed, 0)
    assert len(list(run.rank_rounds())) == len(executed.counts[0].rounds) or executed.learns_costs
    shared = [size for what, size in executed.counts[0].shared if what.startswith("outputs of ") or what == "rewards"]
    assert [num_bytes // 8 for step in run.results for num_bytes in step] == shared and len(run.results) == 2


def simulated_rank(executed: Executed, rank: int) -> RankRun:
    config = run_of(executed.config)
    prompts = [len(prompt.tokens) for prompt in prompt_stream(config, read_inputs(config).prompts)]
    lengths = {seq_id: len(tokens) for seq_id, tokens in read_outcome(executed.path).tokens().items()}
    return RankRun(config, prompts, rank, None if config.rollout.forced_lengths else lengths.__getitem__)
