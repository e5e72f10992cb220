"""Ranks that die or are slow in a real run: death is felt and named by all, slowness by nobody."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.schedule.actions import Payload, parse_action
from tests.support.ppo import Workspace, read_outcome, weight_distance
from tests.support.ranks import run_mortal_ranks, run_ranks

TIMEOUT_S = 10.0

CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "a stage of TP2xPP2 while decoding": (
        {"placement": {"mode": "colocated", "actor": {"tp": 2, "pp": 2}}},
        3,
        "decode actor m0 c1 s2",
    ),
    "a replica while another decodes": ({"placement": {"mode": "disaggregated", "actor": {"dp": 2}}}, 1, "sample actor m0 c1 s1"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_other_rank_names_the_action_it_waited_for(tmp_path_factory: pytest.TempPathFactory, case: str) -> None:
    changes, victim, action = CASES[case]
    workspace = Workspace.create(tmp_path_factory.mktemp("dead"))
    config = workspace.config("dead", **{"overlap.intra": True, "runtime.timeout_s": TIMEOUT_S}, **changes)
    world = world_size(TrainConfig(**config))
    answers = run_mortal_ranks(world, "tests.e2e.jobs:train_with_a_death", config=config, rank=victim, at=action)
    assert answers[victim] is None
    for rank, answer in enumerate(answers):
        if rank == victim:
            continue
        assert answer is not None
        kind, message, seconds = answer
        assert kind == "StallError", (rank, answer)
        named = re.search(r"rank (\d+) waited .*in vain for `([^`]+)`", message)
        assert named and int(named[1]) == rank, message
        waited = parse_action(rank, named[2])
        # A scorer may be one chunk behind, which nobody sends once the replica that felt the death has ended.
        behind = waited.payload is Payload.CHUNK
        assert waited.chunk in ((1, 2) if behind else (2,) if waited.role == "actor" else (1,)), "in the second round"
        assert seconds < world * TIMEOUT_S + 20


@pytest.mark.parametrize(
    ("nth", "part"), [(2, "update actor, step 1"), pytest.param(6, "update critic, step 1", marks=pytest.mark.long)]
)
def test_every_other_rank_names_the_update_it_was_in(tmp_path_factory: pytest.TempPathFactory, nth: int, part: str) -> None:
    """Two epochs of two minibatches of the actor, then as many of the critic."""
    workspace = Workspace.create(tmp_path_factory.mktemp("dead"))
    placement = {"mode": "colocated", "actor": {"pp": 2}}
    config = workspace.config("dead", placement=placement, **{"runtime.timeout_s": TIMEOUT_S})
    answers = run_mortal_ranks(2, "tests.e2e.jobs:train_with_a_death_in_an_update", config=config, rank=1, nth=nth)
    assert answers[1] is None and answers[0] is not None
    kind, message, seconds = answers[0]
    assert kind == "StallError" and f"rank 0 waited in vain for `{part}` (" in message, answers[0]
    assert ".cc" not in message and seconds < 2 * TIMEOUT_S + 20


def test_what_was_sent_to_a_slow_rank_outlives_the_round(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A last stage has nothing to wait for at a round's end; also in an evaluation, whose executor goes with it.

    Tokens, metrics and weights are those of a run in which no rank is slow.
    """
    workspace = Workspace.create(tmp_path_factory.mktemp("slow"))
    heldout = {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96, "max_rows": 3}
    evaluation = {"data": heldout, "verifier": "arithmetic"}
    placement = {"mode": "colocated", "actor": {"pp": 2}}
    changes = {"runtime.timeout_s": TIMEOUT_S, "steps": 1, "rollout.max_response_tokens": 6}
    found = []
    for name, seconds in (("slow", 0.05), ("quick", 0.0)):
        config = workspace.config(name, placement=placement, evaluation=evaluation, **changes)
        run_ranks(2, "tests.e2e.jobs:train_beside_a_slow_rank", config=config, rank=0, seconds=seconds)
        found.append(read_outcome(Path(config["run_dir"])))
    slow, quick = found
    assert slow.tokens() == quick.tokens() and weight_distance(slow.actor, quick.actor) == 0
    assert [row["heldout"] for row in slow.metrics] == [row["heldout"] for row in quick.metrics] != []
