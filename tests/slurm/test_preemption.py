"""Jobs of a real Slurm cluster, stopped by a signal, requeued, and finished with the same weights (`make test-slurm`)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm.cluster import Cluster, missing, running_cluster
from tests.support.ppo import Outcome, Workspace, deep, read_outcome, run_ppo_ranks, weight_distance
from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12
CLUSTER_ENV = """
OPPO_COMMAND=({python} -m oppo_megatron)
MASTER_ADDR=127.0.0.1 # the nodes' names are known to Slurm alone
OPPO_LOG_DIR={root}/logs
setup_rank() {{
    export PYTHONPATH={repository}${{PYTHONPATH:+:$PYTHONPATH}} OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
}}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}; on Debian: apt install slurm-wlm munge"),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace.create(tmp_path_factory.mktemp("slurm"))
    settings = CLUSTER_ENV.format(python=sys.executable, root=workspace.root, repository=ROOT)
    (workspace.root / "cluster.env").write_text(settings)
    return workspace


@pytest.fixture(scope="module")
def cluster(workspace: Workspace) -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


def settings(workspace: Workspace, name: str) -> dict[str, Any]:
    return deep(workspace, name, **{
        "steps": STEPS, "placement": {"mode": "disaggregated"}, "overlap.intra": True, "overlap.inter": True,
        "overlap.delta": {"rule": "fixed", "initial": 2, "max": 4}, "runtime.device": "cpu",
    })  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(settings(workspace, "undisturbed"))


class Job:
    def __init__(self, cluster: Cluster, workspace: Workspace, name: str, *command: str | Path):
        self.cluster, self.workspace, self.name = cluster, workspace, name
        self.run_dir = workspace.root / "runs" / name
        environment = cluster.environment | {"OPPO_CLUSTER_ENV": str(workspace.root / "cluster.env")}
        told = subprocess.run(
            ["sbatch", "--parsable", *map(str, command)], env=environment, cwd=workspace.root, text=True, capture_output=True,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        self.number = told.stdout.strip()

    def log(self) -> str:
        logs = [*self.workspace.root.glob("*.log"), *sorted((self.workspace.root / "logs").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in logs)

    def wait_for_steps(self, count: int) -> None:
        path, until = self.run_dir / "metrics.jsonl", time.monotonic() + 60
        while not path.exists() or len(path.read_text().splitlines()) < count:
            assert time.monotonic() < until, f"{self.cluster.job(self.number)}\n{self.log()}"
            time.sleep(0.05)

    def tell_to_stop(self) -> None:
        """Sends the signal that --signal=B:USR1@600 sends 600 seconds before the time limit."""
        self.cluster.call("scancel", "--batch", "--signal=USR1", self.number)

    def wait_until_finished(self) -> None:
        until = time.monotonic() + 90
        while (state := self.cluster.job(self.number)["JobState"]) != "COMPLETED":
            assert time.monotonic() < until and state in ("RUNNING", "PENDING", "COMPLETING", "REQUEUED"), (
                f"{self.cluster.job(self.number)}\n{self.log()}"
            )
            self.nudge()

    def pid(self, rank: int) -> int:
        return int(json.loads((self.run_dir / "hosts.json").read_text())["ranks"][rank]["pid"])

    def wait_for_a_restart(self) -> None:
        """Wait until the job, which was told to stop, runs again and has come a step further."""
        before, until = self.pid(0), time.monotonic() + 60
        while self.pid(0) == before:
            assert time.monotonic() < until, f"{self.cluster.job(self.number)}\n{self.log()}"
            self.nudge()
        self.wait_for_steps(1 + len((self.run_dir / "metrics.jsonl").read_text().splitlines()))

    def nudge(self) -> None:
        """Slurm plans heterogeneous jobs anew when something has changed, which here nothing else does."""
        self.cluster.call("scontrol", "update", "PartitionName=test", "State=UP")
        time.sleep(0.5)


def write_config(workspace: Workspace, name: str) -> Path:
    path = workspace.root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings(workspace, name)))
    return path


def assert_requeued_to_the_same_end(job: Job, undisturbed: Outcome, restarts: int) -> None:
    assert job.cluster.job(job.number)["Restarts"] == str(restarts), job.log()
    outcome = read_outcome(job.run_dir)
    assert [line["step"] for line in outcome.metrics] == list(range(1, STEPS + 1))
    assert outcome.rollouts == undisturbed.rollouts
    assert weight_distance(outcome.actor, undisturbed.actor) == 0.0
    assert weight_distance(outcome.critic, undisturbed.critic) == 0.0
    ranks = json.loads((job.run_dir / "hosts.json").read_text())["ranks"]
    assert [rank["node"] for rank in ranks] == ["0", "1"]
    log = (job.workspace.root / f"{job.name}_{job.number}.log").read_text()
    assert "told to stop" in log and "stopped: requeued, restart 1 of at most" in log and "finished" in log


def test_a_job_is_told_to_stop_requeued_and_finishes_as_if_nothing_had_been(
    cluster: Cluster, workspace: Workspace, undisturbed: Outcome
) -> None:
    """The ready script, its #SBATCH lines overruled on sbatch's command line."""
    config = write_config(workspace, "alike")
    # The script's --signal comes ten minutes before the end.
    nodes = ["--job-name=alike", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=30"]
    job = Job(cluster, workspace, "alike", *nodes, ROOT / "launch/slurm/train.sbatch", config)
    job.wait_for_steps(2)
    job.tell_to_stop()
    job.wait_until_finished()
    assert_requeued_to_the_same_end(job, undisturbed, 1)
    logs = {path.name for path in (workspace.root / "logs").glob("alike_*.log")}
    assert logs == {f"alike_{job.number}_r{restart}_{task}.log" for restart in (0, 1) for task in (0, 1)}

    again = Job(cluster, workspace, "alike", *nodes, ROOT / "launch/slurm/train.sbatch", config)
    again.wait_until_finished()
    assert "finished already" in (workspace.root / f"alike_{again.number}.log").read_text()


@pytest.mark.skipif("OPPO_SLURM_ALL" not in os.environ, reason="OPPO_SLURM_ALL is not set; make test-slurm sets it")
def test_a_heterogeneous_job_is_told_to_stop_then_loses_a_rank_and_finishes_as_if_nothing_had_been(
    cluster: Cluster, workspace: Workspace, undisturbed: Outcome
) -> None:
    config, script = write_config(workspace, "parted"), workspace.root / "parted.sbatch"
    subprocess.run(
        [sys.executable, "-m", "oppo_megatron", "launch", "slurm", config, "--hetero", "--time=10",
         "--job-name=parted", "--signal-s=200", f"--cluster-env={workspace.root / 'cluster.env'}", f"--out={script}"],
        env=os.environ | {"PYTHONPATH": python_path(ROOT)}, cwd=workspace.root, check=True,
    )  # fmt: skip
    job = Job(cluster, workspace, "parted", script)
    job.wait_for_steps(2)
    job.tell_to_stop()
    job.wait_for_a_restart()
    os.kill(job.pid(1), signal.SIGKILL)
    job.wait_until_finished()
    assert_requeued_to_the_same_end(job, undisturbed, 2)
    logs = {path.name for path in (workspace.root / "logs").glob("parted_*.log")}
    parts = ("actor", "scorer")
    assert logs == {f"parted_{job.number}_r{restart}_{part}-0.log" for restart in (0, 1, 2) for part in parts}
    assert "killed: requeued, restart 2 of at most" in (workspace.root / f"parted_{job.number}.log").read_text()
