"""Nothing that a run of one host opens can be reached from another."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from oppo_megatron.cluster.rendezvous import is_loopback, loopback_store
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import RuntimeConfig
from tests.support.processes import python_path

ENTRY = """
import os
import torch
import torch.distributed as dist
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.cluster.world import open_world
from tests.unit.test_listening import listeners

def run(kind, config):
    with open_world(RuntimeConfig(device="cpu")) as world:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=pair)
        pids = [os.getpid()] if world.rank else [os.getpid(), os.getppid()]
        line = " ".join(["LISTENS", *(address for pid in pids for address, _ in listeners(pid))]) + os.linesep
        os.write(1, line.encode())  # at once: the other rank writes to the same pipe
        dist.barrier()

if __name__ == "__main__":
    from oppo_megatron.cli.launch import launch
    launch("train", None, 2, "entry_of_test:run")
"""


def listeners(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_ranks_that_oppo_starts(tmp_path: Path) -> None:
    (tmp_path / "entry_of_test.py").write_text(ENTRY)
    path = python_path(tmp_path, Path(__file__).resolve().parents[2])
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    environment = {k: v for k, v in os.environ.items() if k not in names} | {"PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "entry_of_test.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    lines = [line.split()[1:] for line in found.stdout.splitlines() if line.startswith("LISTENS")]
    assert len(lines) == 2 and sum(map(len, lines)) >= 3, found.stdout + found.stderr
    assert all(ipaddress.ip_address(address).is_loopback for line in lines for address in line), lines


def test_a_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = listeners(os.getpid())
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}):
        opened = listeners(os.getpid()) - before
        assert all(ipaddress.ip_address(address).is_loopback for address, _ in opened), opened
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "a later run may be of several hosts"


def test_a_store_on_the_loopback() -> None:
    assert all(is_loopback(address) for address in ("localhost", "127.0.0.1", "127.8.8.8", "::1"))
    assert not any(is_loopback(address) for address in ("10.0.0.2", "node-1", "0.0.0.0", ""))
    store = loopback_store(0, timedelta(seconds=5))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        loopback_store(store.port, timedelta(seconds=5))
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
