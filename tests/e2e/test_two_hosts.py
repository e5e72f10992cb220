"""One job over two hosts, by torchrun agents, srun's environment, and network namespaces: the same run, and lost hosts end it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ports import free_port
from tests.support.ppo import Workspace, read_outcome, weight_distance
from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|MASTER_|LOCAL_|GROUP_|SLURM_|TORCHELASTIC|GLOO_SOCKET")
OPPO = [sys.executable, "-m", "oppo_megatron"]
DEADLINE_S = 60.0
START_S = 60.0  # for the imports of all processes on a busy machine


def start(command: Sequence[str | Path], inside: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not LAUNCHERS.search(name)}
    environment |= {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.Popen(
        [*inside, *map(str, command)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def ends(processes: Sequence[subprocess.Popen[str]], timeout_s: float = 120) -> list[tuple[int, str]]:
    until = time.monotonic() + timeout_s
    try:
        outputs = [process.communicate(timeout=max(0.1, until - time.monotonic()))[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@pytest.fixture
def port() -> str:
    return str(free_port())


def write_config(workspace: Workspace, name: str, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "placement": {"mode": "disaggregated"},
        "steps": 2,
        "overlap.intra": True,
        "logging.console": "plain",
        "runtime.device": "cpu",
        "runtime.timeout_s": 60.0,
    }
    path = workspace.root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(workspace.config(name, **(settings | changes))))
    return path


def agent(node: int, port: str, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
    meeting = ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    return start([*torchrun, *meeting, "-m", *command], **variables)


def slurm(node: int, port: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(node), "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": str(node),
        "SLURM_NNODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def torchrun_ranks(node: int, address: str, port: str) -> dict[str, str]:
    return {
        "RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address, "MASTER_PORT": port,
    }  # fmt: skip


def run_dir(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["run_dir"])


@pytest.fixture(scope="module")
def one_launch(workspace: Workspace) -> Path:
    config = write_config(workspace, "one")
    ((code, output),) = ends([start([*OPPO, "train", config])])
    assert code == 0, output
    return run_dir(config)


def assert_same_run(config: Path, one_launch: Path, nodes: Sequence[str | None]) -> None:
    ours, theirs = read_outcome(run_dir(config)), read_outcome(one_launch)
    assert ours.tokens() == theirs.tokens() and ours.batches() == theirs.batches()
    assert weight_distance(ours.actor, theirs.actor) == 0.0
    assert weight_distance(ours.critic, theirs.critic) == 0.0
    ranks = json.loads((run_dir(config) / "hosts.json").read_text())["ranks"]
    assert [(rank["rank"], rank["node"]) for rank in ranks] == list(enumerate(nodes))


@pytest.mark.long
def test_two_torchrun_agents_run_the_same_job(workspace: Workspace, one_launch: Path, port: str) -> None:
    config = write_config(workspace, "agents")
    results = ends([agent(node, port, "oppo_megatron", "train", config) for node in (0, 1)])
    assert [code for code, _ in results] == [0, 0], results
    name = re.escape(socket.gethostname())
    for node in (0, 1):
        assert re.search(rf"rank {node}: host {name} \(node {node}, cpu, 1 thread\)", results[0][1]), results[0][1]
    assert_same_run(config, one_launch, ["0", "1"])


@pytest.mark.long
def test_two_srun_tasks_run_the_same_job(workspace: Workspace, one_launch: Path, port: str) -> None:
    config = write_config(workspace, "srun", **{"logging.console": "off"})
    results = ends([start([*OPPO, "train", config], **slurm(node, port)) for node in (0, 1)])
    assert results[0][0] == results[1][0] == 0, results
    assert "host" not in results[0][1], "with the console off the map is only in hosts.json"
    assert_same_run(config, one_launch, ["0", "1"])


@pytest.fixture
def namespaces() -> Iterator[tuple[list[str], list[str], str]]:
    names = [f"oppo{os.getpid()}{side}" for side in "ab"]
    cables = [f"o{os.getpid()}{side}" for side in "ab"]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    steps = [["netns", "add", name] for name in names]
    steps.append(["link", "add", cables[0], "type", "veth", "peer", "name", cables[1]])
    for side, (name, cable) in enumerate(zip(names, cables, strict=True)):
        steps.append(["link", "set", cable, "netns", name])
        steps.append(["-n", name, "address", "add", f"10.213.7.{side + 1}/24", "dev", cable])
        steps += [["-n", name, "link", "set", device, "up"] for device in (cable, "lo")]
    try:
        for step in steps:
            done = subprocess.run(["ip", *step], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]], "10.213.7.1"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.long
def test_two_network_namespaces_run_the_same_job(
    workspace: Workspace, one_launch: Path, namespaces: tuple[list[str], list[str], str]
) -> None:
    """Neither host's name resolves to an address that the other reaches: the network that leads to MASTER_ADDR is used."""
    *inside, address = namespaces
    config = write_config(workspace, "namespaces")
    ranks = [start([*OPPO, "train", config], inside[n], **torchrun_ranks(n, address, "29500")) for n in (0, 1)]
    results = ends(ranks)
    assert [code for code, _ in results] == [0, 0], results
    assert_same_run(config, one_launch, [None, None])


@pytest.mark.long
def test_a_host_that_does_not_come(workspace: Workspace, port: str) -> None:
    config = write_config(workspace, "missing", **{"runtime.timeout_s": 30.0})
    started = time.monotonic()
    ((code, output),) = ends([start([*OPPO, "train", config], **slurm(0, port))], DEADLINE_S + START_S)
    assert time.monotonic() - started < DEADLINE_S + START_S
    assert code == 2 and "Traceback" not in output, output
    assert f"oppo train [rank 0]: rank 0 on host {socket.gethostname()} waited 60 s at 127.0.0.1:{port}" in output
    assert "1 of 2 ranks came: rank 1 missing" in output


JOB = """
import sys, os
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.cli.launch import launch
from oppo_megatron.errors import OppoError

def run(kind, config):
    import torch
    import torch.distributed as dist
    from oppo_megatron.cluster.process_groups import new_group
    from oppo_megatron.cluster.world import open_world
    with open_world(config) as world:
        pair = new_group([0, 1], desc="pair")
        if world.rank == 1 and kind == "killed":
            os.kill(os.getpid(), 9)
        if world.rank == 1 and kind == "withheld":
            import time; time.sleep(2 * config.timeout_s); return
        dist.all_reduce(torch.ones(1), group=pair)

if __name__ == "__main__":
    try:
        launch(sys.argv[1], RuntimeConfig(device="cpu", timeout_s=float(sys.argv[2])), 2, entry="job_of_hosts:run")
    except OppoError as error:
        print(f"oppo: {error}", file=sys.stderr)
        sys.exit(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "agents", "reason"),
    [
        pytest.param("killed", True, "Connect|wait timeout", marks=pytest.mark.long),
        ("killed", False, "Connect|wait timeout"),
        pytest.param("withheld", False, "3000ms", marks=pytest.mark.long),
    ],
)
def test_the_other_host_is_told_when_one_fails(tmp_path: Path, port: str, kind: str, agents: bool, reason: str) -> None:
    """Covers a group of its own, to which torch would have given half an hour."""
    (tmp_path / "job_of_hosts.py").write_text(JOB)
    path = {"PYTHONPATH": python_path(tmp_path, ROOT)}
    limit_s = "3" if kind == "withheld" else "5"  # gloo may knock five times at the door of one that is killed so early
    if agents:
        hosts = [agent(node, port, "job_of_hosts", kind, limit_s, **path) for node in (0, 1)]
    else:
        job = [sys.executable, tmp_path / "job_of_hosts.py", kind, limit_s]
        hosts = [start(job, **path, **torchrun_ranks(node, "127.0.0.1", port)) for node in (0, 1)]
    (code, output), _ = ends(hosts, 2 * START_S)
    assert code != 0, output
    assert agents or "Traceback" not in output, output  # torchrun shows one of its own
    # The other may be killed while this one is still making the group.
    within = r"( in new_group, \S+)?"
    assert re.search(rf"oppo: rank 0 on host \S+ lost its peers{within} \([^)]*({reason})", output), output
    assert f"runtime.timeout_s, which is {limit_s}" in output
