"""Steps that guards find fault with: nothing is trained on any rank, the batch can be looked at again, or the run goes back."""

import json
import math
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.errors import DataError
from oppo_megatron.layout.placements import world_size
from oppo_megatron.train.inputs import read_inputs
from tests.support.configs import run_of
from tests.support.ppo import SHAPE, WITHOUT_CRITIC, Outcome, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks
from tools.replay import main as replay
from tools.replay import read_rejected

Capture = pytest.CaptureFixture[str]
DISAGGREGATED = {"mode": "disaggregated", "actor": {"tp": 2}, "scorer": {"tp": 1}}
REPLICAS = {"mode": "colocated", "actor": {"dp": 2}}
RATIO = {"ratio_max": 1.0001, "action": "skip"}


def breaking(name: str, good: int, **guards: Any) -> dict[str, Any]:
    part = {"kind": "python", "entry_point": "tests.e2e.rewards:breaks", "options": {"name": name, "good": good}}
    return {"reward": None, "rewards": [part], "guards": {"action": "skip", **guards}}


@pytest.fixture(scope="module")
def untrained(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(workspace.config("untrained", steps=2, **breaking("untrained", 0)))


def is_as_it_was(outcome: Outcome, untrained: Outcome) -> bool:
    return weight_distance(outcome.actor, untrained.actor) == weight_distance(outcome.critic, untrained.critic) == 0


def test_a_reward_that_is_no_number_trains_nothing(workspace: Workspace, untrained: Outcome) -> None:
    lines = untrained.metrics
    assert [line["step"] for line in lines] == [1, 2] and len(untrained.rollouts) == 12
    for line in lines:
        assert re.match(r"the score of row 0 is nan \(6 of 6 rows are not finite\)$", line["skipped"])
        assert line["reward_mean"] is None and "actor_loss" not in line and line["critic_loss"] is None
    kept = read_rejected(workspace.root / "runs" / "untrained" / "rejected" / "step-2.safetensors")
    assert kept.facts.step == 2 and kept.facts.policy_version == 0 and kept.scored.scores_B.isnan().all()
    second = [row for row in untrained.rollouts if row["step"] == 2]
    assert {r.seq_id: r.tokens for r in kept.batch} == {row["seq_id"]: row["tokens"] for row in second}


def test_training_goes_on_from_where_it_was(workspace: Workspace) -> None:
    one = run_ppo_ranks(workspace.config("one", steps=1, **breaking("one", 99)))
    two = run_ppo_ranks(workspace.config("two", steps=2, **breaking("two", 6)))
    assert [line["skipped"] is None for line in two.metrics] == [True, False] and is_as_it_was(two, one)


def test_too_many_skips_end_the_run(workspace: Workspace) -> None:
    with pytest.raises(AssertionError, match="NumericsError.*4 steps in a row were skipped, more than 3"):
        run_ppo_ranks(workspace.config("many", steps=5, **breaking("many", 0)))


def test_an_update_that_went_too_far_is_undone_on_all_ranks(workspace: Workspace, untrained: Outcome, capsys: Capture) -> None:
    """Actor and critic on ranks of their own: the ratio is the actor's to see, and the critic's update goes with it."""
    schedule = {"actor.optimizer.warmup_steps": 10}
    outcome = run_ppo_ranks(workspace.config("ratio", steps=2, placement=DISAGGREGATED, guards=RATIO, **schedule))
    assert all(re.match(r"ratio_max is .*, above guards.ratio_max", line["skipped"]) for line in outcome.metrics)
    assert all(line["critic_loss"] > 0 for line in outcome.metrics), "what was found out is told"
    assert is_as_it_was(outcome, untrained) and {version for row in outcome.rollouts for version in row["versions"]} == {0}
    path = workspace.root / "runs" / "ratio" / "rejected" / "step-1.safetensors"
    assert replay([str(path)]) == 0
    out = capsys.readouterr().out
    figures = dict(re.findall(r"^(\w+) +(?:\S+) +(\S+)$", out, re.MULTILINE))
    names = ("kl_mean", "advantage_std", "actor_loss", "ratio_max", "ess", "grad_norm", "critic_loss", "lr", "entropy")
    recorded = outcome.metrics[0] | read_rejected(path).facts.figures
    for name in names:
        assert float(figures[name]) == pytest.approx(recorded[name], rel=2e-3, abs=2e-5), name
    assert "the replay: ratio_max is" in out
    assert replay([str(path.with_name("step-2.safetensors"))]) == 0
    (rates,) = re.findall(r"^lr +(\S+) +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert rates[0] == rates[1], "the step that was skipped before has made no update"
    assert replay([str(path), "guards.ratio_max=null", "actor.optimizer.lr=1e-6"]) == 0
    assert "the replay: within all guards" in capsys.readouterr().out


def test_a_replay_knows_the_optimizer_steps_of_a_run(workspace: Workspace, capsys: Capture) -> None:
    schedule = {"actor.optimizer.warmup_steps": 20, "critic.optimizer.warmup_steps": 20, "checkpoint.every_steps": 1}
    config = workspace.config("fewer", steps=1, **schedule)
    run_ppo_ranks(config)
    config["checkpoint"]["resume"] = True
    changed = {"steps": 2, "guards": RATIO, "ppo": config["ppo"] | {"minibatches": 1}}
    outcome = run_ppo_ranks(config | changed)
    assert [line["skipped"] is None for line in outcome.metrics] == [True, False]
    assert replay([str(Path(config["run_dir"]) / "rejected" / "step-2.safetensors")]) == 0
    (rates,) = re.findall(r"^lr +(\S+) +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert rates[0] == rates[1], "four optimizer steps were made before"


def test_a_gradient_that_is_no_number_takes_the_minibatches_before_it_back(workspace: Workspace, untrained: Outcome) -> None:
    ruin = {"actor.optimizer": {"lr": 1e30}, "placement": REPLICAS, "guards": {"action": "skip"}}
    outcome = run_ppo_ranks(workspace.config("ruin", steps=2, **ruin))
    assert all("not a finite number" in line["skipped"] for line in outcome.metrics) and is_as_it_was(outcome, untrained)


def test_a_breach_that_stops_says_what_to_do(workspace: Workspace) -> None:
    says = r"NumericsError.*ratio_max is .*, above guards.ratio_max 1.0001: lower the learning rate.*tools.replay"
    with pytest.raises(AssertionError, match=says):
        run_ppo_ranks(workspace.config("stop", steps=1, guards={"ratio_max": 1.0001}))
    assert read_rejected(workspace.root / "runs" / "stop" / "rejected" / "step-1.jsonl").facts.step == 1


def test_a_damaged_batch_is_an_error(workspace: Workspace, untrained: Outcome, tmp_path: Path) -> None:
    source = workspace.root / "runs" / "untrained" / "rejected"
    path = tmp_path / "step-1.safetensors"
    lines, tensors = (source / "step-1.jsonl").read_bytes(), load_file(source / "step-1.safetensors")

    def refused(text: bytes, held: dict[str, torch.Tensor] | bytes) -> None:
        path.with_suffix(".jsonl").write_bytes(text)
        if isinstance(held, bytes):
            path.write_bytes(held)
        else:
            save_file(held, path)
        with pytest.raises(DataError, match="not a complete rejected batch|not JSON"):
            read_rejected(path)

    whole = (source / "step-1.safetensors").read_bytes()
    refused(lines, whole[:-5])
    refused(lines, b"")
    refused(lines[:-3], whole)
    refused(b"{}\n", whole)
    refused(lines.replace(b'"step":', b'"stop":', 1), whole)
    for name, tensor in tensors.items():
        refused(lines, {k: v for k, v in tensors.items() if k != name})
        refused(lines, tensors | {name: tensor[:-1]})
        refused(lines, tensors | {name: tensor.to(torch.float16)})
    refused(lines, tensors | {"lengths_B": -tensors["lengths_B"]})
    refused(lines, tensors | {"tokens_T": -tensors["tokens_T"]})
    head = json.loads(lines.partition(b"\n")[0])
    for wrong in (
        {"step": 0}, {"step": 5, "total_steps": 2}, {"seed": -1}, {"kl_coefficient": math.nan}, {"config": "\ud800"},
        {"figures": {"ess": "x"}},
    ):  # fmt: skip
        refused(json.dumps(head | wrong).encode() + b"\n" + lines.partition(b"\n")[2], whole)
    refused(b"[" * 100_000 + b"\n" + lines, whole)


def test_a_batch_that_finds_no_place_is_the_systems_error(workspace: Workspace, untrained: Outcome, tmp_path: Path) -> None:
    kept = read_rejected(workspace.root / "runs" / "untrained" / "rejected" / "step-1.safetensors")
    kept = replace(kept, facts=replace(kept.facts, config="", figures={}))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, most[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            kept.write(tmp_path / "step-1.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.jsonl"]


def test_a_batch_is_replayed_with_models_that_fit_it(workspace: Workspace, untrained: Outcome, capsys: Capture) -> None:
    path = workspace.root / "runs" / "untrained" / "rejected" / "step-1.safetensors"
    for overrides, says in (
        (["critic.init.vocab_size=50"], "the batch has token id .*, but critic has 50"),
        (["actor.init.hidden_size=33"], "actor: hidden_size 33 does not divide"),
        (["rollout.max_response_tokens=1", "data.max_prompt_tokens=2"], "a sequence of .* allow 3"),
        (["ppo.minibatches=7"], "ppo.minibatches is 7, but the batch has 6"),
    ):
        assert replay([str(path), *overrides]) == 2 and re.search(says, capsys.readouterr().err)


def test_a_step_that_a_guard_takes_back_can_be_replayed(workspace: Workspace, capsys: Capture) -> None:
    config = workspace.config("guard", **WITHOUT_CRITIC, guards=RATIO, steps=2)
    assert all(line["skipped"] for line in run_ppo_ranks(config).metrics)
    path = Path(config["run_dir"]) / "rejected" / "step-1.safetensors"
    assert read_rejected(path).scored.values_T is None
    assert replay([str(path)]) == 0
    out = capsys.readouterr().out
    assert "the replay: ratio_max is" in out and "critic_loss" not in out
    with_critic = ["algorithm.preset=ppo", f"critic.init={json.dumps(SHAPE)}"]
    assert replay([str(path), *with_critic]) == 2
    assert "algorithm.baseline is none, but algorithm.preset ppo is what trains a critic" in capsys.readouterr().err
    assert replay([str(path), *with_critic, "algorithm.baseline=critic"]) == 2
    assert "the batch has no values, but algorithm.preset ppo updates a critic" in capsys.readouterr().err


BATCH = 6
CARRIED = {"overlap.inter": True, "overlap.intra": True, "overlap.delta": {"rule": "fixed", "initial": 3, "max": 4}}
APART = {"placement": {"mode": "disaggregated"}}


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
    seen = run_ranks(world_size(run_of(config)), "tests.e2e.jobs:train_through_rollbacks", config=config)
    folder = Path(config["run_dir"])
    lines = [json.loads(line) for line in (folder / "rollbacks.jsonl").read_text().splitlines()]
    return read_outcome(folder), seen, lines


@pytest.mark.parametrize("layout", [pytest.param({}, marks=pytest.mark.long), APART], ids=["one rank", "actor | scorers"])
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
    config = workspace.config("often", steps=1, checkpoint={"every_steps": 1}, **APART)
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
    assert "a line that is not a rollback" in run_ranks(2, "tests.e2e.jobs:train_error", config=config)[0]


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
    assert "the run should go back to a checkpoint, but has none; lower checkpoint.every_steps" in error
    assert "the score of row" in error and "tools.replay" in error
