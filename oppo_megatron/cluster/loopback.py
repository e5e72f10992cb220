"""A store on the loopback for ranks of one host: torch's own stores listen on every address of the host."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

LOOPBACK = "127.0.0.1"
BACKEND = "oppo-loopback"  # the name of the rendezvous
BACKLOG = 1024  # ranks that knock at once


def is_loopback(address: str) -> bool:
    """True if other hosts cannot reach the address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_store(port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens on the loopback only; port 0: any free port.  Raises OSError if the port is taken."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        descriptor = listener.detach()  # the store closes it
    except OSError:
        listener.close()
        raise
    return dist.TCPStore(
        LOOPBACK, port, None, True, timeout, wait_for_workers=False, multi_tenant=False, master_listen_fd=descriptor
    )


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of torch's agent, in a store of this process, for the ranks of one host."""

    def __init__(self, run_id: str, store: dist.TCPStore, timeout: timedelta):
        super().__init__(LOOPBACK, store.port, 0, 1, run_id, int(timeout.total_seconds()))
        self._store = store

    def get_backend(self) -> str:
        return BACKEND
