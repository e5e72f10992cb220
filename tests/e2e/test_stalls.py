"""A rank hangs or is killed: all ranks end and say what they waited for, nothing is left alive, and the run goes on."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from oppo_megatron.cluster.rank_processes import rank_processes
from oppo_megatron.errors import EXIT_REQUEUE
from tests.e2e.started import fault, num_lines, rank_pids, start, still_there, struck, wait_until
from tests.e2e.test_resume_changed import whole_checkpoints
from tests.support.ppo import Workspace, deep, read_outcome, weight_distance
from tests.support.processes import marked, wait_for
from tests.support.ranks import run_mortal_ranks, run_ranks

STALL_S = 6.0  # a disk may well let a checkpoint wait for half of it
TWO_RANKS: dict[str, Any] = {
    "placement": {"mode": "disaggregated"}, "overlap.intra": True, "stall_deadline_s": STALL_S, "checkpoint": {"every_steps": 1},
}  # fmt: skip
AFTER_S = 15.0  # notes, answers, and what is left of the others


@pytest.mark.long
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
    assert "in run_ppo" in (Path(config["run_dir"]) / "stacks" / "rank-0.txt").read_text() and num_lines(config) == 6


@pytest.mark.long
def test_a_rank_killed_within_a_checkpoint_is_named_with_what_it_was_at(workspace: Workspace) -> None:
    told, seconds = struck(deep(workspace, "killed", steps=8, **TWO_RANKS), "checkpoint", 1, "killed")
    assert "rank 1 was ended by SIGKILL" in told and seconds < AFTER_S
    assert "rank 0 waited in vain for `checkpoint step-000002`" in told or "rank 0: last heard of in" in told, told


ROLES = {0: "generator", 1: "scorer", 2: "trainer"}
STRUCK = [(at, rank) for at in ("round", "scoring", "installation") for rank in ROLES if (at, rank) != ("installation", 1)]


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "stopped", "hangs"])
@pytest.mark.parametrize(("at", "rank"), [*STRUCK, ("update", 2)], ids=lambda part: ROLES.get(part, part))
def test_in_continuous_generation_the_other_ranks_name_what_they_waited_for(
    workspace: Workspace, at: str, rank: int, how: str
) -> None:
    apart = {"actor.train": {"ranks": "2"}, "overlap.continuous": {"lag_steps": 6}, "overlap.inter": True}
    grpo = {"algorithm": {"preset": "grpo"}, "critic": None, "rollout.group_size": 2, "overlap.chunk": 4}
    config = deep(workspace, f"{at}-{rank}-{how}", steps=8, **TWO_RANKS, **apart, **grpo)
    told, seconds = struck(config, at, rank, how)
    assert seconds < 2 * STALL_S + AFTER_S + 5, "the others decode on for a while before they wait"
    named = {"killed": "was ended by SIGKILL", "stopped": "did not answer", "hangs": "has not moved for"}[how]
    assert f"rank {rank} {named}" in told, told
    for other in ROLES.keys() - {rank}:
        stacks = Path(config["run_dir"]) / "stacks" / f"rank-{other}.txt"  # if the judge of stalls is the one that is stopped
        assert re.search(rf"rank {other} waited|rank {other}: last heard of in", told) or "step" in stacks.read_text(), told


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


TIMEOUT_S = 10.0


@pytest.mark.parametrize(("nth", "role"), [(2, "actor"), pytest.param(6, "critic", marks=pytest.mark.long)])
def test_every_other_rank_names_the_update_it_was_in(workspace: Workspace, nth: int, role: str) -> None:
    placement = {"mode": "colocated", "actor": {"pp": 2}}
    config = workspace.config(f"dead-{nth}-th", placement=placement, **{"runtime.timeout_s": TIMEOUT_S})
    answers = run_mortal_ranks(2, "tests.e2e.jobs:train_with_a_death_in_an_update", config=config, rank=1, nth=nth)
    assert answers[1] is None and answers[0] is not None
    kind, message, seconds = answers[0]
    assert kind == "StallError" and f"rank 0 waited in vain for `update {role}, step 1` (" in message, answers[0]
    assert ".cc" not in message and seconds < 2 * TIMEOUT_S + 20


def test_what_was_sent_to_a_slow_rank_outlives_the_round(workspace: Workspace) -> None:
    """A last stage waits for nothing at a round's end, or an evaluation's; the run equals one without a slow rank."""
    heldout = {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96, "max_rows": 3}
    evaluation = {"data": heldout, "metrics": [{"kind": "verifier", "name": "arithmetic"}]}
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


LEFT_S = 20
"""A busy machine is slow to end what was killed."""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark in the environment of all processes that the test starts, and of what they start."""
    monkeypatch.setenv("OPPO_TEST_KILLS", str(tmp_path))
    return f"OPPO_TEST_KILLS={tmp_path}"


def settings(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    own = {"steps": 3, "placement": {"mode": "disaggregated"}, "checkpoint": {"every_steps": 1}}
    return deep(workspace, name.replace(" ", "-"), **(own | changes))


def process_of(run: subprocess.Popen[str], victim: str) -> int:
    """Its process id as soon as both ranks exist; before them the fork server forks one process that ends at once."""
    if victim == "launcher":
        return run.pid
    ranks: list[psutil.Process] = []

    def both() -> bool:
        ranks[:] = rank_processes(psutil.Process(run.pid))
        return len(ranks) == 2

    wait_until(run, both)
    return ranks[-1].ppid() if victim == "fork server" else ranks[-1].pid


def assert_goes_on(config: dict[str, Any], mark: str, *overrides: str) -> None:
    run = start(config, "--resume", *overrides)
    _, told = run.communicate(timeout=400)
    assert run.returncode == 0, told
    wait_for(lambda: not marked(mark), LEFT_S)
    assert not (Path(config["run_dir"]) / "holder.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("moment", ["import", "meeting", "update", "checkpoint"])
@pytest.mark.parametrize("victim", ["launcher", "fork server", "rank"])
def test_nothing_outlives_one_that_is_killed(workspace: Workspace, mark: str, victim: str, moment: str) -> None:
    """One of the ranks stands still at that moment; at `import` they have just been forked."""
    config = settings(workspace, f"{victim}-{moment}")
    if moment != "import":
        fault(config, moment, 1, "hangs")
    run = start(config, module="tests.e2e.started")
    if moment != "import":
        wait_until(run, lambda: not (Path(config["run_dir"]) / "fault").exists())
    os.kill(process_of(run, victim), signal.SIGKILL)
    _, told = run.communicate(timeout=60)
    assert run.returncode == (-signal.SIGKILL if victim == "launcher" else 2), told
    wait_for(lambda: not marked(mark), LEFT_S)
    assert_goes_on(config, mark)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_before_there_is_anything_to_save(workspace: Workspace, mark: str, number: signal.Signals) -> None:
    config = settings(workspace, f"early-{number.name}")
    run = start(config)
    wait_until(run, lambda: len(marked(mark)) > 2)
    run.send_signal(number)
    _, told = run.communicate(timeout=60)
    assert run.returncode != 0, told
    wait_for(lambda: not marked(mark), LEFT_S)


@pytest.mark.long
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_hang_up_saves_and_the_fork_server_hears_no_signal(workspace: Workspace, mark: str, victim: str) -> None:
    config = settings(workspace, f"hang-up-{victim}", steps=99)
    run = start(config)
    wait_until(run, lambda: num_lines(config) >= 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(process_of(run, "fork server"), number)
    done = num_lines(config)
    wait_until(run, lambda: num_lines(config) > done)
    os.kill(process_of(run, victim), signal.SIGHUP)
    _, told = run.communicate(timeout=120)
    assert run.returncode == EXIT_REQUEUE and "saved; continue with" in told, told
    wait_for(lambda: not marked(mark), LEFT_S)
    assert_goes_on(config, mark, f"steps={num_lines(config) + 1}")


@pytest.mark.long
@pytest.mark.parametrize("how", ["terminal closed", "shell killed", "nohup"])
def test_a_terminal_that_is_closed_saves_the_run_in_it(workspace: Workspace, mark: str, how: str) -> None:
    config = settings(workspace, how, steps=3 if how == "nohup" else 99, **{"logging.console": "plain"})
    path = Path(config["run_dir"]).with_suffix(".yaml")
    start(config, "--dry-run").communicate(timeout=120)  # writes the file
    ours, theirs = os.openpty()
    command = f"{sys.executable} -m oppo_megatron train {path}"
    command = f"nohup {command} > /dev/null 2>&1" if how == "nohup" else command
    shell = subprocess.Popen(
        ["bash", "-c", f"{command}; true"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        cwd=Path.cwd(), preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    wait_for(lambda: num_lines(config) >= 1, 300)
    if how == "shell killed":
        shell.kill()
    else:
        os.close(ours)
    shell.wait(60)
    wait_for(lambda: not marked(mark), 300 if how == "nohup" else 60)
    if how == "nohup":
        assert num_lines(config) == 3
    else:
        assert "clock" in whole_checkpoints(config)[-1], "saved within a step"
        assert_goes_on(config, mark, f"steps={num_lines(config) + 1}")


CONFIG = Path(__file__).resolve().parents[2] / "examples" / "reliability" / "chaos.yaml"
KILLS = 5


@pytest.mark.long
def test_five_killed_ranks_leave_no_trace(tmp_path: Path) -> None:
    command = [str(CONFIG), "steps=8", "--prompt-tokens", "24", "--kills", str(KILLS), "--seed", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos", *command, "--out", str(tmp_path)], cwd=CONFIG.parents[2], capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "disturbed.log").read_text()[-2000:]
    assert "final weights, rollouts and metrics equal the undisturbed run's" in done.stdout
    result = json.loads((tmp_path / "chaos.json").read_text())
    assert len(result["kills"]) == KILLS and result["differences"] == []
    assert {kill["rank"] for kill in result["kills"]} == {0, 1}
    assert (tmp_path / "disturbed.log").read_text().count("was ended by SIGKILL") == KILLS
