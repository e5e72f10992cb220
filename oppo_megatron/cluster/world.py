"""This rank's device, threads, hosts and default group."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.hosts import RankHost, shared_gpus
from oppo_megatron.cluster.process_groups import connect_pairs, first_clause, is_lost_peer, the_world
from oppo_megatron.cluster.rendezvous import LOOPBACK, MeetingPoint, meet, within
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.cores import CONNECTIONS, MOST_CONNECTIONS, has_cuda, set_exact_products, threads_of_rank
from oppo_megatron.errors import ConfigError, WorldError

CONNECT_S = 10.0  # least time to connect, however late the last rank came
CONNECT_LATE = "TORCH_GLOO_LAZY_INIT"  # read by torch whenever it makes a group


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    hosts: tuple[RankHost, ...] = ()
    activity: Activity = field(default_factory=Activity, compare=False)


def choose_device(config: RuntimeConfig) -> None:
    """Set the environment variables of CUDA and MKL; called first in a rank."""
    set_exact_products()
    if config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron-core would use the current CUDA device
    elif has_cuda() and not os.environ.get(CONNECTIONS, "").strip():  # streams that share a hardware queue wait for each other
        os.environ[CONNECTIONS] = str(MOST_CONNECTIONS)


@contextlib.contextmanager
def open_world(config: RuntimeConfig, environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """Join the ranks (by RANK, WORLD_SIZE, MASTER_*).  Raises ConfigError for a shared GPU, WorldError for missing ranks."""
    rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_rank, local_size = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", size))
    device = _device(config, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    undo = _set_torch(threads_of_rank(config.threads_per_rank, local_size))
    node = environment.get("GROUP_RANK") or environment.get("SLURM_NODEID")  # torchrun's or srun's number
    uuid = "" if device.type != "cuda" else str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    me = RankHost(rank, socket.gethostname(), node, str(device), torch.get_num_threads(), os.getpid(), uuid)
    preferred, backend = False, "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    hosts: tuple[RankHost, ...] = (me,)
    if size == 1:
        preferred = _prefer_interface_of(LOOPBACK)  # gloo listens even without peers
        timeout = timedelta(seconds=config.timeout_s)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        hosts = _join(me, MeetingPoint.from_environment(environment, rank, size), backend, config)
    failed = True
    try:
        yield World(rank, size, device, hosts, Activity(by_stack=device.type == "cpu"))
        failed = False
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise WorldError(
            f"{me} lost its peers{_waiting_in(error)} ({first_clause(error)}): another rank has ended (see its own "
            f"error), or a message exceeded runtime.timeout_s, which is {config.timeout_s:g}"
        ) from error
    finally:
        # A failed rank with peers leaves the group by ending: leaving could wait for messages that nobody receives.
        if size == 1 or not failed:
            dist.destroy_process_group()
        undo()  # a world of one may be a call within another program
        if preferred:
            del os.environ["GLOO_SOCKET_IFNAME"]  # a later world may have several hosts


def _set_torch(threads: int) -> Callable[[], None]:
    """Set threads and switches; return a function that restores them."""
    # gloo connects two ranks in their first message; by default all pairs of a new group, with 2 n store operations per rank.
    late_before = os.environ.get(CONNECT_LATE)
    os.environ.setdefault(CONNECT_LATE, "1")
    threads_before, plans_before = torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.set_num_threads(threads)
    # cuDNN's attention plans every new shape, for up to a second; chunks and responses have many lengths.
    torch.backends.cuda.enable_cudnn_sdp(False)

    def undo() -> None:
        torch.set_num_threads(threads_before)
        torch.backends.cuda.enable_cudnn_sdp(plans_before)
        if late_before is None:
            os.environ.pop(CONNECT_LATE, None)

    return undo


def _device(config: RuntimeConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("runtime.device is 'cuda', but torch finds no CUDA device; set runtime.device=cpu or auto.")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _join(me: RankHost, point: MeetingPoint, backend: str, config: RuntimeConfig) -> tuple[RankHost, ...]:
    """Meet and connect within one deadline; the last to come have at least `CONNECT_S` to connect."""
    deadline = time.monotonic() + config.meeting_s
    meeting = meet(me, point, config.meeting_s)
    if meeting.local_address is not None:
        # The network of the meeting point: a host's own name often resolves to its loopback.
        _prefer_interface_of(meeting.local_address)
    timeout = timedelta(seconds=config.timeout_s)
    meeting.store.set_timeout(timeout)
    store = dist.PrefixStore("groups", meeting.store)

    def connect() -> tuple[RankHost, ...]:
        dist.init_process_group(backend, store=store, rank=me.rank, world_size=point.size, timeout=timeout)
        return tell_hosts(meeting.hosts)

    try:
        hosts = within(max(deadline - time.monotonic(), min(CONNECT_S, config.meeting_s)), connect)
    except (RuntimeError, TimeoutError) as error:
        network = os.environ.get("GLOO_SOCKET_IFNAME", "chosen by gloo")
        raise WorldError(
            f"all {point.size} ranks met at {point}, but {me} could not connect to the others within "
            f"{config.meeting_s:g} s ({first_clause(error)}); its network interface is {network}. Check that "
            "the hosts reach each other on it at any port, or set another in GLOO_SOCKET_IFNAME"
        ) from error
    if shared := shared_gpus(hosts):
        raise ConfigError(
            f"{', '.join(shared)} would share a CUDA device, but NCCL wants one for each rank: start no more ranks on a host "
            "than it has devices (placement.mode=single for one), and show each rank all of them or one of its own "
            "(CUDA_VISIBLE_DEVICES); runtime.device=cpu computes without them"
        )
    return hosts


def tell_hosts(hosts: tuple[RankHost, ...]) -> tuple[RankHost, ...]:
    """Broadcast rank 0's list."""
    connect_pairs(the_world())
    sent = [hosts]
    dist.broadcast_object_list(sent, src=0, device=torch.device("cpu"))
    return sent[0]


def _prefer_interface_of(address: str) -> bool:
    """Let gloo use an address's interface unless the user set one; True if set here."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return True
    return False


def _waiting_in(error: Exception) -> str:
    package = str(Path(__file__).parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(package)]
    if len(frames) < 2:  # only this module's own frame
        return ""
    return f" in {frames[-1].name}, {Path(frames[-1].filename).relative_to(package)}:{frames[-1].lineno}"
