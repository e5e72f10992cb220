"""A world of one, and devices that are not there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from oppo_megatron.cluster.process_groups import new_group
from oppo_megatron.cluster.rendezvous import Meeting
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.engine.stream import share
from oppo_megatron.errors import ConfigError, WorldError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_ranks_in_the_environment_the_world_is_one_process() -> None:
    before = torch.get_num_threads()
    with open_world(RuntimeConfig(device="cpu", threads_per_rank=3), {}) as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
        assert dist.get_world_size() == 1 and torch.get_num_threads() == 3
        values = torch.tensor([1.5, -2.0])
        assert share(values, 2, 0, world.device).tolist() == [1.5, -2.0]
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "it makes a plan for each shape"
    assert not dist.is_initialized() and torch.get_num_threads() == before
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_world_of_one_is_left_also_by_a_run_that_failed() -> None:
    with pytest.raises(KeyError, match="the run failed"), open_world(RuntimeConfig(device="cpu"), {}):
        raise KeyError("the run failed")
    assert not dist.is_initialized()


def test_a_failed_rank_does_not_wait_for_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the group could wait for messages that no one will take, and be noticed before the reason is told."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append("join"))
    monkeypatch.setattr(
        "oppo_megatron.cluster.world.meet", lambda *args: Meeting(dist.HashStore(), hosts=(), local_address=None)
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("leave"))
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(KeyError), open_world(RuntimeConfig(device="cpu"), ranks):
        raise KeyError("the run failed")
    assert calls == ["join"]
    with open_world(RuntimeConfig(device="cpu"), ranks) as world:
        assert (world.rank, world.size) == (1, 2)
    assert calls == ["join", "join", "leave"]


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="runtime.device=cpu"), open_world(RuntimeConfig(device="cuda"), {}):
        pass
    with open_world(RuntimeConfig(device="auto"), {}) as world:
        assert world.device.type == "cpu"


def test_a_world_of_one_knows_its_host() -> None:
    with open_world(RuntimeConfig(device="cpu", threads_per_rank=2), {}) as world:
        (me,) = world.hosts
    assert (me.rank, me.host, me.device, me.threads) == (0, socket.gethostname(), "cpu", 2)


def test_groups_keep_the_deadline_of_the_run() -> None:
    """torch gives a new group its own default, half an hour."""
    with open_world(RuntimeConfig(device="cpu", timeout_s=7), {}):
        group = new_group([0], desc="role.tp")
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
        assert group.group_desc == "role.tp"


def test_an_error_of_the_back_end_tells_who_lost_its_peers() -> None:
    gloo = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1234. Check"
    with (
        pytest.raises(WorldError, match=r"rank 0 on host .* \(Connection closed by peer \[10.0.0.2\]:1234\)") as caught,
        open_world(RuntimeConfig(device="cpu", timeout_s=7), {}),
    ):
        raise RuntimeError(gloo)
    assert "runtime.timeout_s, which is 7" in str(caught.value) and "pair.cc" not in str(caught.value)
    with pytest.raises(RuntimeError, match="shape") as other, open_world(RuntimeConfig(device="cpu"), {}):
        raise RuntimeError("shape mismatch")
    assert not isinstance(other.value, WorldError)
