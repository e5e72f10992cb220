"""One job over two hosts, and rewards from a service: the same run, lost hosts end it, an outage loses nothing."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.rewards import brevity
from tests.support.ppo import SHAPE, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.processes import free_port, python_path
from tests.support.ranks import run_ranks
from tests.support.serving import Service, http, reward_service, scored

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|MASTER_|LOCAL_|GROUP_|SLURM_|TORCHELASTIC|GLOO_SOCKET")
OPPO = [sys.executable, "-m", "oppo_megatron"]
DEADLINE_S = 60.0
START_S = 60.0  # for the imports of all processes on a busy machine


def start(command: Sequence[str | Path], inside: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not LAUNCHERS.search(name)}
    environment |= {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.Popen(
        [*inside, *map(str, command)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


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
        "placement": {"mode": "disaggregated"}, "steps": 2, "overlap.intra": True, "logging.console": "plain",
        "runtime.device": "cpu", "runtime.timeout_s": 60.0,
    }  # fmt: skip
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
    assert weight_distance(ours.actor, theirs.actor) == 0.0 and weight_distance(ours.critic, theirs.critic) == 0.0
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
def test_two_namespaces_run_the_same_job(workspace: Workspace, one_launch: Path, namespaces: Any) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize(("kind", "agents", "reason"), [
    ("killed", True, "Connect|wait timeout"), ("killed", False, "Connect|wait timeout"),
    ("withheld", False, "3000ms|Connect timeout"),
])  # fmt: skip
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


TOKEN_ENV, TOKEN = "OPPO_TEST_REWARD_TOKEN", os.urandom(16).hex()
BREVITY = {"kind": "python", "entry_point": "tests.e2e.rewards:brevity", "options": {"limit": 40}, "weight": 0.25}
OVERLAPPED = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 3, "max": 3}}


@contextmanager
def service(folder: Path, name: str, config: dict[str, Any]) -> Iterator[str]:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"port": 0, "token_env": TOKEN_ENV, **config}))
    process = subprocess.Popen(
        [sys.executable, "-m", "oppo_megatron", "serve", str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {TOKEN_ENV: TOKEN},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("serving rewards at ")), None)
        assert line is not None, "the service has ended"
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


@pytest.mark.long
def test_scores_of_services_are_those_of_the_run_itself(workspace: Workspace, tmp_path: Path) -> None:
    rules = [{"kind": "verifier", "name": "arithmetic"}, BREVITY]
    reward = {"init": SHAPE}
    model = {
        "rewards": [{"kind": "model"}], "reward": reward, "tokenizer": {"path": str(workspace.root / "tokenizer.model")},
        "max_tokens": 200, "runtime": {"device": "cpu"},
    }  # fmt: skip
    with ExitStack() as stack:
        isolated = {"rewards": [rules[0], BREVITY | {"isolate": True}]}
        services = [stack.enter_context(service(tmp_path, name, own)) for name, own in (("model", model), ("rules", isolated))]
        asked = [{"kind": "http", "url": url, "token_env": TOKEN_ENV} for url in services]
        asked[0] |= {"weight": 0.0}
        far = workspace.config("far", steps=2, reward=None, rewards=asked[::-1], **OVERLAPPED)
        run_ranks(1, "tests.e2e.jobs:train_with_environment", config=far, environment={TOKEN_ENV: TOKEN})
    remote = read_outcome(Path(far["run_dir"]))
    parts = [*rules, {"kind": "model", "weight": 0.0}]
    local = run_ppo_ranks(workspace.config("near", steps=2, reward=reward, rewards=parts, **OVERLAPPED))
    assert remote.rollouts == local.rollouts and len({row["reward"] for row in local.rollouts}) > 2
    labels = [url.partition("://")[2] for url in services]
    for far_step, near_step in zip(remote.metrics, local.metrics, strict=True):
        assert far_step["reward_mean"] == near_step["reward_mean"]
        near_model = near_step["reward_parts"]["model"]
        assert far_step["reward_parts"][labels[0]] == pytest.approx(near_model, abs=1e-5) and near_model != 0.0
    files = [path for path in Path(far["run_dir"]).rglob("*.*") if path.suffix != ".safetensors"]
    written = "".join(path.read_text(errors="replace") for path in files)
    assert TOKEN not in written and TOKEN_ENV in written


def right(request: dict[str, Any]) -> bytes:
    return scored(request, lambda item: brevity(**{name: item[name] for name in ("prompt", "response", "fields")}, limit=40))


def late(request: dict[str, Any]) -> bytes:
    time.sleep(0.6)
    return right(request)


BAD_ANSWERS = [
    late, lambda request: http(200, b"<html>busy</html>"), lambda request: scored(request, lambda item: math.nan),
    lambda request: right({"items": request["items"][1:]}), lambda request: http(500, b"down"), lambda request: b"",
    lambda request: right(request)[:-9],
]  # fmt: skip


def one_bad_day(services: list[Service], done: threading.Event) -> None:
    with reward_service(*BAD_ANSWERS, otherwise=right) as service:
        services.append(service)
        while len(service.requests) < len(BAD_ANSWERS) + 2 and not done.is_set():
            time.sleep(0.01)
    time.sleep(1.0)
    port = int(service.url.rpartition(":")[2].partition("/")[0])
    with reward_service(otherwise=right, port=port) as again:
        services.append(again)
        done.wait(timeout=120)


@pytest.mark.long
def test_an_outage_in_a_run_loses_nothing_and_invents_nothing(workspace: Workspace) -> None:
    changes: dict[str, Any] = {"reward": None, "placement": {"mode": "disaggregated"}, **OVERLAPPED}
    services, done = list[Service](), threading.Event()
    bad_day = threading.Thread(target=one_bad_day, args=(services, done))
    bad_day.start()
    try:
        while not services:
            time.sleep(0.01)
        asked = {"kind": "http", "url": services[0].url, "weight": BREVITY["weight"], "timeout_s": 0.4}
        remote = run_ppo_ranks(workspace.config("outage", rewards=[asked], **changes))
    finally:
        done.set()
        bad_day.join()
    local = run_ppo_ranks(workspace.config("no-outage", rewards=[BREVITY], **changes))
    assert not services[0].script and services[1].requests, "the run ended before its service's bad day"
    assert remote.rollouts == local.rollouts and len({row["reward"] for row in local.rollouts}) > 2
    assert weight_distance(remote.actor, local.actor) == weight_distance(remote.critic, local.critic) == 0.0
