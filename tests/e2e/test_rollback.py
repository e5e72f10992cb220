"""Guards that go back: from the last checkpoint on with other prompts, on all ranks, a bounded number of times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.layout.placements import world_size
from oppo_megatron.train.inputs import read_inputs
from tests.support.configs import run_of
from tests.support.ppo import Outcome, Workspace, read_outcome
from tests.support.ranks import run_ranks
from tools.replay import read_rejected

BATCH = 6
CARRIED = {"overlap.inter": True, "overlap.intra": True, "overlap.delta": {"rule": "fixed", "initial": 3, "max": 4}}
DISAGGREGATED = {"placement": {"mode": "disaggregated"}}


def texts(config: dict[str, Any], positions: list[int]) -> list[str]:
    checked = run_of(config)
    stream = PromptStream(read_inputs(checked).prompts, checked.seed)
    return [stream.at(position).text for position in positions]


def poisoned(workspace: Workspace, name: str, positions: list[int], **changes: Any) -> dict[str, Any]:
    settings = {"steps": 5, "checkpoint": {"every_steps": 2, "keep": 9}, "guards": {"action": "rollback"}}
    config = workspace.config(name, **(settings | changes))
    options = {"prompts": texts(config, positions)}
    part = {"kind": "python", "entry_point": "tests.e2e.rewards:poisoned", "options": options}
    return config | {"reward": None, "rewards": [part]}


def run(config: dict[str, Any]) -> tuple[Outcome, list[list[tuple[str, float]]], list[dict[str, Any]]]:
    world = world_size(run_of(config))
    seen = run_ranks(world, "tests.e2e.jobs:train_through_rollbacks", config=config)
    folder = Path(config["run_dir"])
    lines = [json.loads(line) for line in (folder / "rollbacks.jsonl").read_text().splitlines()]
    return read_outcome(folder), seen, lines


@pytest.mark.parametrize("layout", [{}, DISAGGREGATED], ids=["one rank", "actor | scorers"])
def test_a_run_goes_back_leaves_the_prompts_out_and_ends(workspace: Workspace, layout: dict[str, Any]) -> None:
    """Rejected rollouts that the checkpoint has in flight are left out, too."""
    config = poisoned(workspace, f"back-{len(layout)}", [20], **CARRIED, **layout)
    outcome, seen, lines = run(config)
    (line,) = lines
    step = line["step"]
    assert 3 <= step <= 5 and line["checkpoint"] == f"step-{(step - 1) // 2 * 2:06d}" and 20 in line["left_out"]
    assert "is nan (1 of 6 rows are not finite)" in line["reason"]
    rejected = read_rejected(Path(config["run_dir"]) / "rejected" / f"step-{step}.safetensors")
    assert {rollout.seq_id for rollout in rejected.batch} <= set(line["left_out"])
    stream = PromptStream(read_inputs(run_of(config)).prompts, config["seed"])
    assert line["rows"] == [stream.at(position).row for position in line["left_out"]]

    trained = [row["seq_id"] for row in outcome.rollouts]
    assert [entry["step"] for entry in outcome.metrics] == [1, 2, 3, 4, 5]
    assert len(trained) == len(set(trained)) == 5 * BATCH and not set(trained) & set(line["left_out"])
    assert set(trained) | set(line["left_out"]) == set(range(5 * BATCH + len(line["left_out"])))
    assert all(entry["skipped"] is None for entry in outcome.metrics)
    summary = json.loads((Path(config["run_dir"]) / "summary.json").read_text())
    assert (summary["rollbacks"], summary["prompts_left_out"]) == (1, len(line["left_out"]))
    for rank in seen:
        sums = dict(rank[: next(i for i, (when, _) in enumerate(rank) if when.startswith("restored")) + 1])
        last = max(when for when in sums if when.startswith("saved"))
        assert sums[last] == sums[last.replace("saved", "restored")], "the state is the checkpoint's"


@pytest.mark.long
def test_greedy_responses_are_left_out_with_their_group(workspace: Workspace) -> None:
    remax = {"algorithm": {"preset": "remax"}, "critic": None, "ppo.kl": {}}
    config = poisoned(workspace, "greedy", [40], **CARRIED, **remax)
    outcome, _, (line,) = run(config)
    left_out = set(line["left_out"])
    assert {40, 41} <= left_out and left_out == {position ^ 1 for position in left_out}
    rejected = read_rejected(Path(config["run_dir"]) / "rejected" / f"step-{line['step']}.safetensors")
    assert len(rejected.batch) == BATCH and all(rollout.seq_id % 2 == 0 for rollout in rejected.batch)
    assert rejected.scored.greedy is not None and len(rejected.scored.greedy.scores_G) == BATCH
    trained = [row["seq_id"] for row in outcome.rollouts]
    assert len(trained) == len(set(trained)) == 5 * BATCH and not set(trained) & left_out
    assert [row["seq_id"] for row in outcome.greedy] == [seq_id + 1 for seq_id in trained]


def test_an_update_that_only_the_actors_ranks_see_takes_all_ranks_back_until_it_may_no_more(workspace: Workspace) -> None:
    config = workspace.config("often", steps=1, checkpoint={"every_steps": 1}, **DISAGGREGATED)
    assert run_ranks(2, "tests.e2e.jobs:train_error", config=config) == ["", ""]
    (Path(config["run_dir"]) / "summary.json").unlink()
    guards = {"ratio_max": 1.0001, "action": "rollback"}
    config |= {"steps": 3, "checkpoint": {"every_steps": 1, "resume": True}, "guards": guards}
    with pytest.raises(AssertionError, match="the run has gone back 2 times already, and may not do so again") as told:
        run(config)
    assert "it was because ratio_max is" in str(told.value) and "step-2-rollback-2.safetensors" in str(told.value)
    folder = Path(config["run_dir"])
    lines = [json.loads(line) for line in (folder / "rollbacks.jsonl").read_text().splitlines()]
    assert [(line["step"], line["left_out"], line["num_written"]) for line in lines] == [
        (2, list(range(6, 12)), 1),
        (2, list(range(12, 18)), 2),
    ]
    names = sorted(path.name for path in (folder / "rejected").glob("*.safetensors"))
    assert names == ["step-2-rollback-1.safetensors", "step-2-rollback-2.safetensors", "step-2.safetensors"]

    (folder / "rollbacks.jsonl").write_text('{"step": 2}\n')
    refused = run_ranks(2, "tests.e2e.jobs:train_error", config=config)
    assert "a line that is not a rollback" in refused[0]


def test_back_to_within_a_rollout_others_take_the_place_of_the_rejected_batch(workspace: Workspace) -> None:
    """The checkpoint is of a run told to stop in its first step, with all of the rejected batch in flight."""
    config = poisoned(workspace, "within", [2], **CARRIED)
    assert run_ranks(1, "tests.e2e.jobs:train_until", config=config, rounds=2) == [False]
    config["checkpoint"] = {**config["checkpoint"], "resume": True}
    outcome, _, (line,) = run(config)
    assert line["checkpoint"].startswith("step-000000-clock") and len(line["left_out"]) == BATCH
    trained = [row["seq_id"] for row in outcome.rollouts]
    assert sorted(trained + line["left_out"]) == list(range(6 * BATCH)) and len(outcome.metrics) == 5
    carried = set(range(BATCH + 3)) - set(line["left_out"])
    assert carried <= set(trained), "the others of that step are gone on with"


def test_without_a_checkpoint_yet_the_run_ends_and_says_so(workspace: Workspace) -> None:
    config = poisoned(workspace, "early", [3])
    (error,) = run_ranks(1, "tests.e2e.jobs:train_error", config=config)
    assert "the run should go back to a checkpoint, but has none yet; lower checkpoint.every_steps" in error
    assert "the score of row" in error and "tools.replay" in error
