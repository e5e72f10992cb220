"""A run continued with other settings, given more steps, or told to stop by a signal: the run is the undisturbed one."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from oppo_megatron.cli.main import main
from oppo_megatron.errors import EXIT_REQUEUE, INTERRUPTED
from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.rundir.manifest import find_damage, read_manifest
from oppo_megatron.train.saving.preemption import Preemption
from tests.e2e.started import num_lines, rank_pids, start, still_there, wait_until
from tests.e2e.test_resume import CARRIED, assert_bit_equal, checkpoints, rewound
from tests.support.ppo import STEADY_ADAM, Outcome, Workspace, deep, read_outcome, run_ppo_ranks, weight_distance
from tests.support.processes import own_lines
from tests.support.ranks import run_ranks

Capture = pytest.CaptureFixture[str]
CHANGES = {
    "rollout.batch_size": 8, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 4},
    "actor.optimizer": STEADY_ADAM | {"decay": "linear"}, "logging": {"console": "plain", "rollouts": True},
    "checkpoint": {"every_steps": 1, "keep": 9},
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(workspace: Workspace) -> dict[str, Any]:
    config = deep(workspace, "ended", **CARRIED | CHANGES)
    run_ppo_ranks(config)
    return config


@pytest.fixture
def at_step_3(ended: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return rewound(ended, tmp_path.name)


def typed(config: dict[str, Any], *overrides: str) -> int:
    path = Path(config["run_dir"]).with_suffix(".yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return main(["train", str(path), *overrides, "--resume"])


def linear(lr: float, step: int, steps: int) -> float:
    return lr * (1 - (4 * step - 1) / (4 * steps))


def batch_sizes(config: dict[str, Any]) -> list[int]:
    rows = [json.loads(line) for line in (Path(config["run_dir"]) / "rollouts.jsonl").read_text().splitlines()]
    return [sum(row["step"] == step for row in rows) for step in range(1, max(row["step"] for row in rows) + 1)]


@pytest.mark.parametrize(("overrides", "sizes"), [
    (["steps=4", "rollout.batch_size=16"], [8, 8, 8, 16]), (["rollout.batch_size=4"], [8, 8, 8, 4]), (["steps=6"], [8] * 6),
    (["steps=3"], [8] * 3),
], ids=lambda each: " ".join(map(str, each)))  # fmt: skip
def test_steps_are_steps(at_step_3: dict[str, Any], overrides: list[str], sizes: list[int], capsys: Capture) -> None:
    assert typed(at_step_3, *overrides) == 0
    told = capsys.readouterr().out
    assert "continued from checkpoint step-000003" in told and "after 3 steps" in told
    for override in overrides:
        key, _, value = override.partition("=")
        if (key, value) != ("steps", "4"):
            assert f"changed: {key}: {4 if key == 'steps' else 8} -> {value}" in told
    assert batch_sizes(at_step_3) == sizes
    assert json.loads((Path(at_step_3["run_dir"]) / "summary.json").read_text())["steps"] == len(sizes)
    assert max(row["deferrals"] for row in read_outcome(Path(at_step_3["run_dir"])).rollouts) <= 4


def test_fewer_steps_than_are_done_are_refused_and_nothing_is_lost(at_step_3: dict[str, Any], capsys: Capture) -> None:
    run = Path(at_step_3["run_dir"])
    before = (run / "metrics.jsonl").read_bytes()
    assert typed(at_step_3, "steps=2") == 2
    assert "steps is 2, but the checkpoint was saved after step 3" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before and not (run / "summary.json").exists()


def test_a_finished_run_is_given_more_steps(ended: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    config = ended | {"run_dir": str(tmp_path / "run")}
    run = Path(config["run_dir"])
    shutil.copytree(ended["run_dir"], run)
    weights = (run / "weights" / "actor" / "model.safetensors").read_bytes()
    assert typed(config, "actor.optimizer.lr=0.001") == 2
    assert "has ended after 4: there is nothing to train; set steps to more than 4" in capsys.readouterr().err
    assert typed(config, "steps=6", "actor.optimizer.lr=0.001", "ppo.kl.coefficient=0.5") == 0
    told = capsys.readouterr().out
    for change in ("steps: 4 -> 6", "actor.optimizer.lr: 0.002 -> 0.001", "ppo.kl.coefficient: 0.05 -> 0.5"):
        assert f"changed: {change}" in told
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    schedule = [linear(0.002, step, 4) for step in (1, 2, 3, 4)] + [linear(0.001, step, 6) for step in (5, 6)]
    assert [line["lr"] for line in lines] == pytest.approx(schedule), "it goes on at its step, over the new length"
    assert [line["kl_coefficient"] for line in lines] == [0.05] * 4 + [0.5] * 2
    aside = run / "ended-step-000004"
    assert (aside / "weights" / "actor" / "model.safetensors").read_bytes() == weights
    assert json.loads((aside / "summary.json").read_text())["steps"] == 4
    assert (run / "weights" / "actor" / "model.safetensors").read_bytes() != weights


def test_another_actor_is_the_reference_only(ended: dict[str, Any], at_step_3: dict[str, Any], tmp_path: Path) -> None:
    other = Path(ended["run_dir"]) / "weights" / "actor"
    twin = at_step_3 | {"run_dir": str(tmp_path / "twin")}
    shutil.copytree(at_step_3["run_dir"], twin["run_dir"])
    assert typed(at_step_3, f"actor.checkpoint={other}", "actor.init=null") == 0
    assert typed(twin, f"reference.checkpoint={other}") == 0
    plain, ours, theirs = (read_outcome(Path(config["run_dir"])) for config in (ended, at_step_3, twin))
    assert_bit_equal(ours, theirs)
    assert ours.tokens() == plain.tokens() and ours.batches() == plain.batches(), "the policy is the checkpoint's"
    assert max(row["deferrals"] for row in ours.rollouts if row["step"] == 4) > 0, "nothing was in flight"
    assert abs(ours.metrics[3]["kl_mean"] - plain.metrics[3]["kl_mean"]) > 1e-3, "the reference is another"


@pytest.mark.long
def test_a_run_that_ended_after_the_same_step_again_is_kept_beside_the_first(ended: dict[str, Any], tmp_path: Path) -> None:
    """It was given a step more, which was lost; then it was ended as before, and given the step again."""
    config = ended | {"run_dir": str(tmp_path / "run")}
    run = Path(config["run_dir"])
    shutil.copytree(ended["run_dir"], run)
    assert typed(config, "steps=5") == 0
    shutil.rmtree(run / "checkpoints" / "step-000005")
    (run / "summary.json").unlink()
    assert typed(config, "steps=4") == typed(config, "steps=5") == 0
    for name in ("ended-step-000004", "ended-step-000004-2"):
        assert json.loads((run / name / "summary.json").read_text())["steps"] == 4
        assert (run / name / "weights" / "actor").is_dir()


def test_passes_over_the_prompts_end_a_run_and_more_of_them_go_on(workspace: Workspace, capsys: Capture) -> None:
    """64 prompts in batches of 24: fewer passes than have begun, and no more for a run that has ended, are refused."""
    changes = CHANGES | {"steps": None, "epochs": 1, "rollout.batch_size": 24, "rollout.max_response_tokens": 10}
    config = deep(workspace, "passes", **CARRIED | changes)
    run_ppo_ranks(config)
    run = Path(config["run_dir"])
    assert typed(config, "actor.optimizer.lr=0.001") == 2
    assert "ended after 3 steps, and with these settings there is nothing more to train" in capsys.readouterr().err
    assert run.joinpath("weights").is_dir() and not list(run.glob("ended-*")) and typed(config, "epochs=2") == 0
    assert batch_sizes(config) == [24, 24, 16, 24, 24, 16]
    (run / "summary.json").unlink()
    assert typed(config, "epochs=1") == 2 and "set epochs to 2 or more" in capsys.readouterr().err


def test_checkpoints_come_by_the_clock_and_at_the_end_unless_that_is_not_wanted(workspace: Workspace) -> None:
    every = ["step-000001", "step-000002", "step-000003"]
    for name, changes, expected in (
        ("final", {"steps": 2}, ["step-000002"]),
        ("clock", {"steps": 3, "checkpoint": {"every_minutes": 1e-9, "keep": 9}}, every),
    ):
        config = deep(workspace, name, **changes)
        run_ppo_ranks(config)
        assert checkpoints(config) == expected
    config = deep(workspace, "no-final", **{"steps": 1, "checkpoint.final": False})
    run_ppo_ranks(config)
    assert not (Path(config["run_dir"]) / "checkpoints").exists() and (Path(config["run_dir"]) / "weights").exists()
    assert typed(config, "steps=2") == 2


def test_a_folder_without_a_run_is_told_of(workspace: Workspace, capsys: Capture) -> None:
    config = deep(workspace, "anew", **{"steps": 1, "logging.console": "plain"})
    assert typed(config) == 0 and "has no checkpoint to continue from: a new run begins" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(workspace: Workspace) -> None:
    """All processes of the group get the signal, as from a terminal."""
    changes = CARRIED | {"steps": 12, "placement": {"mode": "disaggregated"}}
    config = deep(workspace, "interrupted", **changes)
    run = start(config, new_session=True)
    wait_until(run, lambda: num_lines(config) >= 1)
    os.killpg(run.pid, signal.SIGINT)
    _, told = run.communicate(timeout=240)
    assert run.returncode == EXIT_REQUEUE, told
    lines = own_lines(told)
    assert lines[0].startswith("interrupted: the run saves what it has trained") and len(lines) == 2, told
    assert lines[1].startswith("oppo train: saved; continue with: oppo train ") and lines[1].endswith("--resume")
    assert "Traceback" not in told
    config["checkpoint"] = {"resume": True}
    plain: Outcome = run_ppo_ranks(deep(workspace, "uninterrupted", **changes))
    assert_bit_equal(run_ppo_ranks(config), plain)


STEPS = 16


@pytest.mark.long
def test_a_run_that_is_told_to_stop_and_a_run_whose_rank_is_killed_end_as_if_nothing_had_been(workspace: Workspace) -> None:
    changes: dict[str, Any] = {
        "steps": STEPS, "overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 4},
        "checkpoint": {"every_steps": 4, "keep_best": True},
    }  # fmt: skip
    config = deep(workspace, "preempted", **changes)

    run = start(config, "--max-restarts", "1")
    wait_until(run, lambda: num_lines(config) >= 2)
    run.send_signal(signal.SIGTERM)
    assert run.wait(240) == EXIT_REQUEUE, run.communicate()

    run = start(config, "--resume", "--max-restarts", "1")
    wait_until(run, lambda: num_lines(config) >= 6)
    os.kill(rank_pids(config)[0], signal.SIGKILL)
    _, told = run.communicate(timeout=400)
    assert run.returncode == 0 and "was ended by SIGKILL" in told and "0 of 1 restarts left" not in told, told

    outcome, plain = read_outcome(Path(config["run_dir"])), run_ppo_ranks(deep(workspace, "plain", **changes))
    assert [line["step"] for line in outcome.metrics] == list(range(1, STEPS + 1)) and outcome.rollouts == plain.rollouts
    assert weight_distance(outcome.actor, plain.actor) == weight_distance(outcome.critic, plain.critic) == 0.0


def whole_checkpoints(config: dict[str, Any]) -> list[str]:
    store = CheckpointStore(Path(config["run_dir"]) / "checkpoints")
    for position in store.positions():
        folder = store.folder(position)
        assert find_damage(folder, read_manifest(folder), 0, 1) is None
    return [position.name for position in store.positions()]


@pytest.mark.long
def test_a_second_sigterm_ends_a_run_within_a_save_and_a_save_that_is_late_is_given_up(workspace: Workspace) -> None:
    changes = {"steps": 99, "placement": {"mode": "disaggregated"}, "checkpoint": {"every_steps": 2}}
    config = deep(workspace, "slow", **changes, preempt_deadline_s=3.0)
    run_dir = Path(config["run_dir"])

    run = start(config, module="tests.e2e.started")
    wait_until(run, lambda: list((run_dir / "checkpoints").glob("step-*")) != [])
    (run_dir / "slow").touch()
    run.send_signal(signal.SIGTERM)
    wait_until(run, (run_dir / "saving").exists)
    run.send_signal(signal.SIGTERM)
    assert run.wait(3) == 143
    pids, until = rank_pids(config), time.monotonic() + 5
    while still_there(pids):
        assert time.monotonic() < until
    before = whole_checkpoints(config)
    assert before and "clock" not in before[-1]

    for name in ("slow", "saving"):
        (run_dir / name).unlink()
    config["checkpoint"]["resume"], config["placement"] = True, {"mode": "single"}
    written = num_lines(config)
    run = start(config, module="tests.e2e.started")
    wait_until(run, lambda: num_lines(config) >= written + 2)
    (run_dir / "slow").touch()
    run.send_signal(signal.SIGTERM)
    told = time.monotonic()
    _, said = run.communicate(timeout=30)
    assert run.returncode == EXIT_REQUEUE and time.monotonic() - told < 3 + 10, said
    assert "nothing was saved within preempt_deadline_s=3" in said
    assert whole_checkpoints(config)[-1] >= before[-1] and not still_there(rank_pids(config))


def test_sigterm_at_random_moments_to_either_rank(workspace: Workspace) -> None:
    draw = random.Random(7)
    changes: dict[str, Any] = CARRIED | {"steps": 14, "placement": {"mode": "disaggregated"}}
    plain = run_ppo_ranks(deep(workspace, "plain-moments", **changes))
    step_s = median(line["step_s"] for line in plain.metrics)  # a machine may have stood still in one of them
    config = deep(workspace, "moments", **changes)
    for number in range(3):
        after_s = draw.uniform(0, 3 * step_s)
        job = "tests.e2e.jobs:train_with_sigterm"
        assert run_ranks(2, job, config=config, rank=number % 2, after_s=after_s) == [False, False], after_s
        config["checkpoint"] = {"resume": True}
        assert whole_checkpoints(config)
    assert_bit_equal(run_ppo_ranks(config), plain)


@pytest.mark.long
def test_ranks_under_torchrun_save_on_ctrl_c(workspace: Workspace) -> None:
    """A terminal sends it to torchrun and to both ranks, and torchrun passes it on; its own exit code is 1."""
    changes: dict[str, Any] = CARRIED | {"steps": 14, "placement": {"mode": "disaggregated"}}
    config = deep(workspace, "ctrl-c", **changes)
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2 -m oppo_megatron train"
    run = start(config, module=torchrun, new_session=True)
    wait_until(run, lambda: num_lines(config) >= 2)
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 1 and INTERRUPTED in said and num_lines(config) < 14, said
    assert len(whole_checkpoints(config)) == 1 and not still_there(rank_pids(config))
    config["checkpoint"] = {"resume": True}
    assert_bit_equal(run_ppo_ranks(config), run_ppo_ranks(deep(workspace, "plain-ctrl-c", **changes)))


def test_a_rank_that_is_told_while_ranks_agree_does_what_they_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have not heard of it: with a decision of its own the rank would save while they go on."""
    preemption = Preemption()
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with monkeypatch.context() as told_meanwhile:
        told_meanwhile.setattr(dist, "all_reduce", lambda *args, **kwargs: preemption.ask())
        assert not preemption.agreed(None)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    assert preemption.agreed(None)
    preemption.saved()
