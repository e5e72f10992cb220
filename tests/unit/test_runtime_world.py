"""A world of one, and devices that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.runtime.stream import share
from oppo_megatron.runtime.world import open_world


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_ranks_in_the_environment_the_world_is_one_process() -> None:
    with open_world(RuntimeConfig(device="cpu", threads_per_rank=3), {}) as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
        assert dist.get_world_size() == 1 and torch.get_num_threads() == 3
        values = torch.tensor([1.5, -2.0])
        assert share(values, 2, 0, world.device).tolist() == [1.5, -2.0]
    assert not dist.is_initialized()


def test_a_world_of_one_is_left_also_by_a_run_that_failed() -> None:
    with pytest.raises(KeyError, match="the run failed"), open_world(RuntimeConfig(device="cpu"), {}):
        raise KeyError("the run failed")
    assert not dist.is_initialized()


def test_a_failed_rank_does_not_wait_for_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the group could wait for messages that no one will take, and be noticed before the reason is told."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append("join"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("leave"))
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
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
