"""`oppo train` under signals: SIGTERM saves and asks to be started again, a killed rank is replaced; the run is the same."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

from oppo_megatron.errors import EXIT_REQUEUE, INTERRUPTED
from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.rundir.manifest import find_damage, read_manifest
from oppo_megatron.train.saving.preemption import Preemption
from tests.e2e.started import num_lines, rank_pids, start, still_there, wait_until
from tests.e2e.test_resume import CARRIED, assert_bit_equal
from tests.support.layouts import deep
from tests.support.ppo import Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks

STEPS = 16


def stopped_killed_and_undisturbed(workspace: Workspace, *options: str) -> str:
    changes: dict[str, Any] = {
        "steps": STEPS,
        "overlap.intra": True,
        "overlap.inter": True,
        "overlap.delta": {"rule": "fixed", "initial": 2, "max": 4},
        "checkpoint": {"every_steps": 4, "keep_best": True},
    }
    config = deep(workspace, "preempted", **changes)

    run = start(config, "--max-restarts", "1", *options)
    wait_until(run, lambda: num_lines(config) >= 2)
    run.send_signal(signal.SIGTERM)
    assert run.wait(240) == EXIT_REQUEUE, run.communicate()

    run = start(config, "--resume", "--max-restarts", "1", *options)
    wait_until(run, lambda: num_lines(config) >= 6)
    os.kill(rank_pids(config)[0], signal.SIGKILL)
    _, told = run.communicate(timeout=400)
    assert run.returncode == 0 and "was ended by SIGKILL" in told and "0 of 1 restarts left" not in told, told

    outcome, plain = read_outcome(Path(config["run_dir"])), run_ppo_ranks(deep(workspace, "plain", **changes))
    assert [line["step"] for line in outcome.metrics] == list(range(1, STEPS + 1))
    assert outcome.rollouts == plain.rollouts
    assert weight_distance(outcome.actor, plain.actor) == weight_distance(outcome.critic, plain.critic) == 0.0
    return told


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_and_a_run_whose_rank_is_killed_end_as_if_nothing_had_been(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    stopped_killed_and_undisturbed(Workspace.create(tmp_path_factory.mktemp("preemption")))


@pytest.mark.long
def test_a_rank_that_cannot_give_up_its_save_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A stopped one: 8 s after `preempt_deadline_s` it is ended, with the run, which can go on."""
    workspace = Workspace.create(tmp_path_factory.mktemp("stopped"))
    config = deep(workspace, "stopped", steps=99, placement={"mode": "disaggregated"}, preempt_deadline_s=1.0)
    run = start(config)
    wait_until(run, lambda: num_lines(config) >= 1)
    pids = rank_pids(config)
    os.kill(pids[1], signal.SIGSTOP)
    run.send_signal(signal.SIGTERM)
    told = time.monotonic()
    _, said = run.communicate(timeout=60)
    assert run.returncode == EXIT_REQUEUE and not still_there(pids), said
    assert 1 + 8 <= time.monotonic() - told < 25
    assert "nothing was saved within preempt_deadline_s=1" in said


def whole_checkpoints(config: dict[str, Any]) -> list[str]:
    store = CheckpointStore(Path(config["run_dir"]) / "checkpoints")
    for position in store.positions():
        folder = store.folder(position)
        assert find_damage(folder, read_manifest(folder), 0, 1) is None
    return [position.name for position in store.positions()]


@pytest.mark.long
def test_a_second_sigterm_ends_a_run_within_a_save_and_a_save_that_is_late_is_given_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workspace = Workspace.create(tmp_path_factory.mktemp("slow-saves"))
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


def test_sigterm_at_random_moments_to_either_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    draw = random.Random(7)
    workspace = Workspace.create(tmp_path_factory.mktemp("moments"))
    changes: dict[str, Any] = CARRIED | {"steps": 14, "placement": {"mode": "disaggregated"}}
    plain = run_ppo_ranks(deep(workspace, "plain", **changes))
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
def test_ranks_under_torchrun_save_on_ctrl_c(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A terminal sends it to torchrun and to both ranks, and torchrun passes it on; its own exit code is 1."""
    workspace = Workspace.create(tmp_path_factory.mktemp("torchrun"))
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
    assert_bit_equal(run_ppo_ranks(config), run_ppo_ranks(deep(workspace, "plain", **changes)))


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
