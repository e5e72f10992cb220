"""A run that stops and is resumed is the run that never stopped: prompts, tokens, metrics, and weights to the bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.data.prompts import RowOrder
from oppo_megatron.data.tokenizer import train_sentencepiece
from oppo_megatron.layout.placements import world_size
from oppo_megatron.records import Source
from tests.e2e.matrix import FEATURES
from tests.support.configs import run_of
from tests.support.ppo import DEEP, Outcome, Workspace, assert_same, deep, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks
from tests.support.rows import write_rows
from tests.support.virtual import assert_unfolds_alike

TWO_RANKS = {"placement": {"mode": "disaggregated"}}
TIMES = ("_s", "bytes", "_mb", "bubble_share")
CARRIED: dict[str, Any] = {
    "steps": 4, "overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "measured", "initial": 3, "max": 4},
}  # fmt: skip
PP2 = {"placement": {"mode": "disaggregated", "actor": {"pp": 2}}}
CASES: dict[str, dict[str, Any]] = {
    "one rank": CARRIED, "PP2 | 1, stale caches kept": CARRIED | PP2 | {"overlap.carry": "keep"},
    "PP2 | 1, tied, bfloat16": CARRIED | PP2 | {"runtime.dtype": "bfloat16", "actor.init": DEEP | {"tie_word_embeddings": True}},
}  # fmt: skip


@pytest.fixture(scope="module")
def carried(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(deep(workspace, "carried", **CARRIED))


def stop(config: dict[str, Any], rounds: int, rank: int = 0) -> None:
    world = world_size(run_of(config))
    ended = run_ranks(world, "tests.e2e.jobs:train_until", config=config, rounds=rounds, rank=rank)
    assert ended == [False] * world, "the run was over before it was to stop"


def resumed(config: dict[str, Any]) -> Outcome:
    return run_ppo_ranks(config | {"checkpoint": {**config.get("checkpoint", {}), "resume": True}})


def checkpoints(config: dict[str, Any]) -> list[str]:
    return sorted(path.name for path in (Path(config["run_dir"]) / "checkpoints").iterdir())


def last_checkpoint(config: dict[str, Any]) -> Path:
    return Path(config["run_dir"]) / "checkpoints" / checkpoints(config)[-1]


def rewound(config: dict[str, Any], name: str, steps: int = 1) -> dict[str, Any]:
    copy = config | {"run_dir": f"{config['run_dir']}-{name}"}
    shutil.copytree(config["run_dir"], copy["run_dir"])
    for _ in range(steps):
        shutil.rmtree(last_checkpoint(copy))
    (Path(copy["run_dir"]) / "summary.json").unlink()
    return copy


def assert_bit_equal(outcome: Outcome, plain: Outcome) -> None:
    assert outcome.tokens() == plain.tokens() and outcome.batches() == plain.batches()
    assert outcome.rollouts == plain.rollouts and outcome.greedy == plain.greedy
    for ours, theirs in zip(outcome.metrics, plain.metrics, strict=True):
        one, other = ({name: line[name] for name in line if not name.endswith(TIMES)} for line in (ours, theirs))
        assert one == other
    assert weight_distance(outcome.actor, plain.actor) == 0.0 and weight_distance(outcome.critic, plain.critic) == 0.0


def furthest_logprob(outcome: Outcome, other: Outcome) -> float:
    ours, theirs = ({row["seq_id"]: row["logprobs"] for row in each.rollouts} for each in (outcome, other))
    return max(abs(a - b) for seq_id in ours for a, b in zip(ours[seq_id], theirs[seq_id], strict=False))


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long) if "bfloat16" in case else case for case in CASES])
def test_a_run_with_a_measured_delta_that_is_stopped_and_resumed_is_the_run_that_never_stopped(
    workspace: Workspace, carried: Outcome, case: str
) -> None:
    name = "".join(c for c in case if c.isalnum())
    plain = carried if case == "one rank" else run_ppo_ranks(deep(workspace, f"{name}-plain", **CASES[case]))
    config = deep(workspace, name, **CASES[case])
    stop(config, rounds=3)
    assert "clock" in checkpoints(config)[-1]
    config["checkpoint"] = {"resume": True}
    stop(config, rounds=2)
    outcome = resumed(config)
    assert_bit_equal(outcome, plain)
    assert_unfolds_alike(config, outcome)


def test_resumed_after_a_step_is_the_run_that_never_stopped(workspace: Workspace) -> None:
    """The run ends right after the first step's checkpoint: what it wrote beyond is cut off and written again."""
    config = deep(workspace, "after", **CARRIED, **TWO_RANKS, **{"checkpoint.every_steps": 1, "checkpoint.keep": 9})
    plain = run_ppo_ranks(config)
    assert checkpoints(config) == [f"step-{step:06d}" for step in range(1, config["steps"] + 1)]
    assert all(line["checkpoint_bytes"] for line in plain.metrics[1:])
    assert_bit_equal(resumed(rewound(config, "again", config["steps"] - 1)), plain)


def test_weighted_files_go_on_where_the_run_stopped_and_other_weights_are_refused(workspace: Workspace) -> None:
    config = deep(workspace, "weighted", **CARRIED)
    lines = Path(config["data"]["path"]).read_text().splitlines()
    files = [workspace.root / f"weighted-{name}.jsonl" for name in "ab"]
    for file, part in zip(files, (lines[:5], lines[5:9]), strict=True):
        file.write_text("\n".join(part) + "\n")
    config["data"]["path"] = [{"path": str(files[0]), "weight": 0.5}, {"path": str(files[1]), "weight": 3}]
    plain = run_ppo_ranks(config | {"run_dir": f"{config['run_dir']}-whole"})
    order = [
        row
        for epoch in range(9)
        for row in RowOrder([Source("a", 0.5)] * 5 + [Source("b", 3.0)] * 4, config["seed"]).epoch(epoch)
    ]
    prompts = {row["seq_id"]: row["prompt"] for row in plain.rollouts}
    asked = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) > 15 and all(prompt == asked[order[seq_id]] for seq_id, prompt in prompts.items())
    stop(config, rounds=3)
    config["checkpoint"] = {"resume": True}
    changed = config | {"data": config["data"] | {"path": [str(files[0]), config["data"]["path"][1]]}}
    refusal = str(run_ranks(1, "tests.e2e.jobs:train_error", config=changed)[0])
    assert "weight, is [[5, 1.0], [4, 3.0]], but the checkpoint's run has [[5, 0.5], [4, 3.0]]" in refusal
    assert_bit_equal(resumed(config), plain)


@pytest.mark.parametrize("left", [3, 1])
def test_a_warm_up_and_the_scores_seen_go_on(workspace: Workspace, warmed_up: tuple[dict[str, Any], Outcome], left: int) -> None:
    config, plain = warmed_up
    assert_bit_equal(resumed(rewound(config, str(left), left)), plain)


@pytest.fixture(scope="module")
def warmed_up(workspace: Workspace) -> tuple[dict[str, Any], Outcome]:
    changes = {
        "ppo.critic_warmup_steps": 2, "ppo.reward_normalization": "running", "ppo.truncated": -0.5, "ppo.minibatches": 2,
        "overlap.carry": "keep", "checkpoint": {"every_steps": 1, "keep": 9},
    }  # fmt: skip
    config = deep(workspace, "warm", **CARRIED, **TWO_RANKS, **changes)
    config["actor"]["optimizer"] = config["critic"]["optimizer"] = config["actor"]["optimizer"] | {"decay": "linear"}
    return config, run_ppo_ranks(config)


def test_a_critic_warms_up_alone(warmed_up: tuple[dict[str, Any], Outcome]) -> None:
    config, outcome = warmed_up
    assert_unfolds_alike(config, outcome)
    assert [("actor_loss" in line, line["critic_loss"] > 0) for line in outcome.metrics] == [
        (False, True), (False, True), (True, True), (True, True),
    ]  # fmt: skip
    kl = [abs(line["kl_mean"]) for line in outcome.metrics]
    assert max(kl[:3]) < 1e-3 < kl[3], "the policy stays where it begins"
    assert all(max(row["versions"]) == 0 for row in outcome.rollouts if row["step"] <= 3)
    assert all(line["stale_token_fraction"] == 0 for line in outcome.metrics[:3])
    assert outcome.metrics[2]["lr"] > outcome.metrics[3]["lr"] > 0, "the schedule is of the steps that train the actor"
    assert outcome.metrics[0]["critic_error"] != outcome.metrics[1]["critic_error"]


def test_resume_in_another_layout(workspace: Workspace) -> None:
    """Goes from 1 | 1 over TP2 | 1 (trained as replicas) and PP2 | 1 to replicas; tensor ranks do not divide the vocabulary."""
    odd = CARRIED | FEATURES["odd vocabulary"].changes
    plain, config = run_ppo_ranks(deep(workspace, "odd", **odd)), deep(workspace, "layout", **odd, **TWO_RANKS)
    assert FEATURES["odd vocabulary"].shows(plain), "nothing is drawn from the second shard"
    stop(config, rounds=3)
    config["checkpoint"] = {"resume": True}
    config["placement"] = {"mode": "disaggregated", "actor": {"tp": 2}}
    config["actor"]["train"] = {"tp": 1, "dp": 2}
    stop(config, rounds=2)
    del config["actor"]["train"]
    config["placement"] = {"mode": "disaggregated", "actor": {"pp": 2}}
    stop(config, rounds=2)
    config["placement"] = {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}
    assert_same(run_ppo_ranks(config), plain)


def test_resumed_with_a_chunk_that_adapts_the_tokens_are_the_same(workspace: Workspace, carried: Outcome) -> None:
    config = deep(workspace, "adaptive", **CARRIED | {"overlap.chunk": [7, 16, 32, 64]})
    stop(config, rounds=3)
    outcome = resumed(config)
    assert_same(outcome, carried)
    assert len({line["chunk_tokens"] for line in outcome.metrics}) > 1, "the chunk size is always the same: no case"


def test_stale_caches_that_cannot_be_restored_are_those_of_the_current_weights(workspace: Workspace) -> None:
    two_steps = CARRIED | {"steps": 2, "checkpoint": {"every_steps": 1, "keep": 9}}
    fresh = run_ppo_ranks(deep(workspace, "fresh", **two_steps))
    config = deep(workspace, "stale", **two_steps, **{"overlap.carry": "keep"})
    kept = run_ppo_ranks(config)
    first = [row for row in kept.rollouts if row["step"] == 1]
    assert first == [row for row in fresh.rollouts if row["step"] == 1], "nothing is stale in the first step"
    assert furthest_logprob(kept, fresh) > 1e-3
    outcome = run_ppo_ranks(rewound(config, "layout") | {"checkpoint": {"resume": True}} | TWO_RANKS)
    assert_same(outcome, fresh)
    assert furthest_logprob(outcome, fresh) < 1e-4


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_used(workspace: Workspace) -> None:
    config = deep(workspace, "damaged", **{"checkpoint.every_steps": 1, "checkpoint.keep": 3})
    plain = run_ppo_ranks(config)
    run = Path(config["run_dir"])
    (run / "summary.json").unlink()
    newest = run / "checkpoints" / "step-000003"
    weights = next((newest / "models").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-8])
    (run / "checkpoints" / "step-000002" / "state.json").unlink()
    assert_bit_equal(resumed(config), plain)
    assert checkpoints(config) == [
        "damaged-step-000002", "damaged-step-000003", "step-000001", "step-000002", "step-000003",
    ]  # fmt: skip


def test_what_cannot_be_continued_is_refused(workspace: Workspace) -> None:
    def refusal(config: dict[str, Any]) -> str:
        return str(run_ranks(1, "tests.e2e.jobs:train_error", config=config)[0])

    config = deep(workspace, "refused")
    stop(config, rounds=2)
    assert "holds the checkpoints of a run that did not finish; continue it with --resume" in refusal(config)
    config["checkpoint"] = {"resume": True}
    assert "seed is 5, but the checkpoint's run has 23" in refusal(config | {"seed": 5})
    data = Path(config["data"]["path"])
    other = data.with_name("other.jsonl")
    lines = data.read_text().splitlines()
    other.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    run = Path(config["run_dir"])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9}\n')
    kept = {path: path.read_bytes() for path in (run / "metrics.jsonl", run / "config.yaml")}
    assert "are not those that the checkpoint's run" in refusal(config | {"data": config["data"] | {"path": str(other)}})
    assert kept == {path: path.read_bytes() for path in kept}, "a start that is refused has touched the run"
    other_tokenizer = data.with_name("other.model")
    train_sentencepiece(["other words of another tongue"], other_tokenizer, 276)
    for changed in ({"tokenizer": {"path": str(other_tokenizer)}}, {"data": config["data"] | {"prompt_template": "{prompt} "}}):
        assert "resume with the same data, tokenizer and template" in refusal(config | changed)
    assert kept == {path: path.read_bytes() for path in kept}, "a start that is refused has touched the run"
    wider = config["actor"] | {"init": config["actor"]["init"] | {"intermediate_size": 96}}
    assert "does not hold the models of this configuration" in refusal(config | {"actor": wider})
    (manifest,) = (run / "checkpoints").glob("step-*/manifest.json")
    text, there = manifest.read_text(), checkpoints(config)
    manifest.write_text(text.replace('"format": 4', '"format": 3'))
    assert f"{manifest}: format 3, this program reads format 4; resume with the version that wrote it" == refusal(config)
    assert checkpoints(config) == there, "it is not damaged"
    manifest.unlink()
    assert "none of its checkpoints is whole" in refusal(config)


LATE_S = 1.0
REPLICAS = {"placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}}
JOB = "tests.e2e.jobs_checkpoint:run_with_a_slow_disk"
SLOW_JOB = "tests.e2e.jobs_checkpoint:train_with_slow_files"
FIVE_STEPS = CARRIED | {"steps": 5, "checkpoint.every_steps": 2, "checkpoint.keep": 9, "checkpoint.final": False}


@pytest.mark.parametrize("layout", [TWO_RANKS, pytest.param(REPLICAS, marks=pytest.mark.long)], ids=["1 | 1", "replicas"])
def test_a_checkpoint_written_beside_the_run_is_that_of_its_moment(workspace: Workspace, layout: dict[str, Any]) -> None:
    name = str(layout["placement"]["mode"])
    plain = run_ppo_ranks(deep(workspace, f"{name}-plain", **FIVE_STEPS, **layout))
    config = deep(workspace, name, **FIVE_STEPS, **layout, **{"checkpoint.asynchronous": True})
    for message, steps in run_ranks(2, JOB, config=config, late_s=None):
        assert message == "" and len(steps) == 4
        assert steps[0] == 2 and steps[1] > 2, f"writing began and ended after steps {steps}"
    beside = read_outcome(Path(config["run_dir"]))
    assert_bit_equal(beside, plain)
    hidden = sum(line["checkpoint_hidden_s"] for line in beside.metrics)
    assert hidden > 0 and sum(line["checkpoint_hidden_s"] for line in plain.metrics) == 0
    assert checkpoints(config) == ["step-000002", "step-000004"]
    assert_bit_equal(resumed(rewound(config, "again")), plain)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_work_on_a_checkpoint_that_takes_long_is_reported(workspace: Workspace, asynchronous: bool) -> None:
    """Also while the run waits, at its end, for a checkpoint that a thread writes."""
    rules = {"every_steps": 1, "final": False, "asynchronous": asynchronous}
    config = workspace.config(f"slow-{asynchronous}", steps=1, checkpoint=rules)
    (told,) = run_ranks(1, SLOW_JOB, config=config)
    assert any(line.startswith("saving checkpoint step-000001, models, ") for line in told)
    if not asynchronous:
        (Path(config["run_dir"]) / "summary.json").unlink()
        (told,) = run_ranks(1, SLOW_JOB, config=config | {"steps": 2, "checkpoint": {"resume": True, "final": False}})
        for work in ("checking the files of checkpoint step-000001, ", "loading models of the checkpoint, "):
            assert any(line.startswith(work) for line in told)


@pytest.mark.long
def test_rows_whose_answers_cannot_be_compared_are_left_out_of_the_run_and_of_its_rest(workspace: Workspace) -> None:
    """The rank that scores tries them, all ranks set them aside, and a resumed run reads which: a trial may end otherwise."""
    answers = [r"x^{10^{10^{10}}}+10^{10^{10}}" if n == 3 else f"{2 * n}" for n in range(8)]
    path = write_rows(workspace.root / "hostile.jsonl", *({"prompt": f"{n}+{n}=", "answer": a} for n, a in enumerate(answers)))
    rule = {"kind": "verifier", "name": "math", "timeout_s": 3}
    changes = {"steps": 2, "rewards": [rule], "reward": None, "checkpoint": {"every_steps": 1, "keep": 9}} | TWO_RANKS
    config = workspace.config("hostile", **changes, **{"data.path": str(path), "data.bad_rows": "quarantine"})
    refused = workspace.config("hostile-refused", **changes, **{"data.path": str(path)})
    for error in run_ranks(2, "tests.e2e.jobs:train_error", config=refused):
        assert f"{path}:4: reward part 'math': the expected answer x^{{10" in error and "data.bad_rows=quarantine" in error
    assert not Path(refused["run_dir"]).exists()
    plain, kept = run_ppo_ranks(config), Path(config["run_dir"]) / "quarantine.jsonl"
    assert [json.loads(line)["line"] for line in kept.read_text().splitlines()] == [4]
    assert len(plain.rollouts) == 12 and not any("3+3=" in rollout["prompt"] for rollout in plain.rollouts)
    config = rewound(config, "again")
    untold = config | {"run_dir": f"{config['run_dir']}-untold"}
    shutil.copytree(config["run_dir"], untold["run_dir"])
    (Path(untold["run_dir"]) / kept.name).unlink()
    resume = {"checkpoint": {**config["checkpoint"], "resume": True}}
    errors = run_ranks(2, "tests.e2e.jobs:train_error", config=untold | resume)
    assert "the number of usable prompts is 8, but the checkpoint's run has 7" in errors[0]
    assert_bit_equal(resumed(config), plain)


def test_told_to_stop_the_run_waits_for_its_checkpoint(workspace: Workspace) -> None:
    config = deep(workspace, "stopped", **CARRIED, **TWO_RANKS, **{"checkpoint.asynchronous": True})
    stop(config, rounds=3)
    assert len(checkpoints(config)) == 1 and "clock" in checkpoints(config)[0]


def test_a_guard_waits_for_the_checkpoint_that_it_goes_back_to(workspace: Workspace) -> None:
    poisoned = {"kind": "python", "entry_point": "tests.e2e.rewards:breaks", "options": {"name": "waits", "good": 6}}
    checkpoint = {"every_steps": 1, "asynchronous": True}
    config = workspace.config("guarded", checkpoint=checkpoint, rewards=[poisoned], guards={"action": "rollback"})
    ((message, steps),) = run_ranks(1, JOB, config=config | {"reward": None}, late_s=LATE_S)
    assert message.startswith("RollBack: step 2: ") and "back to step-000001; 6 prompts are left out" in message
    assert steps == [1, 1] and checkpoints(config) == ["step-000001"]


def test_a_disk_without_space_ends_the_run_on_all_ranks(workspace: Workspace) -> None:
    config = deep(workspace, "full", **CARRIED, **TWO_RANKS, **{"checkpoint.asynchronous": True, "checkpoint.every_steps": 1})
    answers = run_ranks(2, JOB, config=config, late_s=0.1, full_on=1)
    for message, _ in answers:
        assert message.startswith("CheckpointError: ") and "rank 1: No space left" in message
        assert "no checkpoint has been written yet" in message and "nothing is left of this one" in message
    assert checkpoints(config) == []
