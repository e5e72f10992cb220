"""A rank that hangs: all ranks end within the deadline, say who did not move and what they waited for, and the run goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.started import num_lines, rank_pids, start, still_there, struck, wait_until
from tests.support.layouts import deep
from tests.support.ppo import Workspace

STALL_S = 6.0  # a disk may well let a checkpoint wait for half of it
TWO_RANKS: dict[str, Any] = {
    "placement": {"mode": "disaggregated"},
    "overlap.intra": True,
    "stall_deadline_s": STALL_S,
    "checkpoint": {"every_steps": 1},
}
AFTER_S = 15.0  # notes, answers, and what is left of the others


def test_a_stopped_scorer_is_named_and_ended_and_the_run_goes_on(workspace: Workspace) -> None:
    """SIGUSR2 before that has the other rank write its stacks, and disturbs nothing."""
    config = deep(workspace, "stopped", steps=6, **TWO_RANKS)
    run = start(config, "--max-restarts", "1")
    wait_until(run, lambda: num_lines(config) >= 1)
    pids = rank_pids(config)
    os.kill(pids[0], signal.SIGUSR2)
    seen = num_lines(config)
    wait_until(run, lambda: num_lines(config) > seen)
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(run, lambda: not still_there(pids), STALL_S + AFTER_S)
    _, told = run.communicate(timeout=400)
    assert run.returncode == 0, told
    assert "rank 1 did not answer" in told and "it last said, " in told and "; rank 0 " in told, told
    assert "starting again, 1 of 1 restarts left" in told
    asked, _, after = told.partition("the run has stalled")
    assert "(most recent call first)" in asked and "in run_ppo" in asked and "in run_ppo" not in after, told
    assert "in run_ppo" in (Path(config["run_dir"]) / "stacks" / "rank-0.txt").read_text()
    assert num_lines(config) == 6


@pytest.mark.long
def test_a_rank_killed_within_a_checkpoint_is_named_with_what_it_was_at(workspace: Workspace) -> None:
    """So is what the other waited for, or was at."""
    config = deep(workspace, "killed", steps=8, **TWO_RANKS)
    told, seconds = struck(config, "checkpoint", 1, "killed")
    assert "rank 1 was ended by SIGKILL" in told and seconds < AFTER_S
    assert "rank 0 waited in vain for `checkpoint step-000002`" in told or "rank 0: last heard of in" in told, told


@pytest.mark.parametrize("how", ["asleep", pytest.param("interpreter", marks=pytest.mark.long)])
def test_a_reward_function_that_never_returns_is_named(workspace: Workspace, how: str) -> None:
    """`interpreter`: in a call that lets no other thread run, so that not even the rank's watchdog can speak."""
    hangs = {"kind": "python", "entry_point": "tests.e2e.rewards:hangs", "options": {"after": 8, "how": how}}
    config = deep(workspace, f"hangs-{how}", steps=8, **TWO_RANKS, rewards=[{"kind": "model"}, hangs])
    run = start(config)
    wait_until(run, lambda: num_lines(config) >= 1)
    started, pids = time.monotonic(), rank_pids(config)
    _, told = run.communicate(timeout=60)
    assert run.returncode == 2, told
    assert time.monotonic() - started < STALL_S + AFTER_S + 5, "a step, the deadline, and the end"
    if how == "asleep":
        assert "rank 1 has not moved for" in told and "send scorer, step 2, reward of sequence 8; rank 0 waited" in told, told
        assert "in hangs" in (Path(config["run_dir"]) / "stacks" / "rank-1.txt").read_text()
    else:
        assert "rank 1 did not answer" in told and "; rank 0 waited" in told, told
    assert not still_there(pids)
