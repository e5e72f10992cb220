"""A world of one, and devices that are not there; members of a group know it by one name, as torch gives it."""

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the back end

from oppo_megatron import cores
from oppo_megatron.cluster import process_groups
from oppo_megatron.cluster import world as world_module
from oppo_megatron.cluster.hosts import RankHost
from oppo_megatron.cluster.process_groups import SharedGroups, new_group, ring_pairs, waiting_for
from oppo_megatron.cluster.rendezvous import Meeting
from oppo_megatron.cluster.world import CONNECT_LATE, choose_device, open_world
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.engine.executor import build_links
from oppo_megatron.engine.stream import share
from oppo_megatron.errors import ConfigError, StallError, StreamError, WorldError
from oppo_megatron.layout.placements import ALONE, RolePlacement
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.schedule.links import run_groups
from oppo_megatron.schedule.rounds import Site
from tests.support.schedules import colocated, disaggregated, make_site, split_scorers, turns


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    os.environ.pop(CONNECT_LATE, None)  # ranks that were refused had no time to
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_ranks_in_the_environment_the_world_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with open_world(RuntimeConfig(device="cpu").with_threads(3), {}) as world:
        assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
        assert dist.get_world_size() == 1 and torch.get_num_threads() == 3
        (me,) = world.hosts
        assert (me.rank, me.host, me.device, me.threads) == (0, socket.gethostname(), "cpu", 3)
        assert share(torch.tensor([1.5, -2.0]), 2, 0, world.device).tolist() == [1.5, -2.0]
        assert not torch.backends.cuda.cudnn_sdp_enabled(), "it makes a plan for each shape"
        assert os.environ[CONNECT_LATE] == "1", "or gloo connects all pairs of each group that is made"
    assert not dist.is_initialized() and torch.get_num_threads() == before and CONNECT_LATE not in os.environ
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setenv(CONNECT_LATE, "0")
    with open_world(RuntimeConfig(device="cpu"), {}):
        assert os.environ[CONNECT_LATE] == "0"
    assert os.environ[CONNECT_LATE] == "0", "a user's own choice stays"


def test_a_failed_rank_does_not_wait_for_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the group could wait for messages that no one will take, and be noticed before the reason is told."""
    done = FakeDevices(monkeypatch, 0, []).done
    joined = ("gloo", ANY)
    with pytest.raises(KeyError), open_world(RuntimeConfig(device="cpu"), ranks_of_two(1)):
        raise KeyError("the run failed")
    assert done == [joined]
    with open_world(RuntimeConfig(device="cpu"), ranks_of_two(1)) as world:
        assert (world.rank, world.size) == (5, 8)
    assert done == [joined, joined, ("leave",)]


def test_a_device_that_is_not_there_is_an_error_and_with_device_cpu_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="runtime.device=cpu"), open_world(RuntimeConfig(device="cuda"), {}):
        pass
    with open_world(RuntimeConfig(device="auto"), {}) as world:
        assert world.device.type == "cpu"
    fake = FakeDevices(monkeypatch, 4, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    choose_device(RuntimeConfig(device="cuda"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    choose_device(RuntimeConfig(device="cpu"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    with open_world(RuntimeConfig(device="cpu", timeout_s=77), ranks_of_two(1)) as world:
        assert world.device.type == "cpu" and world.activity.by_stack
        (me,) = world.hosts
        assert me.gpu == ""
    assert fake.done[:-1] == [("gloo", timedelta(seconds=77))]


class FakeDevices:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, others: list[RankHost]):
        self.done: list[Any] = []
        cuda = {
            "is_available": lambda: True, "device_count": lambda: count,
            "set_device": lambda device: self.done.append(("set_device", str(device))),
            "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
        }  # fmt: skip
        group = {"init_process_group": self._init, "destroy_process_group": lambda: self.done.append(("leave",))}
        met = {"tell_hosts": lambda hosts: hosts, "meet": lambda me, *_: Meeting(dist.HashStore(), (me, *others), None)}
        for module, functions in (torch.cuda, cuda), (dist, group), (world_module, met):
            for name, value in functions.items():
                monkeypatch.setattr(module, name, value)

    def _init(self, backend: str, *, timeout: timedelta, **others: Any) -> None:
        assert "device_id" not in others, "with it torch has all ranks split the world's communicator at each new group"
        self.done.append((backend, timeout))


def ranks_of_two(local_rank: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    return {"RANK": str(4 + local_rank), "LOCAL_RANK": str(local_rank), **where}


@pytest.mark.parametrize(("visible", "local_rank", "device"), [(4, 3, "cuda:3"), (4, 0, "cuda:0"), (1, 3, "cuda:0")])
def test_a_rank_takes_its_device_before_nccl(visible: int, local_rank: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes its number on the host, or the one that its launcher shows; messages have the run's deadline on either back end."""
    fake = FakeDevices(monkeypatch, visible, [])
    with open_world(RuntimeConfig(device="auto", timeout_s=77), ranks_of_two(local_rank)) as world:
        assert str(world.device) == device and world.rank == 4 + local_rank
        assert not world.activity.by_stack, "NCCL's calls return at once: where a rank waits, the stack does not tell"
    assert fake.done[:-1] == [("set_device", device), ("cpu:gloo,cuda:nccl", timedelta(seconds=77))]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("cores", "threads"), [(10, 2), (3, 1)])
def test_four_ranks_of_a_host_share_its_cores(device: Any, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevices(monkeypatch, 4, [])
    monkeypatch.setattr("oppo_megatron.cores.usable_cores", lambda: cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with open_world(RuntimeConfig(device=device), ranks_of_two(1)) as world:
        assert torch.get_num_threads() == world.hosts[0].threads == threads


@pytest.mark.parametrize(
    ("omp", "mkl", "configured", "threads"),
    [("3", None, 0, 3), ("3,1", "2", 0, 3), (None, "2", 0, 2), ("3", None, 1, 1), ("", "0", 0, 5), ("many", None, 0, 5)],
)
def test_the_environment_says_how_many_threads_a_rank_has(
    monkeypatch: pytest.MonkeyPatch, omp: str | None, mkl: str | None, configured: int, threads: int
) -> None:
    monkeypatch.setattr("oppo_megatron.cores.usable_cores", lambda: 5)
    for name, value in (("OMP_NUM_THREADS", omp), ("MKL_NUM_THREADS", mkl)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with open_world(RuntimeConfig(device="cpu").with_threads(configured), {}) as world:
        assert torch.get_num_threads() == world.hosts[0].threads == threads


def test_ranks_that_would_share_a_device_are_refused_before_nccl_connects_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number, and the same name, is another device on another host."""
    mine = RankHost(4, socket.gethostname(), None, "cuda:0", 1, 1, "GPU-0")
    others = [replace(mine, rank=0), replace(mine, rank=1, gpu="GPU-1"), replace(mine, rank=2, host="elsewhere")]
    fake = FakeDevices(monkeypatch, 1, others)
    with pytest.raises(ConfigError, match=r"ranks 0,4 of host \S+ would share a CUDA device") as caught:
        with open_world(RuntimeConfig(device="cuda"), ranks_of_two(0)):
            pass
    assert "runtime.device=cpu" in str(caught.value)
    assert fake.done == [("set_device", "cuda:0"), ("cpu:gloo,cuda:nccl", ANY)]
    fake = FakeDevices(monkeypatch, 1, others[1:])
    with open_world(RuntimeConfig(device="cuda"), ranks_of_two(0)):
        assert len(fake.done) == 2


def test_a_device_gets_all_hardware_queues_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that share one wait for each other; without a device nothing is set."""
    variable = "CUDA_DEVICE_MAX_CONNECTIONS"
    for devices, said, expected in ((True, None, "32"), (True, "", "32"), (True, "1", "1"), (False, None, None)):
        monkeypatch.setattr(world_module, "has_cuda", lambda devices=devices: devices)
        monkeypatch.delenv(variable, raising=False)
        if said is not None:
            monkeypatch.setenv(variable, said)
        choose_device(RuntimeConfig(device="auto"))
        assert os.environ.get(variable) == expected


def test_products_do_not_depend_on_where_their_inputs_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ("AuthenticAMD", "avx2", None), ("GenuineIntel", "avx2 avx512f", None), ("GenuineIntel", "avx2", "AUTO,STRICT")
    with mock.patch.dict(os.environ):
        os.environ.pop("MKL_CBWR", None)
        for vendor, flags, expected in cases:
            monkeypatch.setattr(cores, "processor", mock.Mock(return_value=(vendor, "", flags)))
            cores.set_exact_products()
            assert os.environ.get("MKL_CBWR") == expected


GLOO = "[/build/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1234. Check the logs"


def test_a_lost_peer_is_named_with_what_was_waited_for_and_groups_have_the_runs_deadline() -> None:
    config = RuntimeConfig(device="cpu", timeout_s=7)
    with pytest.raises(StallError) as stalled, open_world(config, {}), waiting_for("update actor, step 3"):
        group = new_group([0], desc="role.tp")
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7), "torch's own is half an hour"
        assert group.group_desc == "role.tp"
        raise RuntimeError(GLOO)
    assert str(stalled.value) == (
        "rank 0 waited in vain for `update actor, step 3` (Connection closed by peer [10.0.0.2]:1234). The peer has died "
        "or hangs: see its own message; runtime.timeout_s is 7."
    )
    with pytest.raises(WorldError) as lost, open_world(config, {}):
        raise RuntimeError(GLOO)
    message = str(lost.value)
    assert re.match(r"rank 0 on host .* \(Connection closed by peer \[10.0.0.2\]:1234\)", message)
    assert "runtime.timeout_s, which is 7" in message and "pair.cc" not in message
    for error in RuntimeError("shape mismatch"), StreamError("a chunk message was lost"), KeyError(1):
        with pytest.raises(type(error)) as caught, open_world(config, {}), waiting_for("update actor, step 3"):
            raise error
        assert caught.value is error and not dist.is_initialized(), "other errors stay what they are"


@contextmanager
def seen_from(rank: int, size: int) -> Iterator[dist.Store]:
    dist.init_process_group("fake", store=(store := dist.HashStore()), rank=rank, world_size=size)
    try:
        with mock.patch.object(process_groups, "world_timeout", lambda: timedelta(seconds=60)):
            yield store
    finally:
        dist.destroy_process_group()


SITES = {
    "colocated": colocated((2, 2, 2)), "apart": disaggregated((1, 4, 1), (2, 1, 2)),
    "many listeners": disaggregated((1, 2, 1), (1, 1, 20)), "split scorers": split_scorers((1, 2, 2)),
    "overlapping": make_site((2, 2, 2), {"critic": (0, 4, 1, 1), "reward": (6, 1, 2, 2)}),
    "a rank without a role": Site({"actor": RolePlacement((0, 1), pp=2), "critic": RolePlacement((3, 4), pp=2)}),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_members_of_a_group_call_it_by_one_name(name: str) -> None:
    site = SITES[name]
    size, names = 1 + max(site.ranks), defaultdict[tuple[int, ...], list[set[str]]](list)
    for viewer in range(size):
        own = defaultdict[tuple[int, ...], set[str]](set)
        with seen_from(viewer, size):
            for group in groups_of(site):
                own[tuple(dist.get_process_group_ranks(group))].add(group.group_name)
        for ranks, found in own.items():
            names[ranks].append(found)
    listed = {tuple(sorted(group.ranks)) for group in run_groups(site.placements, {}) if group.label != ALONE}
    assert {ranks for ranks in names if len(ranks) > 1} == listed
    for ranks, found in names.items():
        assert len(found) == len(ranks) and all(each == found[0] for each in found), ranks


def groups_of(site: Site) -> list[dist.ProcessGroup]:
    shared = SharedGroups()
    roles = [build_groups(p.ranks, p.tp, p.pp, role, shared) for role, p in site.placements.items()]
    own = [group for role in roles if role is not None for group in role.made]
    return [*own, *build_links(site).groups.values(), new_group(range(1 + max(site.ranks)), "checkpoints")]


def test_members_alone_would_call_it_by_several() -> None:
    """Shows why all ranks call for all groups.  If this fails, torch has changed, and each rank might call for its own alone."""
    names = set()
    for rank in (0, 1):
        with seen_from(rank, 3):
            if rank == 0:
                dist.new_group([0, 2], use_local_synchronization=True)
            names.add(dist.new_group([0, 1], use_local_synchronization=True).group_name)
    assert len(names) == 2
    with seen_from(4095, 4096) as store:  # a call for others makes and sends nothing
        before = store.num_keys()
        for first in range(0, 4088, 8):
            assert new_group(range(first, first + 8), "others") is dist.GroupMember.NON_GROUP_MEMBER
        assert store.num_keys() == before
        store.set("one", "more")
        assert store.num_keys() == before + 1


@pytest.mark.parametrize("size", range(2, 10))
def test_neighbours_in_a_ring_meet_without_a_circle_of_waiting(size: int) -> None:
    ranks = [10 * number for number in range(size)]
    pairs = ring_pairs(ranks)
    assert {frozenset(pair) for pair in pairs} == {frozenset((rank, (rank + 10) % (10 * size))) for rank in ranks}
    lists = {rank: [pair for pair in pairs if rank in pair] for rank in ranks}
    assert len(pairs) == (size if size > 2 else 1)
    assert turns(lists, lambda pair: pair) == (1 if size == 2 else 2 + size % 2)
