"""The filter of groups in real runs: neither streaming nor chunks nor placements nor stops decide what is dropped, or trained."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import assert_bit_equal, checkpoints, resumed, stop
from tests.support.layouts import assert_same, deep
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

STEPS, BATCH, GROUP, EVERY, LONGEST = 3, 6, 2, 14, 40
MODEL = {"kind": "model", "weight": 0.0}
"""With it the sum is the same, and known only when the model has read the response: a verdict is due a period later."""


def dapo(workspace: Workspace, name: str, *others: dict[str, Any], delta: int = 0, **changes: Any) -> dict[str, Any]:
    """Groups of two, of which those are dropped whose responses are both of an even length, or both of an odd one."""
    options = {"calls": str(calls_of(workspace, name))}
    parity = {"kind": "python", "entry_point": "tests.e2e.rewards:parity", "options": options}
    settings: dict[str, Any] = {
        "steps": STEPS,
        "algorithm": {"preset": "dapo"},
        "critic": None,
        "rewards": [parity, *others],
        "rollout.batch_size": BATCH,
        "rollout.group_size": GROUP,
        "ppo": {"minibatches": 1, "mask_truncated": True},
        "overlap.inter": True,
        "overlap.delta": {"rule": "fixed", "initial": delta, "max": delta},
        "overlap.backfill": EVERY,
        "overlap.chunk.tokens": EVERY,
    }
    return deep(workspace, name, **settings | ({} if others else {"reward": None}) | changes)


def calls_of(workspace: Workspace, name: str) -> Path:
    return workspace.root / f"{name}.calls"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("filter"))


@pytest.fixture(scope="module")
def sequential(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(dapo(workspace, "sequential"))


@pytest.fixture(scope="module")
def by_model(workspace: Workspace) -> Outcome:
    """One rank, nothing streamed, verdicts by a sum that has a reward model in it."""
    return run_ppo_ranks(dapo(workspace, "by-model", MODEL, delta=1))


def dropped(outcome: Outcome) -> int:
    return sum(line["groups_dropped"] for line in outcome.metrics)


def assert_once(workspace: Workspace, name: str, outcome: Outcome) -> None:
    """The function was called once for each response that was trained or dropped."""
    calls = calls_of(workspace, name).read_text().splitlines()
    assert len(calls) == STEPS * BATCH + GROUP * dropped(outcome)


def test_groups_that_are_all_the_same_are_dropped(workspace: Workspace, sequential: Outcome) -> None:
    assert [len(batch) for batch in sequential.batches()] == [BATCH] * STEPS
    rewards = {row["seq_id"]: row["reward"] for row in sequential.rollouts}
    groups = {seq_id // GROUP for seq_id in rewards}
    assert all(rewards[GROUP * g] != rewards[GROUP * g + 1] for g in groups)
    assert dropped(sequential) > 1 and sum(line["backfilled"] for line in sequential.metrics) == GROUP * dropped(
        sequential
    )
    assert max(groups) + 1 == len(groups) + dropped(sequential), "no prompt beyond the last that was needed"
    for line in sequential.metrics:
        assert line["keep_rate"] == 3 / (3 + line["groups_dropped"])
        assert line["equal_groups"] == line["carried"] == 0
    assert_once(workspace, "sequential", sequential)


@pytest.mark.long
def test_a_response_is_dropped_where_its_greedy_one_scores_the_same(workspace: Workspace) -> None:
    """A group of one and its greedy baseline, in another layout too."""
    changes = {"algorithm": {"preset": "remax"}, "filter": "reward", "rollout.group_size": 1, "overlap.intra": True}
    one = run_ppo_ranks(dapo(workspace, "greedy", delta=1, **changes))
    assert [len(batch) for batch in one.batches()] == [BATCH] * STEPS and len(one.greedy) == STEPS * BATCH
    rewards = {row["seq_id"]: row["reward"] for row in [*one.rollouts, *one.greedy]}
    assert all(rewards[seq_id] != rewards[seq_id + 1] for seq_id in rewards if seq_id % 2 == 0)
    assert dropped(one) > 1 and all(line["equal_groups"] == 0 for line in one.metrics)
    calls = calls_of(workspace, "greedy").read_text().splitlines()
    assert len(calls) == 2 * (STEPS * BATCH + dropped(one)), "each response once"
    apart = {"placement": {"mode": "disaggregated", "actor": {"tp": 2}}, "overlap.chunk.tokens": 7}
    assert_same(run_ppo_ranks(dapo(workspace, "greedy-apart", delta=1, **changes | apart)), one)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_streamed_chunks_of_any_size_train_the_same(workspace: Workspace, sequential: Outcome, chunk: int) -> None:
    changes = {"overlap.intra": True, "overlap.chunk.tokens": chunk}
    outcome = run_ppo_ranks(dapo(workspace, f"chunk-{chunk}", **changes))
    assert_same(outcome, sequential)
    assert [line["groups_dropped"] for line in outcome.metrics] == [
        line["groups_dropped"] for line in sequential.metrics
    ]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("actor-scorers", {"placement": {"mode": "disaggregated"}, "overlap.chunk.tokens": 7}),
        ("dp2-dp2", {"placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}}),
        pytest.param("pp2-woven", {"placement": {"mode": "colocated", "actor": {"pp": 2}}}, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_every_layout_trains_as_one_rank(
    workspace: Workspace, by_model: Outcome, name: str, changes: dict[str, Any]
) -> None:
    outcome = run_ppo_ranks(dapo(workspace, name, MODEL, delta=1, **{"overlap.intra": True}, **changes))
    assert_same(outcome, by_model)
    assert dropped(outcome) == dropped(by_model) > 1
    assert_once(workspace, name, outcome)


def test_dropped_groups_leave_scorers_that_have_read_a_part_of_them(workspace: Workspace) -> None:
    """A reference reads a chunk while the next is decoded, or, beside the actor, nothing before the batch is complete."""
    kl = {"ppo.kl": {"mode": "penalty", "coefficient": 0.1}}
    alone = run_ppo_ranks(dapo(workspace, "kl", delta=1, **kl))
    for place in ("scorer", "actor"):
        streamed = {"placement": {"mode": "disaggregated", "reference": place}, "overlap.intra": True, "overlap.chunk.tokens": 7}
        outcome = run_ppo_ranks(dapo(workspace, f"kl-{place}", delta=1, **kl, **streamed))
        assert_same(outcome, alone)
        assert dropped(outcome) == dropped(alone) > 1


@pytest.mark.parametrize("placement", ["single", "disaggregated"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(workspace: Workspace, by_model: Outcome, placement: str) -> None:
    """Told to stop within two rollouts: scores in force are saved, and no response is scored twice."""
    changes: dict[str, Any] = {"overlap.intra": True, "overlap.chunk.tokens": 7, "placement": {"mode": placement}}
    plain = run_ppo_ranks(dapo(workspace, f"whole-{placement}", MODEL, delta=1, **changes))
    config = dapo(workspace, f"stopped-{placement}", MODEL, delta=1, **changes)
    stop(config, rounds=5)
    assert "clock" in checkpoints(config)[-1]
    config["checkpoint"] = {"resume": True}
    stop(config, rounds=4)
    assert_bit_equal(resumed(config), plain)
    whole, stopped = (
        Counter(calls_of(workspace, f"{kind}-{placement}").read_text().splitlines()) for kind in ("whole", "stopped")
    )
    assert stopped == whole


def flat(workspace: Workspace, name: str, unlike: int, **changes: Any) -> dict[str, Any]:
    """The rows in their order; only the first few have prompts whose responses are not all the same."""
    rows = (workspace.root / "data" / "prompts.jsonl").read_text().splitlines()
    level = {"kind": "python", "entry_point": "tests.e2e.rewards:level"}
    level |= {"options": {"flat": [json.loads(row)["prompt"] for row in rows[unlike:]]}}
    return dapo(workspace, name, **{"rewards": [level], "data.shuffle": False} | changes)


def test_a_filter_that_drops_everything_has_an_end(workspace: Workspace) -> None:
    with pytest.raises(
        AssertionError, match=r"SamplingError.*3[0-2] groups were judged in this step, and 0 of them kept \(0\.0%\)"
    ):
        run_ppo_ranks(flat(workspace, "nothing", 0))
    with pytest.raises(AssertionError, match="none of the last 4 groups was worth training, and no step was made"):
        run_ppo_ranks(flat(workspace, "no-step", 0, **{"steps": None, "data.max_rows": 4}))


def test_prompts_of_which_nothing_is_left_end_the_run_after_its_last_batch(workspace: Workspace) -> None:
    """Three of five groups make a step; the others are dropped, and held-out prompts are answered once after it."""
    heldout = {
        "data": {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96},
        "verifier": "arithmetic",
    }
    config = flat(workspace, "end", 3, **{"steps": None, "data.max_rows": 5, "evaluation": heldout | {"max_rows": 4}})
    outcome = run_ppo_ranks(config)
    assert [sorted(batch) for batch in outcome.batches()] == [list(range(BATCH))]
    summary = json.loads((Path(config["run_dir"]) / "summary.json").read_text())
    assert summary["heldout_accuracy"].keys() == {"0", "1"}
